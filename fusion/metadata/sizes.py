"""How large AITER's six metadata buffers are, release by release, as one table of rules.

What changed from release to release is mostly how many tiles the rows of one sequence, queries times heads, are cut
into. The rules are data; `tests/metadata/test_metadata_formula.py` compares them with AITER's own functions in a checkout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attrs import frozen

from ..backends.aiter.releases import OLDEST, is_after
from .dtypes import Dtype

Shapes = dict[str, tuple[int, ...]]

BUFFERS = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)
"""In the order in which AITER's functions return their sizes."""

BUFFER_DTYPE = {name: "uint64" if name == "work_metadata_ptrs" else "int32" for name in BUFFERS}


@frozen(kw_only=True)
class Case:
    """What the sizes depend on."""

    batch: int
    queries: int
    "Most queries per sequence."
    heads: int
    "As the kernel gets them."
    q: Dtype
    kv: Dtype
    arch: str
    cu_count: int
    sparse: bool = False
    fast: bool = True
    num_kv_splits: int = 32
    intra_batch: bool = False
    max_split_per_batch: int = -1
    experimental: bool = False
    "AITER_ENABLE_EXPERIMENTAL."

    @property
    def sequences(self) -> int:
        """Most sequences of a step. In sparse attention each query is one, with its own list of keys."""
        return self.batch * self.queries if self.sparse else self.batch

    @property
    def queries_per_sequence(self) -> int:
        """Most queries of such a sequence."""
        return 1 if self.sparse else self.queries

    @property
    def fp8(self) -> bool:
        """Query and cache in fp8."""
        return self.q == self.kv == "fp8"

    @property
    def bf16(self) -> bool:
        """Query and cache in bf16."""
        return self.q == self.kv == "bf16"


@frozen
class Tiling:
    """Into how many tiles the rows of a sequence are cut."""

    since: str
    arch: tuple[str, ...]
    "Empty: any."
    when: Callable[[Case, int, int], bool]
    "From the case, the queries that share a tile and the rows."
    rows: int
    "Rows of a tile."
    per_query: bool = False
    "Whether a query whose heads fill more than half a tile has one to itself."

    def holds(self, case: Case, queries: int, rows: int, release: str) -> bool:
        """Whether this line is the one for a case."""
        return (
            not is_after(self.since, release)
            and (not self.arch or case.arch in self.arch)
            and self.when(case, queries, rows)
        )


_942, _950, _BOTH = ("gfx942",), ("gfx950",), ("gfx942", "gfx950")


def _heads_fp8(*heads: int) -> Callable[[Case, int, int], bool]:
    return lambda case, _queries, _rows: case.fp8 and case.heads in heads


T = Tiling
TILINGS: tuple[Tiling, ...] = (
    # ---- tiles of 64 rows: the kernel for 64 heads
    T(
        *("v0.1.17-rc0", _950),
        lambda c, _, rows: c.bf16 and rows >= 64 and c.heads <= 64 and (rows < 128 or c.heads == 48),
        *(64, True),
    ),
    T("v0.1.20", _950, lambda c, queries, _: c.fp8 and c.heads == 32 and queries == 3, 64),
    # ---- tiles of 128 rows
    T(OLDEST, (), lambda c, *_: c.heads == 16, 128),
    T(OLDEST, _942, _heads_fp8(128), 128),
    T(OLDEST, _950, _heads_fp8(64, 128), 128),
    T(OLDEST, _950, lambda c, queries, _: c.fp8 and c.heads == 32 and queries == 4, 128),
    T("v0.1.17-longctx", _BOTH, lambda c, q, _: c.fp8 and c.heads == 64 and q == 1, 128),
    T(
        *(OLDEST, _942),
        lambda c, _, rows: c.experimental and c.fp8 and c.heads in (16, 32, 64) and rows == 128,
        128,
    ),
    T(
        *(OLDEST, _950),
        lambda c, _, rows: c.bf16 and (rows >= 128 or c.heads > 64) and c.heads != 48,
        *(128, True),
    ),
    # ---- everything else: the kernel for 16 heads, folded
    T(OLDEST, (), lambda *_: True, 16),
)
"""The first line that holds says it."""


def metadata_shapes(case: Case, release: str) -> Shapes:
    """The shape of each buffer, as the `get_mla_metadata_info_v1` of a release gives it.

    Raises:
        ValueError: its function takes no such case.
    """
    if case.heads % 8:
        raise ValueError(f"AITER {release}: it sizes heads that are a multiple of 8, got {case.heads}")
    queries = case.queries_per_sequence
    tiles = _tiles(case, queries, release)
    splits = case.cu_count * _occupancy(case)
    all_tiles = case.sequences * tiles
    if case.fast:
        work = (case.sequences + splits - 1) * tiles
        partial = min(case.sequences + splits - 1, 2 * (splits - 1)) * tiles
    else:
        work = partial = all_tiles * splits
    if case.max_split_per_batch > 0:
        most = min(splits, case.max_split_per_batch * case.sequences)
        each = is_after("v0.1.17-rc0", release)  # every tile was thought to get all splits
        partial = max(partial, all_tiles * most if each else all_tiles + most)
    if case.intra_batch:
        work = partial = all_tiles * case.num_kv_splits
    return dict(
        zip(BUFFERS, ((2,), (splits + 1,), (work, 8), (all_tiles + 1,), (all_tiles, 2), (partial,)), strict=True)
    )


def ps_metadata_shapes(batch: int, heads_k: int, max_query_length: int, granularity: int, cu_count: int) -> Shapes:
    """The shape of each buffer of the fp8 prefill, the same in all releases that have it (`get_ps_metadata_info_v1`)."""
    units = cu_count // math.gcd(heads_k, cu_count)
    parts = -(-max_query_length // granularity)
    tiles = batch * parts
    work = (batch + units - 1) * parts * heads_k
    partial = min(batch + units - 1, 2 * (units - 1)) * parts
    return dict(zip(BUFFERS, ((2,), (cu_count + 1,), (work, 8), (tiles + 1,), (tiles, 2), (partial,)), strict=True))


def _tiles(case: Case, queries: int, release: str) -> int:
    rows = queries * case.heads
    line = next(line for line in TILINGS if line.holds(case, queries, rows, release))
    return queries if line.per_query and 2 * case.heads > line.rows else -(-rows // line.rows)


def _occupancy(case: Case) -> int:
    """Thread blocks per compute unit: two of an experimental kernel fit."""
    two = case.experimental and case.arch == "gfx950" and case.fp8 and case.heads * case.queries == 64
    return 2 if two else 1
