"""What releases of AITER are known to do with a plan that nobody would expect of them, as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from ..backends.aiter.releases import NEWEST, ReleaseRange, before
from .buffers import byte_text
from .native import FOLD, FOLDS_QUERIES_SINCE, folds_into_queries
from .sizes import metadata_shapes

if TYPE_CHECKING:
    from .plan import MLAMetadataPlan

IGNORES_FROM = 32
"""Sequences from which AITER_MLA_DECODE_PERSISTENT_MAX_BATCH, unless set, makes the decode leave its plan aside."""

MOST_SPLITS = 16
"""Splits that the decode without a plan chooses at most."""


@frozen
class Misbehaviour:
    """One thing, the releases that do it, and when."""

    since: str
    until: str
    when: Callable[[MLAMetadataPlan], bool]
    says: Callable[[MLAMetadataPlan], str]


def _ignored(plan: MLAMetadataPlan) -> bool:
    case = plan.case
    shape = (case.arch, case.heads, case.queries) == ("gfx950", FOLD, 1)
    return shape and case.bf16 and not case.sparse and case.batch >= IGNORES_FROM


def _says_ignored(plan: MLAMetadataPlan) -> str:
    scratch = plan.batch * MOST_SPLITS * plan.heads.kernel_heads * (plan.value_width + 1) * 4
    return (
        f"the decode ignores its plan in steps of {IGNORES_FROM} sequences or more, and says nothing: it splits by itself "
        f"and allocates up to {byte_text(scratch)} for it. AITER_MLA_DECODE_PERSISTENT_MAX_BATCH=0 keeps the plan"
    )


def _repointed(plan: MLAMetadataPlan) -> bool:
    case, queries = plan.case, 1 if plan.sparse else plan.max_query_length
    turned = all(folds_into_queries(case.heads, queries, case.arch, case.q, case.kv, each) for each in plan.releases)
    return plan.heads.fold > 1 and queries > 1 and not turned


def _says_repointed(plan: MLAMetadataPlan) -> str:
    return (
        f"{plan.heads.kernel_heads} heads are folded with several queries per sequence, and the decode points its output "
        "at new storage: views of it, its base tensor and its address in a CUDA graph keep what was there before"
    )


def _says_exploding(plan: MLAMetadataPlan) -> str:
    case = plan.case
    asked = case.max_split_per_batch > 0
    worst = case if asked else attrs.evolve(case, max_split_per_batch=case.cu_count)
    release = next(each for each in plan.releases if each in _EXPLODING)
    partials = metadata_shapes(worst, release)["reduce_partial_map"][0]
    rows = partials * (1 if case.sparse else case.queries)
    scratch = rows * (plan.heads.kernel_heads // plan.heads.fold) * (plan.value_width + 1) * 4
    which = f"max_split_per_batch {case.max_split_per_batch} makes" if asked else "max_split_per_batch, if given, makes"
    return (
        f"{which} reduce_partial_map count every split for every tile: {partials} entries, and {byte_text(scratch)} of scratch "
        "in every decode. v0.1.17-rc0 counts them once"
    )


_EXPLODING = ReleaseRange("v0.1.16", "v0.1.16.post6")

M = Misbehaviour
MISBEHAVIOUR: tuple[Misbehaviour, ...] = (
    M("v0.1.17-longctx", NEWEST, _ignored, _says_ignored),
    M("v0.1.11.post1", NEWEST, _repointed, _says_repointed),
    M(_EXPLODING.first, _EXPLODING.last, lambda plan: not plan.case.intra_batch, _says_exploding),
    M(
        "v0.1.6.post2",
        "v0.1.7.post5",
        lambda _: True,
        lambda _: (
            "its metadata call cannot be made: declaration and compiled function disagree about the order of two "
            "buffers"
        ),
    ),
    M(
        FOLDS_QUERIES_SINCE,
        before("v0.1.11.post1"),
        _repointed,
        lambda plan: (
            f"{plan.heads.kernel_heads} heads are folded with several queries per sequence as they lie in "
            "memory, which mixes heads and queries unless the metadata makes up for it; later releases turn them first"
        ),
    ),
)


def warnings_of(plan: MLAMetadataPlan) -> tuple[str, ...]:
    """What is known of the releases of a plan, one sentence each with the releases it is known of."""
    found = []
    for each in MISBEHAVIOUR:
        releases = ReleaseRange(each.since, each.until)
        if releases.overlaps(plan.releases) and each.when(plan):
            found.append(f"AITER {releases}: {each.says(plan)}")
    return tuple(found)
