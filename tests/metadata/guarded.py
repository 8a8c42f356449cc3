"""The buffers of a plan between guard bytes, and decodes in them: padded by the plan, or with the layer's own heads."""

from __future__ import annotations

import math

import torch
from mla_oracle import SCALE, Schedule, Step, decode, fill
from torch import Tensor

from layerfuse.fusion.metadata import MLAMetadataPlan
from layerfuse.fusion.metadata.tensors import DTYPES

VALUES = 8
GUARD, BEHIND, CANARY = 4096, 1 << 20, 0xA5


class Guarded:
    """The buffers and the scratch of a plan, each in the middle of a larger tensor of canary bytes."""

    def __init__(self, plan: MLAMetadataPlan, *, values: int = VALUES, dtype: torch.dtype = torch.float64) -> None:
        self.plan, self.values, self.dtype = plan, values, dtype
        self._sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in self._wanted(plan).items()}
        self._raw = {
            name: torch.full((GUARD + size + BEHIND,), CANARY, dtype=torch.uint8) for name, size in self._sizes.items()
        }

    def _wanted(self, plan: MLAMetadataPlan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        rows = math.prod(plan.scratch[0].shape[:-1])
        wanted = {buffer.name: (buffer.shape, DTYPES[buffer.dtype]) for buffer in plan.buffers}
        return wanted | {"output": ((rows, self.values), self.dtype), "lse": ((rows,), self.dtype)}

    def tensors(self, reach: MLAMetadataPlan | None = None) -> dict[str, Tensor]:
        """As planned; with `reach` as long as in another plan, over the same memory: a kernel knows nothing of sizes."""
        return {
            name: self._raw[name][GUARD : GUARD + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype) in self._wanted(reach or self.plan).items()
        }

    def decode(
        self, step: Step, plan: MLAMetadataPlan, tensors: dict[str, Tensor], scale: float = SCALE
    ) -> tuple[Tensor, Tensor]:
        """Pad, schedule, decode and cut by a plan's heads, in these tensors."""
        schedule, heads = Schedule.of(plan), plan.heads
        fill(schedule, tensors, step)
        scratch = (tensors["output"], tensors["lse"])
        o, lse = decode(schedule, tensors, scratch, heads.pad_query(step.q), step, scale)
        return heads.cut_output(o), heads.cut_lse(lse)

    @property
    def broken(self) -> list[str]:
        """Buffers that were written before their first byte or after their last."""
        return [
            name
            for name, size in self._sizes.items()
            if (self._raw[name][:GUARD] != CANARY).any() or (self._raw[name][GUARD + size :] != CANARY).any()
        ]


def padded(
    plan: MLAMetadataPlan,
    step: Step,
    *,
    values: int = VALUES,
    dtype: torch.dtype = torch.float64,
    scale: float = SCALE,
) -> tuple[Tensor, Tensor]:
    """By the plan, in guarded buffers of exactly its sizes, which are left whole."""
    guarded = Guarded(plan, values=values, dtype=dtype)
    found = guarded.decode(step, plan, guarded.tensors(), scale)
    assert guarded.broken == []
    return found


def unpadded(
    parts: int,
    step: Step,
    *,
    q: Tensor | None = None,
    values: int = VALUES,
    dtype: torch.dtype = torch.float64,
    scale: float = SCALE,
    grain: int = 16,
) -> tuple[Tensor, Tensor]:
    """The heads of the step's query (or of `q`), in buffers with room for any, cut into as many parts as a padded run."""
    q = step.q if q is None else q
    most = max([1, *step.queries])
    schedule = Schedule(heads=q.shape[1], tile_rows=q.shape[1], parts=parts, max_queries=most, grain=grain)
    tiles = len(step.queries) * most
    work = (len(step.queries) + parts) * most
    shapes = {"work_indptr": (parts + 1,), "work_info_set": (work, 8), "reduce_indptr": (tiles + 1,)}
    shapes |= {"reduce_final_map": (tiles, 2), "reduce_partial_map": (2 * work,)}
    buffers = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    buffers["work_metadata_ptrs"] = torch.zeros(2, dtype=torch.uint64)
    rows = 2 * work * schedule.slot_rows
    scratch = (torch.full((rows, values), math.nan, dtype=dtype), torch.full((rows,), math.nan, dtype=dtype))
    fill(schedule, buffers, step)
    return decode(schedule, buffers, scratch, q, step, scale)
