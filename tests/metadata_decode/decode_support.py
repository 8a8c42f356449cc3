"""Steps over a paged cache, attention written plainly, and tensors with guard bytes around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from layerfuse import registry
from layerfuse.adapters.specs import MLASpec
from layerfuse.fusion import Target
from layerfuse.fusion.metadata import MetadataBuffers, MLAMetadataPlan
from layerfuse.fusion.metadata.reference_decode import Scratch, decode_scheduled, scratch_rows
from layerfuse.fusion.metadata.reference_schedule import ScheduleShape, fill_schedule
from layerfuse.fusion.metadata.tensors import DTYPES

GFX942, GFX950 = Target.named("gfx942"), Target.named("gfx950")
FP8 = torch.float8_e4m3fn
LATENT, VALUES = 12, 8
"""Widths where they do not matter: neither divides the other."""
SCALE = 0.31


def mla(name: str, tp: int = 1) -> MLASpec:
    return next(spec for _, spec in registry.model(name).specs(tp, 0) if isinstance(spec, MLASpec))


def with_heads(heads: int) -> MLASpec:
    return attrs.evolve(mla("kimi-k2.5"), num_heads=heads, num_local_heads=heads)


# ---- a step


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """Sequences over a cache whose pages lie in any order; what is not theirs is NaN."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    kv_buffer: Tensor
    indices: tuple[Tensor, ...]
    "qo_indptr, kv_indptr, kv_indices, kv_last_page_lens."

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def page_size(self) -> int:
        return self.kv_buffer.shape[1]

    @property
    def for_schedule(self) -> tuple[Tensor, Tensor, Tensor]:
        qo, kv, _, last = self.indices
        return qo, kv, last

    def keys(self, sequence: int) -> Tensor:
        """One sequence's cache entries, token by token."""
        kv, entries, size = self.indices[1].tolist(), self.indices[2].tolist(), self.page_size
        places = [(entries[kv[sequence] + token // size], token % size) for token in range(self.lengths[sequence])]
        if not places:
            return self.kv_buffer.new_empty((0, self.kv_buffer.shape[3]))
        pages, slots = (list(each) for each in zip(*places, strict=True))
        return (
            self.kv_buffer.float()[pages, slots, 0] if self.kv_buffer.dtype == FP8 else self.kv_buffer[pages, slots, 0]
        )


def make_step(
    queries: Sequence[int],
    lengths: Sequence[int],
    *,
    page_size: int = 1,
    dim: int = LATENT,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> Step:
    random = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in lengths]
    kv_indptr = [0, *accumulate(pages)]
    order = torch.randperm(kv_indptr[-1] + 3, generator=random)[: kv_indptr[-1]]
    cache = torch.full((kv_indptr[-1] + 3, page_size, 1, dim), math.nan, dtype=torch.float64)
    for sequence, length in enumerate(lengths):
        own = order[kv_indptr[sequence] : kv_indptr[sequence + 1]]
        token = torch.arange(length)
        cache[own[token // page_size], token % page_size, 0] = torch.randn(
            (length, dim), generator=random, dtype=torch.float64
        )
    indices = (
        [0, *accumulate(queries)],
        kv_indptr,
        order.tolist(),
        [length - (page - 1) * page_size if page else 0 for length, page in zip(lengths, pages, strict=True)],
    )
    return Step(
        queries=tuple(queries),
        lengths=tuple(lengths),
        kv_buffer=cache.to(dtype).to(device),
        indices=tuple(torch.tensor(index, dtype=torch.int32, device=device) for index in indices),
    )


def make_query(
    step: Step, heads: int, *, dtype: torch.dtype = torch.float64, seed: int = 1, device: str = "cpu"
) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    shape = (step.tokens, heads, step.kv_buffer.shape[3])
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).to(device)


def plain_attention(
    q: Tensor, step: Step, values: int = VALUES, *, scale: float = SCALE, kv_scale: float = 1, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64, sequence by sequence, nothing split."""
    outs, logs, begin = [], [], 0
    for sequence, (queries, length) in enumerate(zip(step.queries, step.lengths, strict=True)):
        keys = step.keys(sequence).double() * kv_scale
        scores = torch.einsum("qhd,kd->qhk", q[begin : begin + queries].double(), keys) * scale
        begin += queries
        if causal:
            hidden = torch.ones(queries, length, dtype=torch.bool, device=q.device).triu(length - queries + 1)
            scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
        outs.append(torch.einsum("qhk,kv->qhv", scores.softmax(-1).nan_to_num(0.0), keys[:, :values]))
        logs.append(scores.logsumexp(-1))
    if not outs:
        return q.new_empty((0, q.shape[1], values)), q.new_empty((0, q.shape[1]))
    return torch.cat(outs), torch.cat(logs)


def decode_unpadded(
    q: Tensor, step: Step, parts: int, values: int = VALUES, *, tile_rows: int = 128, **options: Any
) -> tuple[Tensor, Tensor]:
    """The layer's own heads, in buffers with room for any heads, cut into as many parts as a padded run."""
    most = max(step.queries, default=1)
    shape = ScheduleShape(
        heads=q.shape[1],
        tile_rows=tile_rows,
        parts=parts,
        max_query_length=max(1, most),
        page_size=step.page_size,
    )
    tiles = len(step.queries) * shape.tiles
    rows = (len(step.queries) + parts) * shape.tiles
    sizes = {
        "work_indptr": (parts + 1,),
        "work_info_set": (rows, 8),
        "reduce_indptr": (tiles + 1,),
        "reduce_final_map": (tiles, 2),
        "reduce_partial_map": (2 * rows,),
    }
    buffers = {name: torch.full(size, -7, dtype=torch.int32, device=q.device) for name, size in sizes.items()}
    buffers["work_metadata_ptrs"] = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scratch = Scratch(
        output=torch.full((2 * rows * shape.slot_rows, values), math.nan, dtype=dtype, device=q.device),
        lse=torch.full((2 * rows * shape.slot_rows,), math.nan, dtype=dtype, device=q.device),
    )
    fill_schedule(shape, buffers, *step.for_schedule)
    settings = {"softmax_scale": SCALE, "value_width": values, **options}
    return decode_scheduled(shape, buffers, scratch, q, step.kv_buffer, *step.indices, **settings)


# ---- guard bytes

GUARD, CANARY = 4096, 0xA5


class Guarded:
    """The buffers and the scratch of a plan, each in the middle of a larger tensor of canary bytes.

    `reach` puts longer tensors of another plan over the same memory, as a kernel writes that knows nothing of sizes.
    """

    def __init__(
        self, plan: MLAMetadataPlan, *, values: int = VALUES, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> None:
        self.raw: dict[str, tuple[Tensor, int]] = {}
        self.plan, self.values, self.dtype, self.device = plan, values, dtype, device
        self.buffers, self.scratch = self.reach(plan, make=True)

    def reach(self, plan: MLAMetadataPlan, *, make: bool = False) -> tuple[MetadataBuffers, Scratch]:
        rows = scratch_rows(plan)
        wanted = {buffer.name: (buffer.shape, DTYPES[buffer.dtype]) for buffer in plan.buffers}
        wanted |= {"output": ((rows, self.values), self.dtype), "lse": ((rows,), self.dtype)}
        found = {name: self._tensor(name, shape, dtype, make) for name, (shape, dtype) in wanted.items()}
        scratch = Scratch(output=found.pop("output"), lse=found.pop("lse"))
        return MetadataBuffers(plan=plan, tensors=found, whole={}), scratch

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, make: bool) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if make:
            raw = torch.full((GUARD + size + GUARD,), CANARY, dtype=torch.uint8, device=self.device)
            self.raw[name] = (raw, size)
        return self.raw[name][0][GUARD : GUARD + size].view(dtype).view(shape)

    @property
    def broken(self) -> list[str]:
        """Buffers that were written before their first byte or after their last."""
        return [
            name
            for name, (raw, size) in self.raw.items()
            if bool((raw[:GUARD] != CANARY).any()) or bool((raw[GUARD + size :] != CANARY).any())
        ]
