"""The tensors of a measurement, as many sets of them as outgrow the cache.

Latents, and gate and up of a gated MLP, are column views of one projection's output, as models have them; other rows are
tensors of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..fusion.declare import (
    Argument,
    GroupName,
    GroupSize,
    Index,
    Limit,
    Number,
    PaddedWidth,
    QuantDtype,
    Rows,
    StaticScale,
    Table,
    Weight,
)
from ..fusion.steps import AllReduce, GatedNorm, Quant, SiluMul
from .cases import ITEM_SIZES, Case, step_of
from .rank_group import rank_group

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}

FEWEST_SETS, MOST_SETS = 8, 64
"""On a GPU; on a CPU, whose cache may outsize anything that is worth the time, always the fewest."""
POSITIONS, ROPE_BASE = 8192, 1e6
"""Rows of the tables of a rope, and Qwen3's base of its frequencies."""
CACHES = 4
"""How many times the last-level cache all sets together should hold."""


@frozen(kw_only=True, eq=False)
class Work:
    """One case with one number of tokens: the inputs of every call."""

    case: Case
    tokens: int
    device: torch.device
    sets: tuple[tuple[Tensor, ...], ...]
    "The arguments of kind `Rows` in the op's order, (tokens, width) or (tokens, heads, width) each."
    weights: dict[str, Tensor]
    "By argument, (width,) each; a static scale, (1,); the tables of a rope, halves of one, and a position for each token."

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and unquantised results."""
        return DTYPES[self.case.dtype]

    @property
    def fp8(self) -> torch.dtype:
        """Of the quantised result."""
        return fp8_of(self.case)

    def arguments(self, rows: Sequence[Tensor]) -> tuple[Any, ...]:
        """All of the op's arguments by position, with these rows."""
        op = self.case.form.op
        tensors = {**{each.name: tensor for each, tensor in zip(op.rows, rows, strict=True)}, **self.weights}
        return tuple(
            tensors[each.name]
            if isinstance(each, Rows | Weight | StaticScale | Table | Index)
            else _constant(self.case, each)
            for each in op.args
        )


def fp8_of(case: Case) -> torch.dtype:
    """The fp8 dtype of a case; some fp8 dtype where it quantises nothing."""
    return FP8_DTYPES[case.fp8 or "e4m3fn"]


def _constant(case: Case, argument: Argument) -> Any:
    name, quant, gated = argument.name, step_of(case.form, Quant), step_of(case.form, GatedNorm)
    named: dict[Any, Any] = {**case.epsilons, **case.weight_offsets}
    if gated is not None:
        named |= {gated.activation: case.activation, gated.norm_before_gate: case.norm_before_gate}
    if quant is not None:
        named |= {
            quant.use_ue8m0: case.ue8m0,
            quant.column_major: case.column_major,
            quant.tma_aligned: case.tma_aligned,
        }
    if name in named:
        return named[name]
    if isinstance(argument, GroupName):
        return torch.distributed.group.WORLD.group_name
    if isinstance(argument, Number):
        return argument.sample
    limit = float("inf") if case.limit is None else case.limit
    kinds = {QuantDtype: fp8_of(case), GroupSize: case.group_size, PaddedWidth: case.padded_width, Limit: limit}
    return next((value for kind, value in kinds.items() if isinstance(argument, kind)), argument.default)


