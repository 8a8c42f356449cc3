"""Known issues of AITER's releases, as a table. A plan that meets one carries it as a warning."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from attrs import frozen

from ..backends.aiter.releases import NEWEST, OLDEST, ReleaseRange
from .buffers import byte_text
from .heads import MLAHeadPlan
from .native import FOLD
from .sizes import Case, metadata_shapes

IGNORES_FROM = 32
"""Sequences from which AITER_MLA_DECODE_PERSISTENT_MAX_BATCH, unless set, makes the decode leave its plan aside."""

MOST_SPLITS = 16
"""Splits that the decode without a plan chooses at most."""


@frozen(kw_only=True)
class Use:
    """The parts of a plan that an issue depends on."""

    heads: MLAHeadPlan
    case: Case
    releases: ReleaseRange
    value_width: int


@frozen
class KnownIssue:
    """The releases that have it, the plans that meet it, and a sentence."""

    since: str
    until: str
    when: Callable[[Use], bool]
    says: Callable[[Use], str]


def _ignored(use: Use) -> bool:
    case = use.case
    shape = (case.arch, case.heads, case.queries) == ("gfx950", FOLD, 1)
    return shape and case.bf16 and not case.sparse and case.batch >= IGNORES_FROM


def _says_ignored(use: Use) -> str:
    scratch = use.case.batch * MOST_SPLITS * use.heads.kernel_heads * (use.value_width + 1) * 4
    return (
        f"the decode ignores its plan in steps of {IGNORES_FROM} sequences or more, and says nothing: it splits by itself "
        f"and allocates up to {byte_text(scratch)} for it. AITER_MLA_DECODE_PERSISTENT_MAX_BATCH=0 keeps the plan"
    )


def _repointed(use: Use) -> bool:
    return use.heads.fold > 1 and use.case.queries_per_sequence > 1


def _says_repointed(use: Use) -> str:
    return (
        f"{use.heads.kernel_heads} heads are folded with several queries per sequence, and the decode points its output "
        "at new storage: views of it, its base tensor and its address in a CUDA graph keep what was there before"
    )


def _says_exploding(use: Use) -> str:
    case = use.case
    asked = case.max_split_per_batch > 0
    worst = case if asked else attrs.evolve(case, max_split_per_batch=case.cu_count)
    release = next(each for each in use.releases if each in _EXPLODING)
    partials = metadata_shapes(worst, release)["reduce_partial_map"][0]
    rows = partials * case.queries_per_sequence
    scratch = rows * (use.heads.kernel_heads // use.heads.fold) * (use.value_width + 1) * 4
    which = f"max_split_per_batch {case.max_split_per_batch} makes" if asked else "max_split_per_batch, if given, makes"
    return (
        f"{which} reduce_partial_map count every split for every tile: {partials} entries, and {byte_text(scratch)} of scratch "
        "in every decode. v0.1.17-rc0 counts them once"
    )


_EXPLODING = ReleaseRange(OLDEST, "v0.1.16.post6")

KNOWN_ISSUES: tuple[KnownIssue, ...] = (
    KnownIssue("v0.1.17-longctx", NEWEST, _ignored, _says_ignored),
    KnownIssue(OLDEST, NEWEST, _repointed, _says_repointed),
    KnownIssue(_EXPLODING.first, _EXPLODING.last, lambda use: not use.case.intra_batch, _says_exploding),
)


def known_issues(use: Use) -> tuple[str, ...]:
    """Those that a plan meets, one sentence each with the releases that have it."""
    found = []
    for issue in KNOWN_ISSUES:
        releases = ReleaseRange(issue.since, issue.until)
        if releases.overlaps(use.releases) and issue.when(use):
            found.append(f"AITER {releases}: {issue.says(use)}")
    return tuple(found)
