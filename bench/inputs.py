"""The tensors of a measurement, as many sets of them as outgrow the cache.

Latents are column views of one projection's output, as an MLA layer has them; other rows are tensors of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..fusion.declare import Argument, Epsilon, GroupSize, QuantDtype, Rows, Weight, WeightOffset
from .cases import ITEM_SIZES, Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}

FEWEST_SETS, MOST_SETS = 8, 64
"""On a GPU; on a CPU, whose cache may outsize anything that is worth the time, always the fewest."""
CACHES = 4
"""How many times the last-level cache all sets together should hold."""


@frozen(kw_only=True, eq=False)
class Work:
    """One case with one number of tokens: the inputs of every call."""

    case: Case
    tokens: int
    device: torch.device
    sets: tuple[tuple[Tensor, ...], ...]
    "The arguments of kind `Rows` in the op's order, (tokens, width) each."
    weights: dict[str, Tensor]
    "By argument, (width,) each."

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs, weights and unquantised results."""
        return DTYPES[self.case.dtype]

    @property
    def fp8(self) -> torch.dtype:
        """Of the quantised result."""
        return fp8_of(self.case)

    def arguments(self, rows: Sequence[Tensor]) -> tuple[Any, ...]:
        """All of the op's arguments by position, with these rows."""
        return arguments(self.case, rows, self.weights)


def fp8_of(case: Case) -> torch.dtype:
    """The fp8 dtype of a case; some fp8 dtype where it quantises nothing."""
    return FP8_DTYPES[case.fp8 or "e4m3fn"]


def arguments(case: Case, rows: Sequence[Tensor], weights: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """All of the op's arguments by position."""
    fusion = case.declared
    tensors = {**{each.name: tensor for each, tensor in zip(fusion.op.rows, rows, strict=True)}, **weights}
    return tuple(
        tensors[argument.name] if isinstance(argument, Rows | Weight) else _constant(case, argument)
        for argument in fusion.op.args
    )


def _constant(case: Case, argument: Argument) -> Any:
    name, quant = argument.name, case.declared.quant
    if isinstance(argument, Epsilon):
        return case.epsilons[name]
    if isinstance(argument, WeightOffset):
        return case.weight_offsets[name]
    if isinstance(argument, QuantDtype):
        return fp8_of(case)
    if isinstance(argument, GroupSize):
        return case.group_size
    if quant is not None and name == quant.use_ue8m0:
        return case.ue8m0
    if quant is not None and name == quant.column_major:
        return case.column_major
    return argument.default


def sets_for(case: Case, tokens: int, device: torch.device, peers: int) -> int:
    """How many sets of inputs to rotate through.

    Args:
        case: what is measured.
        tokens: rows of one set.
        device: whose cache they should outgrow, and into whose memory they and the results of all peers must fit.
        peers: how many peers keep a result for each set.
    """
    wanted = -(-CACHES * cache_size(device) // case.bytes_moved(tokens)) if device.type == "cuda" else FEWEST_SETS
    columns = case.row_width or sum(case.width_of(rows.name) for rows in case.declared.op.rows)
    each = columns * ITEM_SIZES[case.dtype] * tokens + (peers + 1) * case.bytes_moved(tokens)
    return max(1, min(max(FEWEST_SETS, min(wanted, MOST_SETS)), memory_for(device) // each))


def make(case: Case, tokens: int, device: torch.device, sets: int, seed: int = 0) -> Work:
    """Fresh random inputs; rows differ in size, as hidden states do, and weights lie around one (offset included)."""
    dtype, op = DTYPES[case.dtype], case.declared.op
    widths = [case.width_of(rows.name) for rows in op.rows]
    generator = torch.Generator(device).manual_seed(seed + tokens)
    centre = 1 - max(case.weight_offsets.values(), default=0.0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def tensor(width: int) -> Tensor:
        return normal(tokens, width).mul_(normal(tokens, 1).exp_()).to(dtype)

    def rows() -> tuple[Tensor, ...]:
        if case.row_width is None:
            return tuple(tensor(width) for width in widths)
        shared = tensor(case.row_width)
        return tuple(shared.split([*widths, case.row_width - sum(widths)], dim=-1)[:-1])

    return Work(
        case=case,
        tokens=tokens,
        device=device,
        sets=tuple(rows() for _ in range(sets)),
        weights={
            each.name: (centre + 0.2 * normal(case.width_of(each.of))).to(dtype)
            for each in op.args
            if isinstance(each, Weight)
        },
    )


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