def sets_for(case: Case, tokens: int, device: torch.device, peers: int) -> int:
    """How many sets of inputs to rotate through.

    Args:
        case: what is measured.
        tokens: rows of one set.
        device: whose cache they should outgrow, and into whose memory they and the results of all peers must fit.
        peers: how many peers keep a result for each set.
    """
    wanted = -(-CACHES * cache_size(device) // case.bytes_moved(tokens)) if device.type == "cuda" else FEWEST_SETS
    columns = case.row_width or sum(case.width_of(rows.name) for rows in case.form.op.rows)
    each = columns * ITEM_SIZES[case.dtype] * tokens + (peers + 1) * case.bytes_moved(tokens)
    return max(1, min(max(FEWEST_SETS, min(wanted, MOST_SETS)), memory_for(device) // each))


def make(case: Case, tokens: int, device: torch.device, sets: int, seed: int = 0) -> Work:
    """Fresh random inputs; rows differ in size, as hidden states do, and weights lie around one (offset included).

    What is summed over ranks differs on each; all else is the same.
    """
    op = case.form.op
    widths = [case.width_of(rows.name) for rows in op.rows]
    generator = torch.Generator(device).manual_seed(seed + tokens)
    centre = 1 - max(case.weight_offsets.values(), default=0.0)
    # A product of two small rows would reach the floors that others put under their scales.
    spread = 1.0 if step_of(case.form, SiluMul) is None else 0.25

    reduced = step_of(case.form, AllReduce)
    own = torch.Generator(device).manual_seed(seed + tokens + (1 + rank_group().rank) * 1_000_003)

    def normal(*shape: int, of: torch.Generator = generator) -> Tensor:
        return torch.randn(*shape, device=device, generator=of)

    def tensor(width: int, of: torch.Generator = generator) -> Tensor:
        return normal(tokens, width, of=of).mul_(normal(tokens, 1, of=of).mul_(spread).exp_()).to(DTYPES[case.dtype])

    def headed(several: Iterable[Tensor]) -> tuple[Tensor, ...]:
        counts = [case.heads_of(each) for each in op.rows]
        return tuple(
            x if count is None else x.unflatten(-1, (count, -1)) for x, count in zip(several, counts, strict=True)
        )

    def rows() -> tuple[Tensor, ...]:
        if case.row_width is None:
            parts = [reduced is not None and each.name == reduced.x for each in op.rows]
            return headed(tensor(width, own if part else generator) for width, part in zip(widths, parts, strict=True))
        shared = tensor(case.row_width)
        return headed(shared.split([*widths, case.row_width - sum(widths)], dim=-1)[:-1])

    weights = {
        each.name: (centre + 0.2 * normal(case.widths[width])).to(DTYPES[case.weight_dtype])
        for each in op.args
        if isinstance(each, Weight)
        for width in (next(rows.width for rows in op.rows if rows.name == each.of),)
    }
    scales = {
        each.name: torch.full((1,), each.sample, device=device) for each in op.args if isinstance(each, StaticScale)
    }
    return Work(
        case=case,
        tokens=tokens,
        device=device,
        sets=tuple(rows() for _ in range(sets)),
        weights={**weights, **scales, **_of_rope(case, tokens, device, generator)},
    )


def _of_rope(case: Case, tokens: int, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """One table as vLLM has it, cos and then sin in each row, by its two halves; and positions in any order. Empty without a rope."""
    names = [each.name for each in case.form.op.args if isinstance(each, Table)]
    if case.turned is None or not names:
        return {}
    frequencies = 1.0 / ROPE_BASE ** (torch.arange(0, case.turned, 2, device=device).double() / case.turned)
    angles = torch.arange(POSITIONS, device=device).double()[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], -1).to(DTYPES[case.dtype])
    indices = [each.name for each in case.form.op.args if isinstance(each, Index)]
    positions = torch.randint(0, POSITIONS, (tokens,), device=device, generator=generator)
    return {**dict(zip(names, table.chunk(2, -1), strict=True)), **dict.fromkeys(indices, positions)}


def cache_size(device: torch.device) -> int:
    """Bytes of the last cache before memory, 0 where nothing says."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    try:
        size = levels[-1].read_text().strip() if levels else ""
    except OSError:
        return 0
    return int(size[:-1]) << 10 if size.endswith("K") and size[:-1].isdigit() else 0


def memory_for(device: torch.device) -> int:
    """Bytes that a measurement may take: half of what is free on a GPU; 2 GiB of a host."""
    return int(torch.cuda.mem_get_info(device)[0]) // 2 if device.type == "cuda" else 2 << 30
