"""A persistent MLA decode in plain torch that works by the planned buffers: the meaning, not the speed.

Absorbed form (DeepSeek-V2 report, arXiv 2405.04434, section 2.1.2): every head's query has the width of a cache entry,
there is one key head, and the values are the first columns of the keys. Each sum runs in an order that only its own
length decides, so that a head's result does not depend on how many other heads there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from .errors import BufferTooSmallError, HeadCountError, PlanExceededError, ScheduleMismatchError
from .plan import MLAMetadataPlan
from .reference_schedule import ScheduleShape, addresses, fill_schedule, kv_lengths
from .tensors import MetadataBuffers

KEYS = 1024
"""Keys whose weighted values are summed before they are added to those of the keys before."""

ELEMENTS = 1 << 21
"""Most elements of a product that is held at once."""

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@frozen(kw_only=True, eq=False)
class Scratch:
    """Partial results, `slot_rows` rows per slot."""

    output: Tensor
    "(rows, value width), float32, or float64 where the query is."
    lse: Tensor
    "(rows,), of the same dtype."


def scratch_rows(plan: MLAMetadataPlan) -> int:
    """Rows of partial results that a plan's scratch holds."""
    return math.prod(next(buffer for buffer in plan.scratch if buffer.name == "partial_output").shape[:-1])


def allocate_scratch(
    plan: MLAMetadataPlan, device: str | torch.device, *, value_width: int, dtype: torch.dtype = torch.float32
) -> Scratch:
    """The scratch of a plan, for values of any width."""
    rows = scratch_rows(plan)
    return Scratch(
        output=torch.empty((rows, value_width), dtype=dtype, device=device),
        lse=torch.empty((rows,), dtype=dtype, device=device),
    )


