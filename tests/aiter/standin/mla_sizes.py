"""How large the attention metadata is, release by release: a statement of its own, from the recorded rules."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from .recorded import between

COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
Shapes = tuple[tuple[Any, torch.dtype], ...]


@dataclass(frozen=True)
class Case:
    """What the number of tiles per request depends on.

    Attributes:
        release: the release whose rules hold.
        arch: the architecture.
        heads: query heads of this rank, H.
        tokens: query tokens per request as they are counted, q': 1 for sparse attention in newer releases.
        longest: query tokens per request, Q.
        q_fp8: whether queries are of the architecture's fp8.
        kv_fp8: whether the cache is.
        bf16: whether both are bfloat16.
    """

    release: str
    arch: str
    heads: int
    tokens: int
    longest: int
    q_fp8: bool
    kv_fp8: bool
    bf16: bool

    def since(self, first: str) -> bool:
        """Whether this release or an earlier one introduced a rule."""
        return between(self.release, first, None)

    def within(self, first: str, last: str) -> bool:
        """Whether a rule that held from one release to another holds."""
        return between(self.release, first, last)

    @property
    def fp8(self) -> bool:
        """Whether queries and cache are both fp8."""
        return self.q_fp8 and self.kv_fp8

    @property
    def packed(self) -> int:
        """Rows of one request: P = q' * H."""
        return self.tokens * self.heads


def experimental() -> bool:
    """Whether AITER_ENABLE_EXPERIMENTAL asks for the experimental kernels."""
    return int(os.environ.get("AITER_ENABLE_EXPERIMENTAL", "0")) != 0


def _packs_64(case: Case) -> bool:
    """Tiles of 64 rows, v0.1.17-rc0 and later."""
    if case.arch != "gfx950" or not case.since("v0.1.17-rc0"):
        return False
    if case.since("v0.1.20") and case.fp8 and case.heads == 32 and case.tokens == 3:
        return True
    return case.bf16 and case.packed >= 64 and case.heads <= 64 and (case.packed < 128 or case.heads == 48)


def _folds(case: Case) -> bool:
    """The fold of query tokens into heads on gfx950 with fp8: v0.1.12 to v0.1.15.post3."""
    if not case.within("v0.1.12", "v0.1.15.post3") or case.arch != "gfx950" or not case.fp8 or case.heads <= 16:
        return False
    if case.since("v0.1.13.dev0") and case.heads == 32 and case.longest == 2:
        return False
    return case.longest * (case.heads // 16) == 4 or (case.heads == 64 and case.longest == 2)


def _wide_fp8(case: Case) -> bool:
    """128 heads in fp8, whose architectures changed from release to release."""
    if case.heads != 128:
        return False
    if case.since("v0.1.16"):
        return case.fp8 and case.arch in ("gfx942", "gfx950")
    if case.since("v0.1.15-rc0"):
        return case.fp8 and (case.arch == "gfx942" or (case.arch == "gfx950" and case.tokens != 4))
    if case.since("v0.1.14-rc0"):
        return case.fp8 and case.arch in ("gfx942", "gfx950")
    if case.since("v0.1.12"):
        return case.fp8 and case.arch == "gfx942"
    return case.fp8 if case.since("v0.1.9") else case.kv_fp8


def _packs_128(case: Case) -> bool:
    """Tiles of 128 rows, as all that is native is packed."""
    if case.heads == 16 or _wide_fp8(case) or _folds(case):
        return True
    if not case.fp8:
        return case.within("v0.1.13.dev0", "v0.1.13.post1") and (
            case.arch == "gfx950" and case.bf16 and case.packed % 128 == 0
        )
    full = case.arch == "gfx942" and case.heads in (32, 64) and case.packed == 128
    if full and case.since("v0.1.14-rc0") and experimental():
        return True
    four_or_64 = (case.heads == 32 and case.tokens == 4) or case.heads == 64
    if four_or_64 and case.arch == "gfx950" and case.since("v0.1.16"):
        return True
    if case.heads != 64 or case.tokens != 1:
        return False
    since = "v0.1.12.post1" if case.arch == "gfx950" else "v0.1.17-longctx"
    return case.arch in ("gfx942", "gfx950") and case.since(since)


def tiles_per_request(case: Case) -> int:
    """T: tiles of query rows per request."""
    if _packs_64(case):
        return case.tokens if 2 * case.heads > 64 else math.ceil(case.packed / 64)
    if _packs_128(case):
        return math.ceil(case.packed / 128)
    wide = case.packed >= 128 or case.heads > 64
    if case.since("v0.1.14-rc0") and case.arch == "gfx950" and case.bf16 and wide and case.heads != 48:
        return case.tokens if 2 * case.heads > 128 else math.ceil(case.packed / 128)
    return math.ceil(case.packed / 16)


def mla_shapes(
    release: str,
    arch: str,
    batch: int,
    longest: int,
    heads: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast: bool,
    splits: int = 32,
    intra_batch: bool = False,
    most_splits: int = -1,
) -> Shapes:
    """(shape, dtype) of work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, final and partial map.

    Raises:
        AssertionError: a head count that the release refuses.
    """
    multiple = 8 if between(release, "v0.1.12", None) else 16
    if heads % multiple:
        raise AssertionError(f"num_head_qo % {multiple} == 0")
    fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    tokens = 1 if is_sparse and between(release, "v0.1.13.dev0", None) else longest
    both_bf16 = q_dtype == kv_dtype == torch.bfloat16
    case = Case(release, arch, heads, tokens, longest, q_dtype == fp8, kv_dtype == fp8, both_bf16)
    slots = COMPUTE_UNITS[arch]
    if case.since("v0.1.14-rc0") and arch == "gfx950" and case.fp8 and heads * longest == 64 and experimental():
        slots *= 2
    tiles = tiles_per_request(case)
    requests = batch * longest if is_sparse else batch
    total = requests * tiles
    work = partial = total * slots
    if fast:
        work = (requests + slots - 1) * tiles if case.since("v0.1.8") else total + slots - 1
        partial = min(requests + slots - 1, 2 * (slots - 1)) * tiles
    if most_splits > 0 and case.since("v0.1.16"):
        cap = min(slots, most_splits * requests)
        partial = max(partial, total + cap if case.since("v0.1.17-rc0") else total * cap)
    if intra_batch:
        work = partial = total * splits
    return (
        (2, torch.uint64),
        (slots + 1, torch.int32),
        ((work, 8), torch.int32),
        (total + 1, torch.int32),
        ((total, 2), torch.int32),
        (partial, torch.int32),
    )


def ps_shapes(arch: str, batch: int, kv_heads: int, longest: int, granularity: int) -> Shapes:
    """The same for prefill; the rule has not changed since v0.1.10.post1."""
    slots = COMPUTE_UNITS[arch]
    clusters = slots // math.gcd(kv_heads, slots)
    tiles = math.ceil(longest / granularity)
    return (
        (2, torch.uint64),
        (slots + 1, torch.int32),
        (((batch + clusters - 1) * tiles * kv_heads, 8), torch.int32),
        (batch * tiles + 1, torch.int32),
        ((batch * tiles, 2), torch.int32),
        (min(batch + clusters - 1, (clusters - 1) * 2) * tiles, torch.int32),
    )
