"""The checks of an op's arguments, made from its declaration: what every backend needs, before anything is launched.

For each kind of argument a function says what is wrong with one: of the op, the argument, its value and all values by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import declare
from ..declare import Argument, Op, Rows
from .cache_layout import layout_of
from .groups import GroupError, process_group
from .linear import BLOCK, op_of, scales_shape
from .norm import FLOATS
from .quantisation import GROUP_SIZES, LARGEST, scale_shape

_QUANTISED_FROM = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)
_FP8 = tuple(LARGEST)

Values = Mapping[str, Any]
Problems = Callable[..., Iterator[str]]


def checker(op: Op) -> Callable[..., None]:
    """What every backend needs of the arguments, checked before anything is launched.

    The function raises TypeError, ValueError or RuntimeError, and the message names the argument.
    """
    name = f"layerfuse::{op.name}"
    names = [argument.name for argument in op.args]
    found = ((argument, _problems_of(argument)) for argument in op.args)
    checks = [(argument, problems) for argument, problems in found if problems is not None]
    tensors = [place for place, argument in enumerate(op.args) if argument.is_tensor]
    blocks = [(each.of, each.columns) for each in op.results if isinstance(each, declare.BlockScale)]

    def check(*given: Any) -> None:
        values = dict(zip(names, given, strict=True))
        for argument, problems in checks:
            for problem in problems(op, argument, values[argument.name], values):
                raise ValueError(f"{name}: {problem}")
        for of, columns in blocks:
            if values[of].shape[-1] % columns:
                raise ValueError(f"{name}: rows of {values[of].shape[-1]} columns are no multiple of {columns}")
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
    known = _QUANTISED_FROM if any(isinstance(result, declare.Quantised) for result in op.results) else FLOATS
    known = _FP8 if isinstance(argument, declare.QuantisedRows) else known
    yield from _kind(name, x, known, like or name, values[like or name])
    if shape[-1] == 0:
        yield f"{name} {tuple(shape)} has rows of no columns"
    if not argument.any_strides:
        yield from _gaps(name, x)
    if like is not None:
        other = values[like]
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


def _weight(op: Op, argument: declare.Weight, weight: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        yield (
            f"{name} must have shape ({x.shape[-1]},), the last dimension of {of} {tuple(x.shape)}; "
            f"got {tuple(weight.shape)}"
        )
    yield from _kind(name, weight, FLOATS, of, x)
    if not op.rows[0].any_strides:
        yield from _gaps(name, weight)


def _among(known: Callable[[Any], tuple[Any, ...]]) -> Problems:
    """One of the values that are known of the argument."""

    def problems(_: Op, argument: Argument, value: Any, __: Values) -> Iterator[str]:
        if value not in known(argument):
            yield _one_of(argument.name, known(argument), value)

    return problems


def _number(holds: Callable[[float], bool], says: str) -> Problems:
    """A number of which something holds."""

    def problems(_: Op, argument: Argument, number: Any, __: Values) -> Iterator[str]:
        if not holds(number):
            yield f"{argument.name} {says}, got {number!r}"

    return problems


def _group_name(_: Op, argument: declare.GroupName, group: Any, __: Values) -> Iterator[str]:
    try:
        process_group(group)
    except GroupError as error:
        yield f"{argument.name}: {error}"


def _group_size(op: Op, argument: declare.GroupSize, size: Any, values: Values) -> Iterator[str]:
    if size not in GROUP_SIZES:
        yield _one_of(argument.name, GROUP_SIZES, size)
    width = values[op.rows[0].name].shape[-1]
    if op.rows[0].heads and width % size:
        yield f"{argument.name} {size} does not divide heads of {width} columns; groups lie within a head"


def _scale(op: Op, argument: declare.StaticScale, scale: Any, values: Values) -> Iterator[str]:
    if scale.numel() != 1 or scale.dtype != torch.float32:
        yield f"{argument.name} must be one element of torch.float32, got {tuple(scale.shape)} of {scale.dtype}"
    yield from _kind(argument.name, scale, (torch.float32,), "the rows", values[op.rows[0].name])


def _padded(op: Op, argument: declare.PaddedWidth, padded: Any, values: Values) -> Iterator[str]:
    width = values[op.rows[0].name].shape[-1]
    if padded < width:
        yield f"{argument.name} must be at least the width {width}, got {padded}"


def _aligned(op: Op, _: declare.TmaAligned, aligned: Any, values: Values) -> Iterator[str]:
    if aligned and not any(values[each.name] for each in op.args if isinstance(each, declare.ColumnMajor)):
        yield "tma_aligned scales are column-major; give column_major=True too"


# ---- what an op of a decode layer takes besides its rows -------------------------------------------------------------


def _index(op: Op, argument: declare.Index, index: Any, values: Values) -> Iterator[str]:
    if index is None:
        return
    name, of, x = argument.name, argument.of, values[argument.of]
    tokens = prod(x.shape[: -2 if op.rows[0].heads else -1])
    if index.dim() != 1 or index.shape[0] != tokens:
        yield f"{name} must have one number for each of the {tokens} tokens of {of}, got {tuple(index.shape)}"
    yield from _kind(name, index, _INTEGERS, of, x)
    yield from _gaps(name, index)


def _table(op: Op, argument: declare.Table, table: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    half = x.shape[-1] // 2
    first = next(each.name for each in op.args if isinstance(each, declare.Table))
    fits = table.dim() == 2 and (1 <= table.shape[1] <= half if argument.partial else table.shape[1] == half)
    if not fits:
        most = "at most " if argument.partial else ""
        yield f"{name} must be (positions, {most}{half}), half as wide as {of}; got {tuple(table.shape)}"
    elif argument.partial and table.shape[1] != values[first].shape[1]:
        yield f"{name} must be as wide as {first}, {values[first].shape[1]} columns; got {tuple(table.shape)}"
    if x.shape[-1] % 2 and not argument.partial:
        yield f"{of} has {x.shape[-1]} columns, and a rope turns pairs of them"
    yield from _kind(name, table, FLOATS, of, x)
    yield from _gaps(name, table)
    if table.dim() == 2 and table.shape[0] != (rows := values[first].shape[0]):
        yield f"{name} must have as many positions as {first}, {rows}; got {tuple(table.shape)}"


def _head_weight(_: Op, argument: declare.HeadWeight, weight: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    heads, width = x.shape[-2:]
    if weight.dim() != 3 or tuple(weight.shape[:2]) != (heads, width):
        yield f"{name} must be ({heads}, {width}, columns), as {of} has heads and columns; got {tuple(weight.shape)}"
    if weight.dtype != x.dtype or weight.device != x.device:
        yield f"{name} is {weight.dtype} on {weight.device}, {of} {x.dtype} on {x.device}; convert or move one of them"
    if 1 not in weight.stride()[1:]:
        yield f"{name} has strides {tuple(weight.stride())}, none of the last two is 1; pass {name}.contiguous()"


def _linear_weight(_: Op, argument: declare.LinearWeight, weight: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not len(weight):
        yield f"{name} must be (columns, {x.shape[-1]}), as wide as {of}; got {tuple(weight.shape)}"
    yield from _kind(name, weight, (x.dtype,) if isinstance(argument, declare.PlainWeight) else _FP8, of, x)
    yield from _gaps(name, weight)


def _bias(op: Op, argument: declare.Bias, bias: Any, values: Values) -> Iterator[str]:
    name, of, weight = argument.name, argument.weight, values[argument.weight]
    if bias is None:
        return
    if tuple(bias.shape) != (len(weight),):
        yield f"{name} must be ({len(weight)},), as {of} {tuple(weight.shape)} has columns; got {tuple(bias.shape)}"
    dtype = next((values[each.name] for each in op.args if isinstance(each, declare.FloatDtype)), weight.dtype)
    if bias.dtype != dtype or bias.device != weight.device:
        yield f"{name} must be {dtype} on {weight.device}, got {bias.dtype} on {bias.device}"
    yield from _gaps(name, bias)


# ---- scales ----------------------------------------------------------------------------------------------------------


def _scales(
    shapes: Callable[[Tensor], list[tuple[int, ...]]], says: str, *, dense: bool = True, one: bool = False
) -> Problems:
    """Of float32 scales. `shapes`: from what they scale to the shapes that they may have, which `says` puts in words; `one`: or one element."""

    def problems(_: Op, argument: Any, scales: Any, values: Values) -> Iterator[str]:
        name, of, scaled = argument.name, argument.of, values[argument.of]
        if not (one and _is_one(scales)) and tuple(scales.shape) not in (known := shapes(scaled)):
            wanted = (
                f"{' or '.join(map(str, known))}, {says} {of} {tuple(scaled.shape)}{', or one element' if one else ''}"
            )
            yield f"{name} must be {wanted}; got {tuple(scales.shape)}"
        if scales.dtype != torch.float32 or scales.device != scaled.device:
            yield f"{name} must be torch.float32 on {scaled.device}, got {scales.dtype} on {scales.device}"
        if dense and not scales.is_contiguous():
            yield f"{name} has strides {tuple(scales.stride())}; pass {name}.contiguous()"

    return problems


def _is_one(scales: Tensor) -> bool:
    """Whether it is one element, without a guard on the number of tokens."""
    return all(type(size) is int and size == 1 for size in scales.shape)


# ---- experts ---------------------------------------------------------------------------------------------------------


def _expert_weights(op: Op, argument: declare.ExpertWeights, weights: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    behind = any(each.name == of and isinstance(each, declare.ExpertWeights) for each in op.args)
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
    yield from _kind(name, weights, _FP8, of, x)
    yield from _gaps(name, weights)


def _router(_: Op, argument: declare.RouterWeights | declare.ExpertIds, given: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    ids = isinstance(argument, declare.ExpertIds)
    if ids and given.shape != x.shape:
        yield f"{name} must be {tuple(x.shape)}, as {of}; got {tuple(given.shape)}"
    elif given.dim() != 2 or len(given) != len(x) or not given.shape[1]:
        yield f"{name} must be ({len(x)}, choices), a row for each of {of}; got {tuple(given.shape)}"
    yield from _kind(name, given, _INTEGERS if ids else (torch.float32,), of, x)
    yield from _gaps(name, given)


def _output(_: Op, argument: declare.Output, out: Any, values: Values) -> Iterator[str]:
    name, of, x = argument.name, argument.of, values[argument.of]
    if out.shape != x.shape:
        yield f"{name} must be {tuple(x.shape)}, as {of}; got {tuple(out.shape)}"
    yield from _kind(name, out, FLOATS, of, x)
    if out.stride(-1) != 1:
        yield f"{name} has stride {out.stride(-1)} along its rows; write into a contiguous tensor and copy it from there"


def _named_op(_: Op, argument: declare.NamedOp, name: Any, __: Values) -> Iterator[str]:
    try:
        if name:
            op_of(name)
    except (AttributeError, ValueError):  # torch has a sentence of its own for a name without a namespace
        yield f"{argument.name}: no op is registered as {name!r}; import what registers it, and write namespace::op"


def _cache(op: Op, argument: declare.Cache, cache: Any, values: Values) -> Iterator[str]:
    latent, rope = (values[part] for part in argument.parts)
    name = f"layerfuse::{op.name}: {argument.name}"
    layout_of(cache, latent.shape[-1], rope.shape[-1], latent.dtype, name=name)
    yield from _kind(argument.name, cache, (cache.dtype,), argument.parts[0], latent)


_PROBLEMS: dict[type[Argument], Problems] = {
    Rows: _rows,
    declare.Weight: _weight,
    declare.Epsilon: _number(lambda epsilon: epsilon >= 0, "must be at least 0"),
    declare.WeightOffset: _number(lambda offset: offset == offset, "is to be 1.0 for zero-centred weights, else 0.0"),
    declare.Limit: _number(lambda limit: limit > 0, "must be positive, infinite for no clamp"),
    declare.GroupName: _group_name,
    declare.QuantDtype: _among(lambda _: _FP8),
    declare.FloatDtype: _among(lambda _: _QUANTISED_FROM),
    declare.Choice: _among(lambda argument: argument.words),
    declare.GroupSize: _group_size,
    declare.StaticScale: _scale,
    declare.PaddedWidth: _padded,
    declare.TmaAligned: _aligned,
    declare.Index: _index,
    declare.Table: _table,
    declare.HeadWeight: _head_weight,
    declare.LinearWeight: _linear_weight,
    declare.Bias: _bias,
    declare.BlockScales: _scales(lambda weight: [scales_shape(weight)], "one per 128 x 128 of"),
    declare.RowScales: _scales(
        lambda x: [scale_shape(x.shape[:-1], x.shape[-1], BLOCK)], "one per 128 columns of", dense=False
    ),
    declare.TokenScales: _scales(lambda x: [(*x.shape[:-1], 1)], "one per token of", dense=False, one=True),
    declare.ChannelScales: _scales(
        lambda weight: [(len(weight),), (len(weight), 1), (1, len(weight))], "one per row of", one=True
    ),
    declare.ExpertWeights: _expert_weights,
    declare.ExpertScales: _scales(lambda weights: [(len(weights), *scales_shape(weights[0]))], "one per 128 x 128 of"),
    declare.RouterWeights: _router,
    declare.ExpertIds: _router,
    declare.Output: _output,
    declare.NamedOp: _named_op,
    declare.Cache: _cache,
}


def _problems_of(argument: Argument) -> Problems | None:
    return next((problems for kind, problems in _PROBLEMS.items() if isinstance(argument, kind)), None)


def _one_of(name: str, known: tuple[Any, ...], value: Any) -> str:
    return f"{name} must be one of {', '.join(map(str, known))}, got {value}"


def _kind(name: str, x: Tensor, known: tuple[torch.dtype, ...], of: str, beside: Tensor) -> Iterator[str]:
    """A tensor of one of these dtypes, on the device of another one."""
    if x.dtype not in known:
        yield _one_of(name, known, x.dtype)
    if x.device != beside.device:
        yield f"{name} is on {x.device}, {of} on {beside.device}; move one of them"


def _gaps(name: str, x: Tensor) -> Iterator[str]:
    """A tensor whose last dimension has no gaps."""
    if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
        yield (
            f"{name} has stride {x.stride(-1)} along its last dimension, and kernels read rows whose elements "
            f"lie together; pass {name}.contiguous()"
        )
