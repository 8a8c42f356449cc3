"""The split schedule of the reference decode: which part of which sequence each compute unit works on.

It is written into the six buffers that a plan sized, and into nothing else: a buffer that is too small raises. The
columns below are this library's own; AITER's kernels have another layout, of the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from .errors import BufferTooSmallError
from .plan import MLAMetadataPlan
from .sizes import BUFFERS, TILINGS

GRANULARITY = 16
"""Keys that a cut lies on a multiple of, unless a page is longer."""

WORK_COLUMNS = (
    "sequence",  # which sequence of the step
    "slot",  # where the partial result goes, or -1: the sequence is not cut, the result goes to the output
    "row_begin",  # first packed row, token * heads + head, of all the step's rows
    "row_end",  # the row after the last
    "kv_begin",  # first key, counted from the sequence's first
    "kv_end",  # the key after the last
    "query_end",  # the token after the sequence's last query
    "kv_length",  # keys of the whole sequence
)
"""What the 8 int32 of a row of `work_info_set` say."""


@frozen(kw_only=True)
class ScheduleShape:
    """What a schedule depends on beside the lengths of its sequences."""

    heads: int
    "As the kernel gets them."
    tile_rows: int
    "Packed rows, query tokens times heads, that one piece of work takes at most."
    parts: int
    "Pieces, all of one length, into which the keys of all sequences together are cut; one for each compute unit."
    max_query_length: int
    "Most queries of a sequence."
    page_size: int
    "Tokens per cache page."

    @property
    def slot_rows(self) -> int:
        """Rows that a partial result takes."""
        return min(self.tile_rows, self.max_query_length * self.heads)

    @property
    def tiles(self) -> int:
        """Tiles of a sequence that has `max_query_length` queries: T in AITER's sizes."""
        return -(-self.max_query_length * self.heads // self.tile_rows)

    @property
    def granularity(self) -> int:
        """Keys between two places where a sequence may be cut."""
        return max(GRANULARITY, self.page_size)

    @classmethod
    def of(cls, plan: MLAMetadataPlan) -> Self:
        """The schedule that a plan's buffers were sized for.

        A tile is as high as in the sizes of the plan's newest release. There are as many parts as those sizes allow:
        (sequences + parts - 1) * tiles pieces of work, one part per compute unit in fast mode since v0.1.8.
        """
        case = plan.case
        queries = 1 if case.sparse else case.queries
        rows = queries * case.heads
        release = plan.releases.last
        line = next(line for line in TILINGS if line.holds(case, queries, rows, release))
        own = line.per_query and 2 * case.heads > line.rows
        units = plan.buffer("work_indptr").shape[0] - 1
        made = cls(
            heads=case.heads,
            tile_rows=case.heads if own else line.rows,
            parts=units,
            max_query_length=queries,
            page_size=plan.page_size,
        )
        sequences = case.batch * case.queries if case.sparse else case.batch
        spare = plan.buffer("work_info_set").shape[0] - sequences * made.tiles
        return evolve(made, parts=max(1, min(units, 1 + spare // made.tiles)))


def kv_lengths(kv_indptr: Sequence[int], kv_last_page_lens: Sequence[int], page_size: int) -> list[int]:
    """Keys of each sequence; one without pages has none, whatever its last page is said to hold.

    Raises:
        ValueError: pages that run backwards, or a last page with no token or more than it holds.
    """
    lengths = []
    for sequence, ((begin, end), last) in enumerate(zip(pairwise(kv_indptr), kv_last_page_lens, strict=True)):
        if end < begin:
            raise ValueError(f"kv_indptr: sequence {sequence} runs from page {begin} back to {end}")
        if end > begin and not 1 <= last <= page_size:
            raise ValueError(
                f"kv_last_page_lens: sequence {sequence} says {last}, of a page that holds 1 to {page_size}"
            )
        lengths.append((end - begin - 1) * page_size + last if end > begin else 0)
    return lengths


def fill_schedule(
    shape: ScheduleShape,
    buffers: Mapping[str, Tensor],
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
) -> None:
    """Plan a step's work into the six buffers. What they held before does not matter.

    The keys of all sequences stand in one line, which is cut into `parts` of one length. Where a cut meets a sequence
    does not depend on the heads, so that more heads change no head's arithmetic.

    Args:
        shape: heads, tiles and parts.
        buffers: by AITER's names, int32 but for `work_metadata_ptrs`, on one device. `work_indptr` (units + 1,): the
            rows of `work_info_set` that a unit works on. `work_info_set` (rows, 8): `WORK_COLUMNS`. `reduce_indptr`
            (tiles + 1,): the entries of `reduce_partial_map` that make a cut tile. `reduce_final_map` (tiles, 2): its
            first row and the one after its last. `reduce_partial_map` (partials,): their slots. `work_metadata_ptrs`
            (2,): the addresses of `work_indptr` and `work_info_set`.
        qo_indptr: (sequences + 1,) int32, where each sequence's queries begin.
        kv_indptr: (sequences + 1,) int32, where each sequence's pages begin.
        kv_last_page_lens: (sequences,) int32, tokens on the last page.

    Raises:
        BufferTooSmallError: a buffer does not hold it; none was written.
        ValueError: index tensors that contradict each other, or a sequence with too many queries.
    """
    qo, kv = _integers(qo_indptr), _integers(kv_indptr)
    if not len(qo) == len(kv) == kv_last_page_lens.shape[0] + 1:
        raise ValueError(
            f"qo_indptr and kv_indptr have one entry more than there are sequences: got {len(qo)} and {len(kv)} "
            f"for {kv_last_page_lens.shape[0]}"
        )
    lengths = kv_lengths(kv, _integers(kv_last_page_lens), shape.page_size)
    for sequence, (begin, end) in enumerate(pairwise(qo)):
        if not 0 <= end - begin <= shape.max_query_length:
            raise ValueError(
                f"qo_indptr: sequence {sequence} has {end - begin} queries, planned were 0 to {shape.max_query_length}"
            )
    tiles = [list(_tiles(shape, begin, end)) for begin, end in pairwise(qo)]
    pieces = list(_pieces(shape, [length if own else 0 for length, own in zip(lengths, tiles, strict=True)]))
    units = buffers["work_indptr"].shape[0] - 1
    _check(buffers, shape, tiles, len(pieces), units)

    cuts = [0] * len(lengths)
    for part in pieces:
        for sequence, _, _ in part:
            cuts[sequence] += 1
    slots: dict[tuple[int, int], int] = {}
    indptr, final = [0], list[tuple[int, int]]()
    partial: list[int] = []
    for sequence, times in enumerate(cuts):
        if times < 2:
            continue
        for tile, rows in enumerate(tiles[sequence]):
            slots[sequence, tile] = len(partial)
            partial.extend(range(len(partial), len(partial) + times))
            indptr.append(len(partial))
            final.append(rows)
    seen = [0] * len(lengths)
    work, starts = list[tuple[int, ...]](), [0]
    for part in pieces:
        for sequence, begin, end in part:
            for tile, rows in enumerate(tiles[sequence]):
                slot = slots[sequence, tile] + seen[sequence] if cuts[sequence] > 1 else -1
                work.append((sequence, slot, *rows, begin, end, qo[sequence + 1], lengths[sequence]))
            seen[sequence] += 1
        starts.append(len(work))
    starts.extend([len(work)] * (units + 1 - len(starts)))
    indptr.extend([len(partial)] * (buffers["reduce_indptr"].shape[0] - len(indptr)))

    written: dict[str, Sequence[int | tuple[int, ...]]] = {
        "work_indptr": starts,
        "work_info_set": work,
        "reduce_indptr": indptr,
        "reduce_final_map": final,
        "reduce_partial_map": partial,
    }
    for name, values in written.items():
        if len(values) > buffers[name].shape[0]:
            raise BufferTooSmallError(name, len(values), buffers[name].shape[0], _why(shape))
    for name, values in written.items():
        if values:
            buffers[name][: len(values)].copy_(torch.tensor(values, dtype=torch.int32))
    buffers["work_metadata_ptrs"].view(torch.int64).copy_(torch.tensor(addresses(buffers), dtype=torch.int64))


def addresses(buffers: Mapping[str, Tensor]) -> list[int]:
    """What `work_metadata_ptrs` holds."""
    return [buffers["work_indptr"].data_ptr(), buffers["work_info_set"].data_ptr()]


def _check(
    buffers: Mapping[str, Tensor], shape: ScheduleShape, tiles: list[list[tuple[int, int]]], parts: int, units: int
) -> None:
    """What is wrong with the buffers whatever the lengths of the sequences are."""
    for name in BUFFERS:
        expected = torch.uint64 if name == "work_metadata_ptrs" else torch.int32
        if buffers[name].dtype != expected:
            raise ValueError(f"{name}: expected {expected}, got {buffers[name].dtype}")
    every = sum(map(len, tiles))
    for name, needed in (("reduce_final_map", every), ("reduce_indptr", every + 1), ("work_metadata_ptrs", 2)):
        if buffers[name].shape[0] < needed:
            raise BufferTooSmallError(name, needed, buffers[name].shape[0], _why(shape))
    if parts > units:
        raise BufferTooSmallError("work_indptr", parts + 1, units + 1, f"{parts} parts")


def _why(shape: ScheduleShape) -> str:
    return f"{shape.heads} heads in tiles of {shape.tile_rows} rows, {shape.parts} parts"


def _tiles(shape: ScheduleShape, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """First row and the one after the last of each tile of the tokens from begin to end."""
    last = end * shape.heads
    for row in range(begin * shape.heads, last, shape.tile_rows):
        yield row, min(row + shape.tile_rows, last)


def _pieces(shape: ScheduleShape, lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Part by part, the sequences that it meets and the keys from where to where."""
    grain = shape.granularity
    grains = [-(-length // grain) for length in lengths]
    total = sum(grains)
    parts = min(shape.parts, total)
    sequence = done = before = 0  # grains of earlier sequences, and of this one that are given out
    for part in range(parts):
        end = total * (part + 1) // parts
        found = []
        while before + done < end:
            until = min(end - before, grains[sequence])
            if until > done:
                found.append((sequence, done * grain, min(until * grain, lengths[sequence])))
                done = until
            if done == grains[sequence]:
                before += done
                sequence, done = sequence + 1, 0
        yield found


def _integers(indices: Tensor) -> list[int]:
    if indices.dtype != torch.int32 or indices.dim() != 1:
        raise ValueError(
            f"index tensors are one-dimensional int32, got {indices.dtype} of shape {tuple(indices.shape)}"
        )
    found: list[int] = indices.tolist()
    return found
