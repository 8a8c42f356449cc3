"""The launches of routed experts with few tokens, see `family` for what all launches have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...declare import Op
from ...linear_ops import WIDEST
from ...ops.linear import BLOCK, MOST
from ...ops.linear import block_scaled_experts as reference
from ...ops.quantisation import LARGEST, scaling
from . import launcher, linear, refuses_fp8
from .experts_kernel import few_token_experts_down, few_token_experts_up


class Shape(NamedTuple):
    """How the two products are shared out among programs."""

    up_tile: int
    "Columns of gates of a program of the first, beside as many of the others."
    up_groups: int
    "Groups of 128 columns of the depth that it takes."
    up_warps: int
    down_tile: int
    "Columns of a program of the second."
    down_each: int
    "Pairs of token and expert that it takes."
    down_batch: int
    "Groups of 128 columns that it asks for at once."
    down_warps: int


def shape_of(tokens: int, inner: int) -> Shape:
    """By bench/results/few_token_experts_search-nvidia-h100.json, for so many tokens, and so many columns between the two products."""
    groups = inner // BLOCK
    if tokens <= 2:
        return Shape(64, 2, 4, 128, 1, 1 if launcher.HIP else min(4, groups), 4)
    return Shape(64, 4, 4, 64, 4, min(2, groups), 2)


def refuses(case: Any) -> str | None:
    """As `Kernel.refuses`: what Triton cannot multiply here."""
    if len({case.dtype, case.w13_dtype, case.w2_dtype}) > 1:
        return f"x is {case.dtype}, w13 {case.w13_dtype} and w2 {case.w2_dtype}; the kernel multiplies one format"
    return refuses_fp8(case.w2_dtype)


def function_of(op: Op) -> Callable[..., Any]:
    """The function that takes the op's arguments by position and launches the kernels, for 16 tokens at a time."""
    name = op.name

    def function(
        x: Tensor, x_scale: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, router: Tensor, ids: Tensor,
        out: Tensor, use_ue8m0: bool, steady: bool,
    ) -> None:  # fmt: skip
        linear.make_ready(x.device)
        weights = (w13, w13_scale, w2, w2_scale)
        tiles = w2.shape[2] // shape_of(MOST, w2.shape[2]).up_tile
        most = min(MOST, linear.MOST_TILES // (ids.shape[1] * tiles))
        if most == 0 or w2.shape[1] > WIDEST:  # more tiles than are counted
            reference(x, x_scale, w13, w13_scale, w2, w2_scale, router, ids, out, use_ue8m0, steady)
            return
        for at in range(0, len(x), most):
            some = slice(at, at + most)
            _launch(name, (x[some], x_scale[some], router[some], ids[some]), weights, out[some], use_ue8m0, steady)

    return function


def _launch(
    name: str, rows: tuple[Tensor, ...], weights: tuple[Tensor, ...], out: Tensor, use_ue8m0: bool, steady: bool
) -> None:
    (x, x_scale, router, ids), (w13, w13_scale, w2, w2_scale) = rows, weights
    (tokens, depth), topk = x.shape, ids.shape[1]
    experts, columns, inner = w2.shape
    most = next(each for each in linear.buckets() if tokens <= each)
    shape = shape_of(tokens, inner)
    device, interpreted = out.get_device(), launcher.interpreted(out.device)
    pairs, choices = 1 << (most * topk - 1).bit_length(), 1 << (topk - 1).bit_length()
    counters = linear.counters(x.device)
    middle = torch.empty((tokens * topk, inner), dtype=out.dtype, device=x.device)
    groups = min(shape.up_groups, depth // BLOCK)
    split, tiles = -(-depth // BLOCK // groups), inner // shape.up_tile
    parts = torch.empty(tokens * topk * tiles * split * 2 * shape.up_tile * most, dtype=torch.float32, device=x.device)
    units = linear.unit_of(x), linear.unit_of(w13), linear.unit_of(w2)
    _run(
        few_token_experts_up, (name, "up"), (x, x_scale, w13, w13_scale, ids, parts, counters, middle),
        (tokens, x.stride(0) // units[0], *x_scale.stride(), ids.stride(0), w13.stride(1) // units[1], w13.stride(0) // units[1]),
        (experts, topk, choices, pairs, inner, depth, BLOCK, units[0], units[1], most, shape.up_tile, groups, split, interpreted),
        topk * tiles * split, shape.up_warps, device,
    )  # fmt: skip
    tiles, split = -(-columns // shape.down_tile), -(-topk // shape.down_each)
    parts = torch.empty(tokens * tiles * split * shape.down_tile * most, dtype=torch.float32, device=x.device)
    _run(
        few_token_experts_down, (name, "down"), (middle, w2, w2_scale, ids, router, parts, counters, out),
        (tokens, ids.stride(0), router.stride(0), w2.stride(1) // units[2], w2.stride(0) // units[2], out.stride(0), tokens * split),
        (
            experts, topk, choices, pairs, columns, inner, BLOCK, units[2], LARGEST[w2.dtype], scaling(use_ue8m0), most, shape.down_tile,
            shape.down_each, shape.down_batch, interpreted, steady,
        ),
        tiles * split, shape.down_warps, device,
    )  # fmt: skip


def _run(
    kernel: Any, name: tuple[str, str], tensors: tuple[Tensor, ...], numbers: tuple[int, ...], constants: tuple[Any, ...],
    programs: int, warps: int, device: int,
) -> None:  # fmt: skip
    """Launch so many programs for each token."""
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    dtypes = tuple(tensor.dtype for tensor in tensors)
    key = (*name, device, dtypes, constants, programs, warps, launcher.special(max(numbers), addresses, tensors))
    if launcher.again(key, device, addresses, numbers):
        return
    launcher.first(
        kernel, key, tensors, numbers, constants, rows=1, sides=programs, warps=warps * 32 // launcher.wave(tensors[0].device)
    )  # fmt: skip
