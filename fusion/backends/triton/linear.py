"""The launch of linears with few tokens, see `family` for what all launches have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...declare import BlockScales, Op
from ...kernel_source import imported
from ...ops import linear
from ...ops.quantisation import LARGEST, scaling
from . import launcher, refuses_fp8
from .linear_kernel import few_token_linear, few_token_plain

_FEWEST = 8
"""Tokens of a kernel of its own on NVIDIA GPUs. For AMD's it is compiled with a thousand spilled registers."""
_UNIT = 16
"""Bytes of the widest load."""

_SLOTS, MOST_TILES = 64, 8192
_slabs: dict[torch.device, Tensor] = {}
_slots: dict[tuple[torch.device, int], int] = {}


class Shape(NamedTuple):
    """How a product is shared out."""

    tile: int
    "Columns of a program."
    groups: int
    "Groups of 128 columns of the depth that it takes."
    split: int
    "Programs that share a tile's depth."
    warps: int


_ENOUGH = 132
"""Programs, one for each SM of Hopper's."""
_ALONE = 12
"""Groups up to which a program takes all of the depth for 16 tokens, where there is an SM for each: it has no memory for a second one then.

One shape was timed: of 3072 x 1536 these took 2.73 us on an H200, and two programs that share it 3.77 (bench/results/few_token_search_16-nvidia-h200.json).
"""


