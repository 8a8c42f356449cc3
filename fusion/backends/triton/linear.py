"""The launch of `group_quant_linear`, see `family` for what all launches have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...declare import Op
from ...ops import linear
from ...ops.quantisation import LARGEST
from . import launcher, refuses_fp8, tuning
from .linear_kernel import few_token_linear

MOST = 16
"""Tokens up to which the product is ours: beyond, DeepGEMM's and FlashInfer's are faster (bench/results/few_token_gemm-*.json)."""
_UNIT = 16
"""Bytes of the widest load."""

_arrived: dict[tuple[torch.device, int], Tensor] = {}


class Shape(NamedTuple):
    """How a product is shared out."""

    tile: int
    "Columns of a program."
    groups: int
    "Groups of 128 columns of the depth that it takes."
    split: int
    "Programs that share a tile's depth."
    warps: int


def shape_of(columns: int, depth: int) -> Shape:
    """About two programs per processor of an H100, with all their weights in registers; the same for any number of tokens.

    So what a token gives does not depend on the others.
    """
    groups, tile = -(-depth // linear.BLOCK), 128 if columns * depth >= 8 << 20 else 64
    tiles = -(-columns // tile)
    least = -(-groups * tiles // 512)
    held = min(max(least, 4 if tile == 128 else 2), 6, groups)
    # As even as the depth allows: the last part may be short.
    each = -(-groups // -(-groups // held))
    return Shape(tile, each, -(-groups // each), 8 if tile == 128 else 4)


def refuses(case: Any) -> str | None:
    """As `Kernel.refuses`: what Triton cannot multiply here."""
    return refuses_fp8(case.weight_dtype)


def steps_of(case: Any) -> tuple[int, ...]:  # noqa: ARG001 (every backend is asked for a case)
    """As `Backend.steps`: what is launched changes behind these numbers of tokens."""
    return (MOST,)


def function_of(op: Op) -> Callable[..., Any]:
    """The function that takes the op's arguments by position and launches the kernel."""
    name = op.name

    def function(x: Tensor, weight: Tensor, weight_scale: Tensor, use_ue8m0: bool, steady: bool, beyond: str) -> Tensor:
        tokens = x.shape[:-1].numel()
        if tokens > MOST:
            if beyond:
                return linear.op_of(beyond)(x, weight, weight_scale)
            return linear.group_quant_linear(x, weight, weight_scale, use_ue8m0)
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
        if tokens:
            _launch(name, x.reshape(tokens, -1), weight, weight_scale, out, use_ue8m0, steady)
        return out

    return function


def _counters(device: torch.device, tiles: int) -> Tensor:
    """Zeros, which every launch leaves as zeros; a stream has its own, as its launches follow each other."""
    key = (device, 0 if launcher.interpreted(device) else torch.cuda.current_stream(device).cuda_stream)
    known = _arrived.get(key)
    if known is None or len(known) < tiles:
        # A graph that is being captured keeps the old ones by their address, so they are not let go of.
        known = _arrived[key] = torch.zeros(max(1024, tuning.power_of_two(tiles)), dtype=torch.int32, device=device)
        _kept.append(known)
    return known


_kept: list[Tensor] = []


def _launch(
    name: str, x: Tensor, weight: Tensor, weight_scale: Tensor, out: Tensor, use_ue8m0: bool, steady: bool
) -> None:
    (tokens, depth), columns = x.shape, len(weight)
    shape = shape_of(columns, depth)
    tiles = -(-columns // shape.tile)
    parts = torch.empty(shape.split if shape.split > 1 else 0, tokens, columns, dtype=torch.float32, device=x.device)
    x_unit, weight_unit = _unit_of(x), _unit_of(weight)
    every = (x, weight, weight_scale, parts, _counters(x.device, tiles), out)
    numbers = (tokens, x.stride(0) // x_unit, weight.stride(0) // weight_unit)
    addresses = tuple(tensor.data_ptr() for tensor in every)
    device = out.get_device()
    key = (
        name, device, x.dtype, weight.dtype, columns, depth, x_unit, weight_unit, use_ue8m0, steady,
        launcher.special(max(numbers), addresses, every),
    )  # fmt: skip
    if launcher.again(key, device, addresses, numbers):
        return
    constants = (
        columns, depth, linear.BLOCK, x_unit, weight_unit, LARGEST[weight.dtype], use_ue8m0, MOST, shape.tile, shape.groups, shape.split,
        launcher.interpreted(out.device), steady,
    )  # fmt: skip
    launcher.first(
        few_token_linear, key, every, numbers, constants,
        rows=MOST, sides=tiles * shape.split, warps=shape.warps * 32 // launcher.wave(out.device),
    )  # fmt: skip


def _unit_of(rows: Tensor) -> int:
    """The largest power of two, up to a load's, that all rows start on."""
    most = _UNIT // rows.element_size()
    return math.gcd(rows.stride(0), most)
