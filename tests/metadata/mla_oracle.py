"""A persistent MLA decode in plain torch that works in the planned buffers: the oracle of the padding tests.

Absorbed form (DeepSeek-V2 report, arXiv 2405.04434, section 2.1.2): one key head, whose first columns are the values.
Each sum runs in an order that only its own length decides, so that padded and unpadded runs can agree to the last bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from layerfuse.fusion.metadata import MLAMetadataPlan
from layerfuse.fusion.metadata.sizes import TILINGS

SCALE = 0.31


class BufferTooSmallError(Exception):
    """A buffer that does not hold what a step needs, found before anything was written."""


@frozen(kw_only=True, eq=False)
class Step:
    """Sequences with their queries and their keys."""

    queries: tuple[int, ...]
    keys: tuple[Tensor, ...]
    "(length, width) for each sequence."
    q: Tensor
    "(tokens, heads, width)"


def make_step(heads, queries, lengths, *, width=12, dtype=torch.float64, cache=None, seed=0) -> Step:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    keys = tuple(normal(length, width).to(cache or dtype) for length in lengths)
    return Step(queries=tuple(queries), keys=keys, q=normal(sum(queries), heads, width).to(dtype))


@frozen(kw_only=True)
class Schedule:
    """What the pieces of work depend on beside the lengths of the sequences."""

    heads: int
    tile_rows: int
    "Packed rows, tokens times heads, that one piece of work takes at most."
    parts: int
    "Pieces of one length into which the keys of all sequences together are cut."
    max_queries: int
    grain: int = 16
    "Keys between two places where a sequence may be cut."

    @property
    def slot_rows(self) -> int:
        return min(self.tile_rows, self.max_queries * self.heads)

    @property
    def tiles(self) -> int:
        return -(-self.max_queries * self.heads // self.tile_rows)

    @classmethod
    def of(cls, plan: MLAMetadataPlan) -> Self:
        """Tiles as in the sizes of the plan's newest release, and as many parts as those sizes allow."""
        case, units = plan.case, plan.buffer("work_indptr").shape[0] - 1
        queries = case.queries_per_sequence
        line = next(t for t in TILINGS if t.holds(case, queries, queries * case.heads, plan.releases.last))
        whole = line.per_query and 2 * case.heads > line.rows
        made = cls(
            heads=case.heads,
            tile_rows=case.heads if whole else line.rows,
            parts=units,
            max_queries=queries,
            grain=max(16, plan.page_size),
        )
        spare = plan.buffer("work_info_set").shape[0] - case.sequences * made.tiles
        return evolve(made, parts=max(1, min(units, 1 + spare // made.tiles)))


def _parts(lengths: list[int], schedule: Schedule) -> Iterator[list[tuple[int, int, int]]]:
    """Part by part, the sequences that it meets and the keys from where to where. The heads have no say in it."""
    grain = schedule.grain
    ends = list(accumulate(-(-length // grain) for length in lengths))
    total = ends[-1] if ends else 0
    parts = max(1, min(schedule.parts, total))
    cuts = [total * part // parts for part in range(parts + 1)]
    for begin, end in pairwise(cuts):
        yield [
            (i, max(begin - first, 0) * grain, min((min(end, last) - first) * grain, lengths[i]))
            for i, (first, last) in enumerate(pairwise([0, *ends]))
            if max(begin, first) < min(end, last)
        ]


def fill(schedule: Schedule, buffers: Mapping[str, Tensor], step: Step) -> None:
    """Write a step's work into the six buffers.

    A row of `work_info_set` is: sequence, slot of the partial result (-1: straight to the output), first and last row,
    first and last key, last query, keys of the sequence. AITER's kernels have other columns, of the same number.

    Raises:
        BufferTooSmallError: a buffer does not hold it; none was written.
    """
    ends = [0, *accumulate(step.queries)]
    lengths = [len(keys) if own else 0 for keys, own in zip(step.keys, step.queries, strict=True)]
    tiles = [
        [
            (row, min(row + schedule.tile_rows, end * schedule.heads))
            for row in range(begin * schedule.heads, end * schedule.heads, schedule.tile_rows)
        ]
        for begin, end in pairwise(ends)
    ]
    parts = list(_parts(lengths, schedule))
    cuts = Counter(sequence for part in parts for sequence, _, _ in part)
    slots: dict[tuple[int, int], Iterator[int]] = {}
    indptr, final, partials = [0], [], 0
    for sequence in (each for each in sorted(cuts) if cuts[each] > 1):
        for tile, rows in enumerate(tiles[sequence]):
            slots[sequence, tile] = iter(range(partials, partials + cuts[sequence]))
            partials += cuts[sequence]
            indptr.append(partials)
            final.append(rows)
    work, starts = [], [0]
    for part in parts:
        for sequence, begin, end in part:
            for tile, rows in enumerate(tiles[sequence]):
                slot = next(slots[sequence, tile]) if cuts[sequence] > 1 else -1
                work.append((sequence, slot, *rows, begin, end, ends[sequence + 1], lengths[sequence]))
        starts.append(len(work))

    every = sum(map(len, tiles))  # AITER's functions write an entry for each tile, cut or not
    needed = {"work_indptr": len(starts), "work_info_set": len(work), "reduce_indptr": every + 1}
    needed |= {"reduce_final_map": every, "reduce_partial_map": partials, "work_metadata_ptrs": 2}
    for name, rows in needed.items():
        if rows > buffers[name].shape[0]:
            raise BufferTooSmallError(f"{name}: {rows} rows are needed, it has {buffers[name].shape[0]}")
    starts += [len(work)] * (buffers["work_indptr"].shape[0] - len(starts))
    indptr += [partials] * (buffers["reduce_indptr"].shape[0] - len(indptr))
    written = {"work_indptr": starts, "work_info_set": work, "reduce_indptr": indptr, "reduce_final_map": final}
    for name, values in (written | {"reduce_partial_map": list(range(partials))}).items():
        if values:
            buffers[name][: len(values)] = torch.tensor(values, dtype=torch.int32)
    addresses = [buffers["work_indptr"].data_ptr(), buffers["work_info_set"].data_ptr()]
    buffers["work_metadata_ptrs"].view(torch.int64)[:] = torch.tensor(addresses)


def decode(
    schedule: Schedule,
    buffers: Mapping[str, Tensor],
    scratch: tuple[Tensor, Tensor],
    q: Tensor,
    step: Step,
    scale: float = SCALE,
) -> tuple[Tensor, Tensor]:
    """Decode by the schedule in the buffers: (tokens, heads, values) and the log-sum-exp (tokens, heads).

    Each piece of work attends to its keys alone and leaves its result in its slot of the scratch, or in the output
    where its sequence was not cut; then the slots of each tile are reduced. Computed in the dtype of the scratch.

    Raises:
        BufferTooSmallError: the scratch does not hold as many slots as `reduce_partial_map` has entries.
    """
    needed = buffers["reduce_partial_map"].shape[0] * schedule.slot_rows
    if min(map(len, scratch)) < needed:
        raise BufferTooSmallError(f"scratch: {needed} rows are needed, it has {min(map(len, scratch))}")
    tokens, heads, _ = q.shape
    values, compute = scratch[0].shape[1], scratch[0].dtype
    rows_of_q = q.flatten(0, 1).to(compute)
    out = torch.zeros((tokens * heads, values), dtype=compute)
    lse = torch.full((tokens * heads,), -math.inf, dtype=compute)
    starts = buffers["work_indptr"].tolist()
    for sequence, slot, row, row_end, key, key_end, query_end, length in buffers["work_info_set"][
        : starts[-1]
    ].tolist():
        sees = length - query_end + 1 + torch.arange(row, row_end) // heads
        hidden = (sees - key).unsqueeze(1) <= torch.arange(key_end - key)
        keys = step.keys[sequence].to(compute)[key:key_end]
        found = _attend(rows_of_q[row:row_end], keys, hidden, scale, values)
        to, begin = ((out, lse), row) if slot < 0 else (scratch, slot * schedule.slot_rows)
        for tensor, result in zip(to, found, strict=True):
            tensor[begin : begin + row_end - row] = result
    indptr = buffers["reduce_indptr"].tolist()
    slots = buffers["reduce_partial_map"].tolist()
    for (row, row_end), (begin, end) in zip(buffers["reduce_final_map"].tolist(), pairwise(indptr), strict=True):
        if begin < end:
            at = torch.tensor(slots[begin:end]).unsqueeze(1) * schedule.slot_rows + torch.arange(row_end - row)
            weights, total, lse[row:row_end] = _softmax(scratch[1][at])
            out[row:row_end] = tree_sum(scratch[0][at] * (weights / total).unsqueeze(2))
    return out.view(tokens, heads, values).to(q.dtype), lse.view(tokens, heads)


def _attend(q: Tensor, keys: Tensor, hidden: Tensor, scale: float, values: int) -> tuple[Tensor, Tensor]:
    """(rows, width) over (keys, width): normalised output and log-sum-exp."""
    scores = tree_sum(q.mT.unsqueeze(2) * keys.mT.unsqueeze(1)) * scale
    weights, total, lse = _softmax(scores.masked_fill(hidden, -math.inf).mT)
    return tree_sum(weights.unsqueeze(2) * keys[:, None, :values]) / total.unsqueeze(1), lse


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Over the first dimension: weights, their sum (1 where nothing is seen), log-sum-exp."""
    top = scores.amax(0)
    top = torch.where(top.isinf(), 0, top)
    weights = (scores - top).exp()
    total = tree_sum(weights)
    return weights, torch.where(total > 0, total, 1), top + total.log()


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the first dimension in an order that only its length decides: halves are added until one is left.

    `sum` and matrix products do not promise that: their order may change with the other dimensions.
    """
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        added = x[:half] + x[half : 2 * half]
        if x.shape[0] % 2:
            added[0] += x[-1]
        x = added
    return x[0]


def plain_attention(step: Step, values: int, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64, sequence by sequence, nothing split: what the oracle itself is held to."""
    outs, logs, begin = [step.q[:0, :, :values].double()], [step.q[:0, :, 0].double()], 0
    for queries, keys in zip(step.queries, map(Tensor.double, step.keys), strict=True):
        scores = torch.einsum("qhd,kd->hqk", step.q[begin : begin + queries].double(), keys) * scale
        hidden = torch.ones(queries, len(keys), dtype=torch.bool).triu(len(keys) - queries + 1)
        scores = scores.masked_fill(hidden, -math.inf)
        outs.append(torch.einsum("hqk,kv->qhv", scores.softmax(-1).nan_to_num(0.0), keys[:, :values]))
        logs.append(scores.logsumexp(-1).mT)
        begin += queries
    return torch.cat(outs), torch.cat(logs)