def shape_of(columns: int, depth: int, most: int, quantised: bool) -> Shape:
    """By the measurements in bench/results/few_token_shapes-nvidia-h100.json and, for up to 8 tokens, few_token_shapes_triton_3_8-nvidia-h100.json.

    Two warps keep Triton from Hopper's warp-group products, which 3.8 takes for 8 tokens: with four the same bytes took 41.0 us for the five linears
    of a rank of DeepSeek-V3, and with two 34.9.

    Args:
        columns: of the product.
        depth: of it.
        most: the tokens that a kernel is compiled for. What a token gives is the same for all numbers up to them.
        quantised: whether activations come in fp8.
    """
    groups, tile, warps = -(-depth // linear.BLOCK), 128, 8
    if most == _FEWEST:
        wanted, tile, warps = 3, 64, 2
    elif quantised:
        alone = groups <= _ALONE and columns <= 64 * _ENOUGH
        wanted, tile, warps = groups if alone else min((8, 6), key=lambda held: -groups % held), 64, 4
    else:
        wanted = 5
    held = min(wanted, groups)
    return Shape(tile, held, -(-groups // held), warps)


class PlainShape(NamedTuple):
    """How a product without scales inside of its sums is shared out."""

    tile: int
    "Columns of a program."
    block: int
    "Columns of the depth in a group."
    groups: int
    "Groups that a program takes."
    held: int
    "Of them those that are on their way at once."
    split: int
    "Programs that share a tile's depth."
    warps: int


def plain_shape(depth: int, tile: int, block: int, groups: int, held: int, warps: int) -> PlainShape:
    """A shape of no more groups than the depth has.

    Raises:
        ValueError: warps without 16 columns of their own, which a tensor core's instruction takes of each. For eight warps of 64 columns the assembler
            of Triton 3.6 (ptxas 12.8) was seen to take the address of an operand from the stack's pointer or a thread's number: an illegal access.
    """
    if tile < 16 * warps:
        raise ValueError(f"{warps} warps share {tile} columns, and each takes 16 of them at a time")
    several = -(-depth // block)
    taken = min(groups, several)
    return PlainShape(tile, block, taken, min(held, taken), -(-several // taken), warps)


_MANY = 8192
"""Columns from which programs take twice as many of them for 16 tokens."""
_TAKEN = (8, 9)
"""Groups of 128 columns of the depth that a program takes for 16 tokens, where it takes as many as every other."""
_PLENTY = range(200, 400)
"""Programs that must be left for each to take 1024 of the depth with up to 8 tokens, and not 512: 224 and 231 gained by it, 160 and 504 lost."""


def plain_shape_of(columns: int, depth: int, most: int) -> PlainShape:
    """By bench/results/few_token_bfloat16-nvidia-h100.json: the fastest in sum over the four linears of Qwen3-4B, of 1 token and of 16.

    By few_token_bfloat16_search-nvidia-h200.json where programs of 16 tokens can take 8 or 9 groups each: 2112, 4608 x 7168, 7168 x 2048, 2304.
    By few_token_bfloat16_search_8-nvidia-h200.json where those of up to 8 can take 1024 of the depth each: 2112 x 7168, 7168 x 2048. In groups of 256
    columns of the depth these were 0.3 us faster, and did not fit the shared memory of sm89.

    The arguments are those of `shape_of`.
    """
    if most > _FEWEST and columns >= _MANY:
        return plain_shape(depth, 128, 128, 2, 2, 8)
    if most > _FEWEST:
        for groups in _TAKEN:
            split, rest = divmod(depth, groups * 128)
            if rest == 0 and split * columns >= 64 * _ENOUGH:
                return plain_shape(depth, 64, 128, groups, 4, 4)
    elif depth % 1024 == 0 and depth // 1024 * columns in range(64 * _PLENTY.start, 64 * _PLENTY.stop):
        return plain_shape(depth, 64, 128, 8, 4, 4)
    return plain_shape(depth, 64, 256, 2, 2, 4)


_DEEP = 4096
"""Of the depth: from here on programs take more of it for 16 tokens."""


def scaled_shape_of(columns: int, depth: int, most: int) -> PlainShape:
    """Of weights in fp8, by bench/results/few_token_channels-nvidia-h100.json: the fastest of each size among those that were tried.

    The arguments are those of `plain_shape_of`.
    """
    if columns * depth >= linear.LARGE:
        return plain_shape(depth, 64, 256, *((2, 2, 2) if most == _FEWEST else (4, 2, 4)))
    if most == _FEWEST:
        return plain_shape(depth, 64, 128, 8, 8, 4)
    return plain_shape(depth, 64, 256, 4, 2, 4) if depth >= _DEEP else plain_shape(depth, 64, 128, 4, 4, 4)


def buckets() -> tuple[int, ...]:
    """Tokens that kernels are compiled for, so that each is launched up to there."""
    return (linear.MOST,) if launcher.HIP else (_FEWEST, linear.MOST)


def refuses(case: Any) -> str | None:
    """As `Kernel.refuses`: what Triton cannot multiply here."""
    if case.dtype in LARGEST and case.dtype != case.weight_dtype:
        return f"x is {case.dtype} and the weight {case.weight_dtype}; the kernel multiplies one format"
    return refuses_fp8(case.weight_dtype)


def refuses_plain(case: Any) -> str | None:
    """The same of a linear without scales."""
    if case.dtype.itemsize != 2:
        return f"x is {case.dtype}; the kernel multiplies bfloat16 and float16"
    return None


def steps_of(case: Any) -> tuple[int, ...]:  # noqa: ARG001 (every backend is asked for a case)
    """As `Backend.steps`: what is launched changes behind these numbers of tokens."""
    return buckets()


def function_of(op: Op) -> Callable[..., Any]:
    """The function that takes an op's arguments by position and launches its kernel.

    More tokens than few go to the op's reference, which knows what they are handed on to.
    """
    names = [argument.name for argument in op.args[1:]]
    launch = _launch if any(isinstance(argument, BlockScales) for argument in op.args) else _launch_plain
    reference = imported(f"{linear.__name__}:{op.name}")

    def function(x: Tensor, *others: Any) -> Any:
        given = dict(zip(names, others, strict=True))
        tokens, weight = x.shape[:-1].numel(), given["weight"]
        make_ready(x.device)
        if linear.are_many(x, weight):
            return reference(x, *others)
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=given.get("out_dtype", x.dtype), device=x.device)
        if tokens:
            launch(op.name, x.reshape(tokens, -1), given, out)
        return out

    return function


def make_ready(device: torch.device) -> None:
    """Make the counters at a call with any number of tokens: an engine's profiling run, in front of its captures, has many."""
    if device not in _slabs and (launcher.interpreted(device) or not torch.cuda.is_current_stream_capturing()):
        counters(device)


def counters(device: torch.device) -> Tensor:
    """Zeros, which every launch leaves as zeros. A stream has its own, as its launches follow each other; the 65th shares the first's.

    Raises:
        RuntimeError: the first call of a process is captured in a CUDA graph, which would make zeros at each replay.
    """
    interpreted = launcher.interpreted(device)
    slab = _slabs.get(device)
    if slab is None:
        if not interpreted and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a linear with few tokens is captured in a CUDA graph before one ever ran: call it once in front"
            )
        slab = _slabs[device] = torch.zeros(_SLOTS, MOST_TILES, dtype=torch.int32, device=device)
        if not interpreted:
            torch.cuda.synchronize(device)  # other streams will use it
    stream = 0 if interpreted else torch.cuda.current_stream(device).cuda_stream
    return slab[_slots.setdefault((device, stream), len(_slots)) % _SLOTS]


def _launch(name: str, x: Tensor, given: dict[str, Any], out: Tensor) -> None:
    """With scales of blocks. given: the op's other arguments."""
    weight, weight_scale, steady = given["weight"], given["weight_scale"], given["steady"]
    scale, how = given.get("x_scale"), scaling(given.get("use_ue8m0", False))
    (tokens, depth), columns = x.shape, len(weight)
    if scale is not None and scale.dim() != 2:  # a view has no layout of scales by columns of several dimensions
        scale = scale.reshape(tokens, -1)
    most = next(each for each in buckets() if tokens <= each)
    shape = shape_of(columns, depth, most, scale is not None)
    tiles = -(-columns // shape.tile)
    x_unit, weight_unit = unit_of(x), unit_of(weight)
    parts = _parts(tiles, shape, most, x.device)
    every = (x, weight_scale if scale is None else scale, weight, weight_scale, parts, counters(x.device), out)
    strides = (0, 0) if scale is None else scale.stride()
    numbers = (tokens, x.stride(0) // x_unit, *strides, weight.stride(0) // weight_unit)
    addresses = tuple(tensor.data_ptr() for tensor in every)
    device = out.get_device()
    key = (
        name, device, x.dtype, weight.dtype, out.dtype, columns, depth, most, x_unit, weight_unit, how, steady,
        launcher.special(max(numbers), addresses, every),
    )  # fmt: skip
    if launcher.again(key, device, addresses, numbers):
        return
    constants = (
        columns, depth, linear.BLOCK, x_unit, weight_unit, LARGEST[weight.dtype], how, most, shape.tile, shape.groups, shape.split,
        scale is not None, launcher.interpreted(out.device), steady,
    )  # fmt: skip
    launcher.first(
        few_token_linear, key, every, numbers, constants,
        rows=most, sides=tiles * shape.split, warps=shape.warps * 32 // launcher.wave(out.device),
    )  # fmt: skip


def _launch_plain(name: str, x: Tensor, given: dict[str, Any], out: Tensor) -> None:
    """With scales of whole rows, or none. given: the op's other arguments."""
    weight, bias, steady = given["weight"], given["bias"], given["steady"]
    scale, weight_scale = given.get("x_scale"), given.get("weight_scale")
    (tokens, depth), columns = x.shape, len(weight)
    if scale is not None and scale.dim() != 2:
        scale = scale.reshape(-1, 1)
    most = next(each for each in buckets() if tokens <= each)
    shape = (plain_shape_of if scale is None else scaled_shape_of)(columns, depth, most)
    tiles = -(-columns // shape.tile)
    x_unit, weight_unit = unit_of(x), unit_of(weight)
    parts = _parts(tiles, shape, most, x.device)
    # What is not there is not read: another address stands for it.
    scales = (x, weight) if scale is None or weight_scale is None else (scale, weight_scale)
    every = (x, scales[0], weight, scales[1], weight if bias is None else bias, parts, counters(x.device), out)
    scale_row = 0 if scale is None or len(scale) == 1 else scale.stride(0)
    numbers = (tokens, x.stride(0) // x_unit, scale_row, weight.stride(0) // weight_unit)
    channels = weight_scale is not None and weight_scale.numel() > 1
    addresses = tuple(tensor.data_ptr() for tensor in every)
    device = out.get_device()
    key = (
        name, device, x.dtype, weight.dtype, out.dtype, columns, depth, most, shape, x_unit, weight_unit, channels, bias is None, steady,
        launcher.special(max(numbers), addresses, every),
    )  # fmt: skip
    if launcher.again(key, device, addresses, numbers):
        return
    constants = (
        columns, depth, shape.block, x_unit, weight_unit, most, shape.tile, shape.groups, shape.split, shape.held,
        scale is not None, channels, bias is not None, launcher.interpreted(out.device), steady,
    )  # fmt: skip
    launcher.first(
        few_token_plain, key, every, numbers, constants,
        rows=most, sides=tiles * shape.split, warps=shape.warps * 32 // launcher.wave(out.device),
    )  # fmt: skip


def _parts(tiles: int, shape: Shape | PlainShape, most: int, device: torch.device) -> Tensor:
    """What the programs that share a tile leave each other."""
    size = (tiles, shape.split, shape.tile, most) if shape.split > 1 else (0,)
    return torch.empty(size, dtype=torch.float32, device=device)


def unit_of(rows: Tensor) -> int:
    """The largest power of two, up to a load's, that all rows start on."""
    most = _UNIT // rows.element_size()
    return math.gcd(*rows.stride()[:-1], most)
