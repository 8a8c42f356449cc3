"""How large the attention metadata is, release by release: a statement of its own, from the recorded rules, without experimental kernels."""

from __future__ import annotations

import math
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
        tokens: query tokens per request as they are counted, q': 1 for sparse attention.
        fp8: whether queries and cache are of the architecture's fp8.
        bf16: whether both are bfloat16.
    """

    release: str
    arch: str
    heads: int
    tokens: int
    fp8: bool
    bf16: bool

    def since(self, first: str) -> bool:
        """Whether this release or an earlier one introduced a rule."""
        return between(self.release, first, None)

    @property
    def packed(self) -> int:
        """Rows of one request: P = q' * H."""
        return self.tokens * self.heads


def _packs_64(case: Case) -> bool:
    """Tiles of 64 rows, v0.1.17-rc0 and later."""
    if case.arch != "gfx950" or not case.since("v0.1.17-rc0"):
        return False
    if case.since("v0.1.20") and case.fp8 and case.heads == 32 and case.tokens == 3:
        return True
    return case.bf16 and case.packed >= 64 and case.heads <= 64 and (case.packed < 128 or case.heads == 48)


def _packs_128(case: Case) -> bool:
    """Tiles of 128 rows, as all that is native is packed."""
    if case.heads == 16:
        return True
    if not case.fp8 or case.arch not in COMPUTE_UNITS:
        return False
    if case.heads == 128:
        return True
    if case.arch == "gfx950":
        return case.heads == 64 or (case.heads == 32 and case.tokens == 4)
    return case.heads == 64 and case.tokens == 1 and case.since("v0.1.17-longctx")


def tiles_per_request(case: Case) -> int:
    """T: tiles of query rows per request."""
    if _packs_64(case):
        return case.tokens if 2 * case.heads > 64 else math.ceil(case.packed / 64)
    if _packs_128(case):
        return math.ceil(case.packed / 128)
    wide = case.packed >= 128 or case.heads > 64
    if case.arch == "gfx950" and case.bf16 and wide and case.heads != 48:
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
    if heads % 8:
        raise AssertionError("num_head_qo % 8 == 0")
    fp8 = q_dtype == kv_dtype == (torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn)
    tokens, both_bf16 = 1 if is_sparse else longest, q_dtype == kv_dtype == torch.bfloat16
    case = Case(release, arch, heads, tokens, fp8, both_bf16)
    slots = COMPUTE_UNITS[arch]
    tiles = tiles_per_request(case)
    requests = batch * longest if is_sparse else batch
    total = requests * tiles
    work = partial = total * slots
    if fast:
        work = (requests + slots - 1) * tiles
        partial = min(requests + slots - 1, 2 * (slots - 1)) * tiles
    if most_splits > 0:
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