def decode_planned(
    buffers: MetadataBuffers,
    q: Tensor,
    kv_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    *,
    softmax_scale: float,
    value_width: int | None = None,
    scratch: Scratch | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Pad the query, plan the step into the buffers, decode, cut: what a layer does, all by one head plan.

    Args:
        buffers: `allocate(plan, device)`.
        q: (tokens, num_heads, latent width), any strides.
        kv_buffer: (pages, page_size, 1, latent width).
        qo_indptr: (sequences + 1,) int32, where each sequence's queries begin.
        kv_indptr: (sequences + 1,) int32, where each sequence's entries of `kv_indices` begin.
        kv_indices: (entries,) int32, the pages.
        kv_last_page_lens: (sequences,) int32, tokens on the last page.
        softmax_scale: factor on the logits.
        value_width: columns of a cache entry that are values; None: the planned kv_lora_rank.
        scratch: partial results; None: `allocate_scratch`.
        options: `q_scale`, `kv_scale` and `causal` of `decode_scheduled`.

    Returns:
        The output (tokens, num_heads, value width) in q's dtype, bfloat16 for fp8, and the natural-log sum of
        exponentials (tokens, num_heads) in float32, or float64 where q is. A query that sees no key has zeros and -inf.

    Raises:
        HeadCountError: q has other heads than were planned.
        PlanExceededError: more sequences than were planned.
        BufferTooSmallError: a buffer, or the scratch, does not hold what the kernel's heads need.
        ValueError: tensors that contradict each other or the plan.
    """
    plan = buffers.plan
    sequences = kv_last_page_lens.shape[0]
    most = plan.batch * plan.max_query_length if plan.sparse else plan.batch
    if sequences > most:
        raise PlanExceededError(most, sequences, (qo_indptr.shape[0], kv_indptr.shape[0]))
    shape = ScheduleShape.of(plan)
    width = plan.value_width if value_width is None else value_width
    padded = plan.heads.pad_query(q)
    if scratch is None:
        scratch = allocate_scratch(plan, q.device, value_width=width, dtype=compute_dtype(q))
    fill_schedule(shape, buffers.tensors, qo_indptr, kv_indptr, kv_last_page_lens)
    o, lse = decode_scheduled(
        *(shape, buffers.tensors, scratch, padded, kv_buffer, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens),
        softmax_scale=softmax_scale,
        value_width=width,
        **options,
    )
    return plan.heads.cut_output(o), plan.heads.cut_lse(lse)


def compute_dtype(q: Tensor) -> torch.dtype:
    """What is computed and kept in: float32, or float64 for a float64 query."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def decode_scheduled(
    shape: ScheduleShape,
    buffers: Mapping[str, Tensor],
    scratch: Scratch,
    q: Tensor,
    kv_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    *,
    softmax_scale: float,
    value_width: int,
    q_scale: float | Tensor | None = None,
    kv_scale: float | Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Decode by the schedule that `fill_schedule` left in the buffers.

    Each piece of work attends to its keys alone and leaves its result, with the log-sum-exp, in its slot of the
    scratch, or in the output where its sequence was not cut; then the slots of each tile are reduced. Products, sums
    and exponentials are float32, or float64 where q is; fp8 is multiplied by its scale first, and no probability is
    rounded to a narrower type.

    Args:
        shape: what the schedule was made for; q has its heads.
        buffers: by AITER's names, as filled.
        scratch: slots for as many partial results as `reduce_partial_map` has entries.
        q: (tokens, heads, latent width), any strides; fp8 with `q_scale`.
        kv_buffer: (pages, page_size, 1, latent width); fp8 with `kv_scale`.
        qo_indptr: (sequences + 1,) int32, as in `decode_planned`, like the three that follow.
        kv_indptr: (sequences + 1,) int32.
        kv_indices: (entries,) int32.
        kv_last_page_lens: (sequences,) int32.
        softmax_scale: factor on the logits.
        value_width: columns of a cache entry that are values.
        q_scale: per-tensor factor of an fp8 query.
        kv_scale: per-tensor factor of an fp8 cache.
        causal: whether the last query of a sequence sees all keys and each one before it one fewer.

    Returns:
        (tokens, heads, value width) in q's dtype, bfloat16 for fp8, and (tokens, heads) log-sum-exp, as `decode_planned`.

    Raises:
        BufferTooSmallError: the scratch does not hold as many slots as `reduce_partial_map` has entries.
        HeadCountError: q has other heads than the schedule.
        ScheduleMismatchError: the schedule is not of this step.
        ValueError: tensors that contradict each other.
    """
    if q.dim() != 3 or q.shape[1] != shape.heads:
        raise HeadCountError("q", shape.heads, tuple(q.shape))
    _check_tensors(shape, q, kv_buffer, kv_indices, value_width, q_scale, kv_scale)
    compute = compute_dtype(q)
    tokens, heads, dim = q.shape
    needed = buffers["reduce_partial_map"].shape[0] * shape.slot_rows
    for name, tensor in (("partial output", scratch.output), ("partial log-sum-exp", scratch.lse)):
        if tensor.shape[0] < needed:
            raise BufferTooSmallError(name, needed, tensor.shape[0], f"{heads} heads, {shape.slot_rows} rows per slot")
        if tensor.dtype != compute:
            raise ValueError(f"{name}: expected {compute}, got {tensor.dtype}")
    pages_from = kv_indptr.tolist()
    starts: list[int] = buffers["work_indptr"].tolist()
    work: list[list[int]] = buffers["work_info_set"][: starts[-1]].tolist()
    lengths = kv_lengths(pages_from, kv_last_page_lens.tolist(), shape.page_size)
    _check_schedule(buffers, work, qo_indptr.tolist(), lengths, heads)

    rows_of_q = q.reshape(tokens * heads, dim)
    out = torch.zeros((tokens * heads, value_width), dtype=compute, device=q.device)
    lse = torch.full((tokens * heads,), -math.inf, dtype=compute, device=q.device)
    for unit in range(len(starts) - 1):
        for sequence, slot, row, row_end, key, key_end, query_end, length in work[starts[unit] : starts[unit + 1]]:
            keys = _gather(kv_buffer, kv_indices[pages_from[sequence] : pages_from[sequence + 1]], key, key_end)
            rows = torch.arange(row, row_end, device=q.device)
            sees = (length - query_end + 1) + rows // heads if causal else torch.full_like(rows, length)
            found = _attend(
                _widened(rows_of_q[row:row_end], q_scale, compute),
                _widened(keys, kv_scale, compute),
                (sees - key).unsqueeze(1) > torch.arange(key_end - key, device=q.device),
                softmax_scale,
                value_width,
            )
            at = slice(row, row_end)
            if slot >= 0:
                at = slice(slot * shape.slot_rows, slot * shape.slot_rows + row_end - row)
                scratch.output[at], scratch.lse[at] = found
            else:
                out[at], lse[at] = found
    _reduce(shape, buffers, scratch, out, lse)
    result = torch.bfloat16 if q.dtype in _FP8 else q.dtype
    return out.view(tokens, heads, value_width).to(result), lse.view(tokens, heads)


def _reduce(shape: ScheduleShape, buffers: Mapping[str, Tensor], scratch: Scratch, out: Tensor, lse: Tensor) -> None:
    """Every cut tile from its slots, weighted by their log-sum-exp."""
    indptr: list[int] = buffers["reduce_indptr"].tolist()
    slots: list[int] = buffers["reduce_partial_map"][: indptr[-1]].tolist()
    for tile, (row, row_end) in enumerate(buffers["reduce_final_map"].tolist()):
        begin, end = indptr[tile], indptr[tile + 1]
        if begin == end:
            break
        every = [slice(slot * shape.slot_rows, slot * shape.slot_rows + row_end - row) for slot in slots[begin:end]]
        logs = torch.stack([scratch.lse[at] for at in every])
        top = _finite(logs.amax(0))
        weights = (logs - top).exp()
        total = tree_sum(weights)
        some = torch.where(total > 0, total, 1)
        parts = torch.stack([scratch.output[at] for at in every])
        out[row:row_end] = tree_sum(parts * (weights / some).unsqueeze(2))
        lse[row:row_end] = top + total.log()


def _attend(q: Tensor, keys: Tensor, seen: Tensor, scale: float, value_width: int) -> tuple[Tensor, Tensor]:
    """Rows (rows, dim) over keys (keys, dim), where `seen` (rows, keys) says so: normalised output and log-sum-exp."""
    count, dim = keys.shape
    scores = q.new_empty((q.shape[0], count))
    step = max(1, ELEMENTS // (min(KEYS, count) * dim))
    spans = [(at, begin) for at in range(0, q.shape[0], step) for begin in range(0, count, KEYS)]
    for at, begin in spans:
        rows, block = slice(at, at + step), slice(begin, begin + KEYS)
        scores[rows, block] = tree_sum(q[rows].mT.unsqueeze(2) * keys[block].mT.unsqueeze(1))
    scores = (scores * scale).masked_fill(~seen, -math.inf)
    top = _finite(scores.amax(1))
    weights = (scores - top.unsqueeze(1)).exp()
    total = tree_sum(weights.mT)
    out = q.new_zeros((q.shape[0], value_width))
    for at, begin in spans:
        rows, block = slice(at, at + step), slice(begin, begin + KEYS)
        out[rows] += tree_sum(weights[rows, block].mT.unsqueeze(2) * keys[block, :value_width].unsqueeze(1))
    return out / torch.where(total > 0, total, 1).unsqueeze(1), top + total.log()


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the first dimension in an order that only its length decides: halves are added until one is left.

    Additions of whole tensors round each element alone, which `sum` and matrix products do not promise: their order may
    change with the other dimensions.
    """
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        added = x[:half] + x[half : 2 * half]
        if x.shape[0] % 2:
            added[0] += x[-1]
        x = added
    return x[0]


def _finite(top: Tensor) -> Tensor:
    """Maxima to subtract: 0 where nothing is seen."""
    return torch.where(top.isinf(), 0, top)


def _gather(kv_buffer: Tensor, pages: Tensor, begin: int, end: int) -> Tensor:
    """The cache entries of a sequence's tokens from begin to end: (tokens, dim)."""
    page_size = kv_buffer.shape[1]
    tokens = torch.arange(begin, end, device=kv_buffer.device)
    at = (pages[tokens // page_size].long(), tokens % page_size, 0)
    if kv_buffer.dtype in _FP8:  # not every device indexes these
        return kv_buffer.view(torch.uint8)[at].view(kv_buffer.dtype)
    return kv_buffer[at]


def _widened(x: Tensor, scale: float | Tensor | None, compute: torch.dtype) -> Tensor:
    wide = x.to(compute)
    return wide if scale is None else wide * scale


def _check_tensors(
    shape: ScheduleShape,
    q: Tensor,
    kv_buffer: Tensor,
    kv_indices: Tensor,
    value_width: int,
    q_scale: float | Tensor | None,
    kv_scale: float | Tensor | None,
) -> None:
    dim = q.shape[2]
    if kv_buffer.dim() != 4 or kv_buffer.shape[1:] != (shape.page_size, 1, dim):
        raise ValueError(
            f"kv_buffer: expected (pages, {shape.page_size}, 1, {dim}) as planned and as q is wide, "
            f"got {tuple(kv_buffer.shape)}"
        )
    if not 1 <= value_width <= dim:
        raise ValueError(f"value_width: expected 1 to {dim}, the width of a cache entry, got {value_width}")
    if kv_indices.numel() and not 0 <= int(kv_indices.min()) <= int(kv_indices.max()) < kv_buffer.shape[0]:
        raise ValueError(
            f"kv_indices: expected pages 0 to {kv_buffer.shape[0] - 1}, "
            f"got {int(kv_indices.min())} to {int(kv_indices.max())}"
        )
    for name, tensor, scale in (("q", q, q_scale), ("kv", kv_buffer, kv_scale)):
        if (tensor.dtype in _FP8) != (scale is not None):
            raise ValueError(f"{name}_scale: fp8 has one and nothing else does; {name} is {tensor.dtype}")


def _check_schedule(
    buffers: Mapping[str, Tensor], work: list[list[int]], qo_indptr: list[int], lengths: list[int], heads: int
) -> None:
    """Whether the schedule is this step's: every query's row meets every key of its sequence once."""
    if buffers["work_metadata_ptrs"].view(torch.int64).tolist()[:2] != addresses(buffers):
        raise ScheduleMismatchError(
            "work_metadata_ptrs point at other buffers than these: schedule the step into these"
        )
    covered = [0] * len(lengths)
    for sequence, _, row, row_end, key, key_end, query_end, length in work:
        if sequence >= len(lengths) or (query_end, length) != (qo_indptr[sequence + 1], lengths[sequence]):
            raise ScheduleMismatchError(
                f"the buffers hold work on {length} keys of sequence {sequence}, with queries up to {query_end}, "
                "which this step does not have: schedule every step anew"
            )
        covered[sequence] += (row_end - row) * (key_end - key)
    for sequence, (found, length) in enumerate(zip(covered, lengths, strict=True)):
        rows = (qo_indptr[sequence + 1] - qo_indptr[sequence]) * heads
        if found != rows * length:
            raise ScheduleMismatchError(
                f"sequence {sequence} has {rows} rows over {length} keys, the buffers hold work on {found} of these "
                f"{rows * length} pairs: scheduled for other heads or lengths"
            )
