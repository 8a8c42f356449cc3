"""The checks of an op's arguments, made from its declaration: what every backend needs, before anything is launched.

For each kind of argument a function says what is wrong with one: of the op, the argument, its value and all values by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..declare import (
    Argument,
    Bias,
    BlockScales,
    Cache,
    ChannelScales,
    Choice,
    ColumnMajor,
    Epsilon,
    ExpertIds,
    ExpertScales,
    ExpertWeights,
    Exponents,
    FloatDtype,
    GroupName,
    GroupSize,
    HeadWeight,
    Index,
    Limit,
    LinearWeight,
    NamedOp,
    Op,
    Output,
    Packed,
    PaddedWidth,
    PlainWeight,
    QuantDtype,
    Quantised,
    QuantisedRows,
    RouterWeights,
    Rows,
    RowScales,
    StaticScale,
    Table,
    TmaAligned,
    TokenScales,
    Weight,
    WeightOffset,
)
from .cache_layout import layout_of
from .groups import GroupError, process_group
from .linear import BLOCK, op_of, scales_shape
from .norm import FLOATS
from .quantisation import GROUP_SIZES, LARGEST, MX_COLUMNS, scale_shape

_QUANTISED_FROM = (torch.float32, torch.bfloat16, torch.float16)

Values = Mapping[str, Any]


def checker(op: Op) -> Callable[..., None]:
    """What every backend needs of the arguments, checked before anything is launched.

    The function raises TypeError, ValueError or RuntimeError, and the message names the argument.
    """
    name = f"layerfuse::{op.name}"
    names = [argument.name for argument in op.args]
    found = ((argument, _problems_of(argument)) for argument in op.args)
    checks = [(argument, problems) for argument, problems in found if problems is not None]
    tensors = [place for place, argument in enumerate(op.args) if argument.is_tensor]
    blocks = [each.of for each in op.results if isinstance(each, Exponents)]

    def check(*given: Any) -> None:
        values = dict(zip(names, given, strict=True))
        for argument, problems in checks:
            for problem in problems(op, argument, values[argument.name], values):
                raise ValueError(f"{name}: {problem}")
        for of in blocks:
            if values[of].shape[-1] % MX_COLUMNS:
                raise ValueError(f"{name}: rows of {values[of].shape[-1]} columns are no multiple of {MX_COLUMNS}")
        if (
            op.backward is None
            and torch.is_grad_enabled()
            and any(given[place].requires_grad for place in tensors if given[place] is not None)
        ):
            raise RuntimeError(f"{name} is for inference and has no backward; use torch.no_grad()")
        if op.check is not None:
            op.check(*given)

    return check


def _rows(op: Op, argument: Rows, x: Any, values: Values) -> Iterator[str]:
    name, like = argument.name, argument.like
    if x is None:  # which the dispatcher lets through for the first argument
        raise TypeError(f"layerfuse::{op.name}: {name} must be a tensor, got None")
    shape = x.shape
    if len(shape) < 1 + argument.heads:
        yield (
            f"{name} must be (..., heads, width), got {tuple(shape)}"
            if argument.heads
            else f"{name} needs at least one dimension, got a scalar"
        )
    known = _QUANTISED_FROM if any(isinstance(result, Quantised | Packed) for result in op.results) else FLOATS
    known = tuple(LARGEST) if isinstance(argument, QuantisedRows) else known
    if x.dtype not in known:
        yield _one_of(name, known, x.dtype)
    if shape[-1] == 0:
        yield f"{name} {tuple(shape)} has rows of no columns"
    if not argument.any_strides and x.stride(-1) != 1 and shape[-1] > 1 and x.numel() > 0:
        yield _gaps(name, x)
    if like is not None:
        other = values[like]
        if x.device != other.device:
            yield _elsewhere(name, x, like, other)
        if x.dtype != other.dtype:
            yield f"{name} is {x.dtype}, {like} is {other.dtype}; they must agree"
        end = -2 if argument.own_heads else -1
        if shape[:end] != other.shape[:end]:
            yield f"{name} must have the leading dimensions of {like} {tuple(other.shape[:end])}, got {tuple(shape[:end])}"
    first = next(rows.name for rows in op.rows if rows.width == argument.width)
    if first != name and shape[-1] != (width := values[first].shape[-1]):
        yield f"{name} must be as wide as {first}, {width} columns; got {tuple(shape)}"
    if argument.wider_than is not None and shape[-1] <= (least := values[argument.wider_than].shape[-1]):
        yield f"{name} must be wider than {argument.wider_than}, {least} columns; got {tuple(shape)}"


def _weight(op: Op, argument: Weight, weight: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        yield (
            f"{name} must have shape ({x.shape[-1]},), the last dimension of {of} {tuple(x.shape)}; "
            f"got {tuple(weight.shape)}"
        )
    if weight.dtype not in FLOATS:
        yield _one_of(name, FLOATS, weight.dtype)
    if weight.device != x.device:
        yield _elsewhere(name, weight, of, x)
    if not op.rows[0].any_strides and weight.stride(0) != 1 and weight.shape[0] > 1:
        yield _gaps(name, weight)


def _epsilon(_: Op, argument: Epsilon, epsilon: Any, __: Values) -> Iterator[str]:
    if not epsilon >= 0:
        yield f"{argument.name} must be at least 0, got {epsilon!r}"


def _offset(_: Op, argument: WeightOffset, offset: Any, __: Values) -> Iterator[str]:
    if offset != offset:
        yield f"{argument.name} is NaN; 1.0 for zero-centred weights, else 0.0"


def _limit(_: Op, argument: Limit, limit: Any, __: Values) -> Iterator[str]:
    if not limit > 0:
        yield f"{argument.name} must be positive, infinite for no clamp; got {limit!r}"


def _group_name(_: Op, argument: GroupName, group: Any, __: Values) -> Iterator[str]:
    try:
        process_group(group)
    except GroupError as error:
        yield f"{argument.name}: {error}"


def _dtype(_: Op, argument: QuantDtype, dtype: Any, __: Values) -> Iterator[str]:
    if dtype not in tuple(LARGEST):
        yield _one_of(argument.name, tuple(LARGEST), dtype)


def _choice(_: Op, argument: Choice, word: Any, __: Values) -> Iterator[str]:
    if word not in argument.words:
        yield _one_of(argument.name, argument.words, word)


def _group_size(op: Op, argument: GroupSize, size: Any, values: Values) -> Iterator[str]:
    if size not in GROUP_SIZES:
        yield _one_of(argument.name, GROUP_SIZES, size)
    width = values[op.rows[0].name].shape[-1]
    if op.rows[0].heads and width % size:
        yield f"{argument.name} {size} does not divide heads of {width} columns; groups lie within a head"


def _scale(op: Op, argument: StaticScale, scale: Any, values: Values) -> Iterator[str]:
    if scale.numel() != 1 or scale.dtype != torch.float32:
        yield f"{argument.name} must be one element of torch.float32, got {tuple(scale.shape)} of {scale.dtype}"
    if scale.device != values[op.rows[0].name].device:
        yield _elsewhere(argument.name, scale, "the rows", values[op.rows[0].name])


def _padded(op: Op, argument: PaddedWidth, padded: Any, values: Values) -> Iterator[str]:
    width = values[op.rows[0].name].shape[-1]
    if padded < width:
        yield f"{argument.name} must be at least the width {width}, got {padded}"


def _aligned(op: Op, _: TmaAligned, aligned: Any, values: Values) -> Iterator[str]:
    if aligned and not any(values[each.name] for each in op.args if isinstance(each, ColumnMajor)):
        yield "tma_aligned scales are column-major; give column_major=True too"


# ---- what an op of a decode layer takes besides its rows -------------------------------------------------------------


def _index(op: Op, argument: Index, index: Any, values: Values) -> Iterator[str]:
    if index is None:
        return
    name, of, x = argument.name, argument.of, values[argument.of]
    tokens = prod(x.shape[: -2 if op.rows[0].heads else -1])
    if index.dtype not in (torch.int32, torch.int64):
        yield _one_of(name, (torch.int32, torch.int64), index.dtype)
    if index.dim() != 1 or index.shape[0] != tokens:
        yield f"{name} must have one number for each of the {tokens} tokens of {of}, got {tuple(index.shape)}"
    if index.device != x.device:
        yield _elsewhere(name, index, of, x)
    if index.stride(0) != 1 and tokens > 1:
        yield f"{name} has stride {index.stride(0)}; pass {name}.contiguous()"


def _table(op: Op, argument: Table, table: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    half = x.shape[-1] // 2
    first = next(each.name for each in op.args if isinstance(each, Table))
    fits = table.dim() == 2 and (1 <= table.shape[1] <= half if argument.partial else table.shape[1] == half)
    if not fits:
        most = "at most " if argument.partial else ""
        yield f"{name} must be (positions, {most}{half}), half as wide as {of}; got {tuple(table.shape)}"
    elif argument.partial and table.shape[1] != values[first].shape[1]:
        yield f"{name} must be as wide as {first}, {values[first].shape[1]} columns; got {tuple(table.shape)}"
    if x.shape[-1] % 2 and not argument.partial:
        yield f"{of} has {x.shape[-1]} columns, and a rope turns pairs of them"
    if table.dtype not in FLOATS:
        yield _one_of(name, FLOATS, table.dtype)
    if table.device != x.device:
        yield _elsewhere(name, table, of, x)
    if table.stride(1) != 1 and table.shape[1] > 1:
        yield f"{name} has stride {table.stride(1)} along its rows; pass {name}.contiguous()"
    if table.dim() == 2 and table.shape[0] != (rows := values[first].shape[0]):
        yield f"{name} must have as many positions as {first}, {rows}; got {tuple(table.shape)}"


def _head_weight(_: Op, argument: HeadWeight, weight: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    heads, width = x.shape[-2:]
    if weight.dim() != 3 or tuple(weight.shape[:2]) != (heads, width):
        yield f"{name} must be ({heads}, {width}, columns), as {of} has heads and columns; got {tuple(weight.shape)}"
    if weight.dtype != x.dtype or weight.device != x.device:
        yield f"{name} is {weight.dtype} on {weight.device}, {of} {x.dtype} on {x.device}; convert or move one of them"
    if 1 not in weight.stride()[1:]:
        yield f"{name} has strides {tuple(weight.stride())}, none of the last two is 1; pass {name}.contiguous()"


def _linear_weight(_: Op, argument: LinearWeight, weight: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not len(weight):
        yield f"{name} must be (columns, {x.shape[-1]}), as wide as {of}; got {tuple(weight.shape)}"
    known = (x.dtype,) if isinstance(argument, PlainWeight) else tuple(LARGEST)
    if weight.dtype not in known:
        yield _one_of(name, known, weight.dtype)
    if weight.device != x.device:
        yield _elsewhere(name, weight, of, x)
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        yield _gaps(name, weight)


def _bias(op: Op, argument: Bias, bias: Any, values: Values) -> Iterator[str]:
    name, of, weight = argument.name, argument.weight, values[argument.weight]
    if bias is None:
        return
    if tuple(bias.shape) != (len(weight),):
        yield f"{name} must be ({len(weight)},), as {of} {tuple(weight.shape)} has columns; got {tuple(bias.shape)}"
    dtype = next((values[each.name] for each in op.args if isinstance(each, FloatDtype)), weight.dtype)
    if bias.dtype != dtype or bias.device != weight.device:
        yield f"{name} must be {dtype} on {weight.device}, got {bias.dtype} on {bias.device}"
    if bias.stride(0) != 1 and len(bias) > 1:
        yield _gaps(name, bias)


def _block_scales(_: Op, argument: BlockScales, scales: Any, values: Values) -> Iterator[str]:
    name, weight = argument.name, values[argument.weight]
    if tuple(scales.shape) != (shape := scales_shape(weight)):
        yield f"{name} must be {shape}, one per 128 x 128 of {argument.weight} {tuple(weight.shape)}; got {tuple(scales.shape)}"
    if scales.dtype != torch.float32 or scales.device != weight.device:
        yield f"{name} must be torch.float32 on {weight.device}, got {scales.dtype} on {scales.device}"
    if not scales.is_contiguous():
        yield f"{name} has strides {tuple(scales.stride())}; pass {name}.contiguous()"


def _row_scales(_: Op, argument: RowScales, scales: Any, values: Values) -> Iterator[str]:
    name, x = argument.name, values[argument.of]
    if tuple(scales.shape) != (shape := scale_shape(x.shape[:-1], x.shape[-1], BLOCK)):
        yield f"{name} must be {shape}, one per 128 columns of {argument.of} {tuple(x.shape)}; got {tuple(scales.shape)}"
    if scales.dtype != torch.float32 or scales.device != x.device:
        yield f"{name} must be torch.float32 on {x.device}, got {scales.dtype} on {scales.device}"


def _token_scales(_: Op, argument: TokenScales, scales: Any, values: Values) -> Iterator[str]:
    name, x = argument.name, values[argument.of]
    if not _is_one(scales) and tuple(scales.shape) != (shape := (*x.shape[:-1], 1)):
        yield f"{name} must be {shape}, one per token of {argument.of} {tuple(x.shape)}, or one element; got {tuple(scales.shape)}"
    if scales.dtype != torch.float32 or scales.device != x.device:
        yield f"{name} must be torch.float32 on {x.device}, got {scales.dtype} on {scales.device}"


def _channel_scales(_: Op, argument: ChannelScales, scales: Any, values: Values) -> Iterator[str]:
    name, weight = argument.name, values[argument.weight]
    columns = len(weight)
    if not _is_one(scales) and tuple(scales.shape) not in ((columns,), (columns, 1), (1, columns)):
        yield f"{name} must be ({columns},), ({columns}, 1) or (1, {columns}), or one element; got {tuple(scales.shape)}"
    if scales.dtype != torch.float32 or scales.device != weight.device:
        yield f"{name} must be torch.float32 on {weight.device}, got {scales.dtype} on {scales.device}"
    if not scales.is_contiguous():
        yield f"{name} has strides {tuple(scales.stride())}; pass {name}.contiguous()"


def _is_one(scales: Tensor) -> bool:
    """Whether it is one element, without a guard on the number of tokens."""
    return all(type(size) is int and size == 1 for size in scales.shape)


def _expert_weights(op: Op, argument: ExpertWeights, weights: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    behind = any(each.name == of and isinstance(each, ExpertWeights) for each in op.args)
    if behind and x.dim() == 3:
        wanted = (x.shape[0], x.shape[2], x.shape[1] // 2)
        if tuple(weights.shape) != wanted:
            yield f"{name} must be {wanted}: as many experts as {of}, as many columns as that is wide, and half as wide; got {tuple(weights.shape)}"
    elif not behind and x.dim() != 2:
        yield f"{of} must be (tokens, width); got {tuple(x.shape)}"
    elif not behind and (weights.dim() != 3 or weights.shape[2] != x.shape[-1]):
        yield f"{name} must be (experts, columns, {x.shape[-1]}), as wide as {of}; got {tuple(weights.shape)}"
    elif not behind and (weights.shape[1] % (2 * BLOCK) or weights.shape[2] % BLOCK or not len(weights)):
        yield f"{name} must be whole blocks of 128 x 128, gates and as many others; got {tuple(weights.shape)}"
    if weights.dtype not in LARGEST:
        yield _one_of(name, tuple(LARGEST), weights.dtype)
    if weights.device != x.device:
        yield _elsewhere(name, weights, of, x)
    if weights.stride(-1) != 1:
        yield _gaps(name, weights)


def _expert_scales(_: Op, argument: ExpertScales, scales: Any, values: Values) -> Iterator[str]:
    name, weights = argument.name, values[argument.weights]
    if weights.dim() == 3 and tuple(scales.shape) != (shape := (len(weights), *scales_shape(weights[0]))):
        yield f"{name} must be {shape}, one per 128 x 128 of {argument.weights} {tuple(weights.shape)}; got {tuple(scales.shape)}"
    if scales.dtype != torch.float32 or scales.device != weights.device:
        yield f"{name} must be torch.float32 on {weights.device}, got {scales.dtype} on {scales.device}"
    if not scales.is_contiguous():
        yield f"{name} has strides {tuple(scales.stride())}; pass {name}.contiguous()"


def _router(_: Op, argument: RouterWeights | ExpertIds, given: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    wanted = (torch.int32, torch.int64) if isinstance(argument, ExpertIds) else (torch.float32,)
    if isinstance(argument, ExpertIds) and given.shape != x.shape:
        yield f"{name} must be {tuple(x.shape)}, as {of}; got {tuple(given.shape)}"
    elif given.dim() != 2 or len(given) != len(x) or not given.shape[1]:
        yield f"{name} must be ({len(x)}, choices), a row for each of {of}; got {tuple(given.shape)}"
    if given.dtype not in wanted:
        yield _one_of(name, wanted, given.dtype)
    if given.device != x.device:
        yield _elsewhere(name, given, of, x)
    if given.stride(-1) != 1 and given.shape[-1] > 1:
        yield _gaps(name, given)


def _output(_: Op, argument: Output, out: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    if out.shape != x.shape:
        yield f"{name} must be {tuple(x.shape)}, as {of}; got {tuple(out.shape)}"
    if out.dtype not in FLOATS:
        yield _one_of(name, FLOATS, out.dtype)
    if out.device != x.device:
        yield _elsewhere(name, out, of, x)
    if out.stride(-1) != 1:
        yield f"{name} has stride {out.stride(-1)} along its rows; write into a contiguous tensor and copy it from there"


def _float_dtype(_: Op, argument: FloatDtype, dtype: Any, __: Values) -> Iterator[str]:
    if dtype not in _QUANTISED_FROM:
        yield _one_of(argument.name, _QUANTISED_FROM, dtype)


def _named_op(_: Op, argument: NamedOp, name: Any, __: Values) -> Iterator[str]:
    try:
        if name:
            op_of(name)
    except (AttributeError, ValueError):  # torch has a sentence of its own for a name without a namespace
        yield f"{argument.name}: no op is registered as {name!r}; import what registers it, and write namespace::op"


def _cache(op: Op, argument: Cache, cache: Any, values: Values) -> Iterator[str]:
    latent, rope = (values[part] for part in argument.parts)
    name = f"layerfuse::{op.name}: {argument.name}"
    layout_of(cache, latent.shape[-1], rope.shape[-1], latent.dtype, name=name)
    if cache.device != latent.device:
        yield _elsewhere(argument.name, cache, argument.parts[0], latent)


_PROBLEMS: dict[type[Argument], Callable[..., Iterator[str]]] = {
    Rows: _rows,
    Weight: _weight,
    Epsilon: _epsilon,
    WeightOffset: _offset,
    Limit: _limit,
    GroupName: _group_name,
    QuantDtype: _dtype,
    Choice: _choice,
    GroupSize: _group_size,
    StaticScale: _scale,
    PaddedWidth: _padded,
    TmaAligned: _aligned,
    Index: _index,
    Table: _table,
    HeadWeight: _head_weight,
    LinearWeight: _linear_weight,
    Bias: _bias,
    BlockScales: _block_scales,
    RowScales: _row_scales,
    TokenScales: _token_scales,
    ChannelScales: _channel_scales,
    ExpertWeights: _expert_weights,
    ExpertScales: _expert_scales,
    RouterWeights: _router,
    ExpertIds: _router,
    Output: _output,
    FloatDtype: _float_dtype,
    NamedOp: _named_op,
    Cache: _cache,
}


def _problems_of(argument: Argument) -> Callable[..., Iterator[str]] | None:
    return next((problems for kind, problems in _PROBLEMS.items() if isinstance(argument, kind)), None)


def _one_of(name: str, known: tuple[Any, ...], value: Any) -> str:
    return f"{name} must be one of {', '.join(map(str, known))}, got {value}"


def _elsewhere(name: str, value: Tensor, of: str, x: Tensor) -> str:
    return f"{name} is on {value.device}, {of} on {x.device}; move one of them"


def _gaps(name: str, x: Tensor) -> str:
    return (
        f"{name} has stride {x.stride(-1)} along its last dimension, and kernels read rows whose elements "
        f"lie together; pass {name}.contiguous()"
    )
