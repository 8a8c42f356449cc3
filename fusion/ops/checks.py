"""The checks of an op's arguments, made from its declaration: what every backend needs, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..declare import (
    Argument,
    Cache,
    Choice,
    ColumnMajor,
    Epsilon,
    Exponents,
    GroupName,
    GroupSize,
    HeadWeight,
    Index,
    Limit,
    Op,
    Packed,
    PaddedWidth,
    QuantDtype,
    Quantised,
    Rows,
    StaticScale,
    Table,
    TmaAligned,
    Weight,
    WeightOffset,
)
from .cache_checks import cache_check, head_weight_check, index_check, table_check
from .groups import GroupError, process_group
from .norm import FLOATS
from .quantisation import GROUP_SIZES, LARGEST, MX_COLUMNS

_QUANTISED_FROM = (torch.float32, torch.bfloat16, torch.float16)

Check = Callable[..., None]


def checker(op: Op) -> Check:
    """What every backend needs of the arguments, checked before anything is launched.

    The function raises TypeError, ValueError or RuntimeError, and the message names the argument.
    """
    name = f"layerfuse::{op.name}"
    places = {argument.name: place for place, argument in enumerate(op.args)}
    quantises = any(isinstance(result, Quantised | Packed) for result in op.results)
    checks: list[tuple[int, Callable[..., None], int]] = []
    for place, argument in enumerate(op.args):
        found = _check_of(name, argument, quantises, op.rows[0].any_strides, op.rows[0].heads)
        if found is not None:
            other = _other(op, argument)
            checks.append((place, found, place if other is None else places[other]))
    widths = [
        (places[each.name], places[first.name], each.name, first.name)
        for each in op.rows
        if (first := next(rows for rows in op.rows if rows.width == each.width)) is not each
    ]
    wider = [
        (places[each.name], places[each.wider_than], each.name, each.wider_than) for each in op.rows if each.wider_than
    ]
    tensors = tuple(place for place, argument in enumerate(op.args) if argument.is_tensor)
    caches = [
        (cache_check(name, argument), place, places[argument.parts[0]], places[argument.parts[1]])
        for place, argument in enumerate(op.args)
        if isinstance(argument, Cache)
    ]
    inference_only, more = op.backward is None, op.check
    groups = [places[each.of] for each in op.results if isinstance(each, Exponents)]

    def check(*given: Any) -> None:
        for place, each, other in checks:
            each(given[place], given[other])
        for place, first, one, another in widths:
            if given[place].shape[-1] != given[first].shape[-1]:
                raise ValueError(
                    f"{name}: {one} must be as wide as {another}, {given[first].shape[-1]} columns; "
                    f"got {tuple(given[place].shape)}"
                )
        for place, first, one, another in wider:
            if given[place].shape[-1] <= given[first].shape[-1]:
                raise ValueError(
                    f"{name}: {one} must be wider than {another}, {given[first].shape[-1]} columns; "
                    f"got {tuple(given[place].shape)}"
                )
        for check_cache, place, latent, rope in caches:
            check_cache(given[place], given[latent], given[rope])
        for place in groups:
            if given[place].shape[-1] % MX_COLUMNS:
                raise ValueError(f"{name}: rows of {given[place].shape[-1]} columns are no multiple of {MX_COLUMNS}")
        if inference_only and torch.is_grad_enabled() and any(given[place].requires_grad for place in tensors):
            raise RuntimeError(f"{name} is for inference and has no backward; use torch.no_grad()")
        if more is not None:
            more(*given)

    return check


def _other(op: Op, argument: Argument) -> str | None:
    """The argument that an argument is checked beside."""
    if isinstance(argument, Rows):
        return argument.like
    if isinstance(argument, Weight | Index | Table | HeadWeight):
        return argument.of
    if isinstance(argument, StaticScale | PaddedWidth):
        return op.rows[0].name
    if isinstance(argument, TmaAligned):
        return next((each.name for each in op.args if isinstance(each, ColumnMajor)), None)
    if isinstance(argument, GroupSize) and op.rows[0].heads:
        return op.rows[0].name
    return None


def _check_of(op: str, argument: Argument, quantises: bool, strided: bool, heads: bool) -> Check | None:
    if isinstance(argument, Rows):
        return _rows_check(op, argument, _QUANTISED_FROM if quantises else FLOATS)
    if isinstance(argument, Weight):
        return _weight_check(op, argument, strided)
    if isinstance(argument, Epsilon):
        return _epsilon_check(op, argument)
    if isinstance(argument, Index):
        return index_check(op, argument, heads)
    if isinstance(argument, Table):
        return table_check(op, argument)
    if isinstance(argument, HeadWeight):
        return head_weight_check(op, argument)
    if isinstance(argument, QuantDtype):
        return _one_of(op, argument.name, tuple(LARGEST))
    if isinstance(argument, GroupSize):
        return _group_check(op, argument)
    if isinstance(argument, GroupName):
        return _group_name_check(op, argument)
    if isinstance(argument, Choice):
        return _one_of(op, argument.name, argument.words)
    if isinstance(argument, Limit):
        return _limit_check(op, argument)
    if isinstance(argument, StaticScale):
        return _scale_check(op, argument)
    if isinstance(argument, PaddedWidth):
        return _padded_check(op, argument)
    if isinstance(argument, WeightOffset):
        return _offset_check(op, argument)
    return _aligned_check(op) if isinstance(argument, TmaAligned) else None


def _group_name_check(op: str, argument: GroupName) -> Check:
    def check(group: Any, _: Any) -> None:
        try:
            process_group(group)
        except GroupError as error:
            raise ValueError(f"{op}: {argument.name}: {error}") from None

    return check


def _group_check(op: str, argument: GroupSize) -> Check:
    known = _one_of(op, argument.name, GROUP_SIZES)

    def check(group_size: Any, x: Any) -> None:
        known(group_size, x)
        if isinstance(x, Tensor) and x.shape[-1] % group_size:  # rows of heads
            raise ValueError(
                f"{op}: {argument.name} {group_size} does not divide heads of {x.shape[-1]} columns; groups lie within a head"
            )

    return check


def _offset_check(op: str, argument: WeightOffset) -> Check:
    def check(offset: Any, _: Any) -> None:
        if offset != offset:
            raise ValueError(f"{op}: {argument.name} is NaN; 1.0 for zero-centred weights, else 0.0")

    return check


def _limit_check(op: str, argument: Limit) -> Check:
    def check(limit: Any, _: Any) -> None:
        if not limit > 0:
            raise ValueError(f"{op}: {argument.name} must be positive, infinite for no clamp; got {limit!r}")

    return check


def _scale_check(op: str, argument: StaticScale) -> Check:
    def check(scale: Any, x: Any) -> None:
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(
                f"{op}: {argument.name} must be one element of torch.float32, got {tuple(scale.shape)} of {scale.dtype}"
            )
        if scale.device != x.device:
            raise ValueError(f"{op}: {argument.name} is on {scale.device}, the rows on {x.device}; move one of them")

    return check


def _padded_check(op: str, argument: PaddedWidth) -> Check:
    def check(width: Any, x: Any) -> None:
        if width < x.shape[-1]:
            raise ValueError(f"{op}: {argument.name} must be at least the width {x.shape[-1]}, got {width}")

    return check


def _aligned_check(op: str) -> Check:
    def check(tma_aligned: Any, column_major: Any) -> None:
        if tma_aligned and not column_major:
            raise ValueError(f"{op}: tma_aligned scales are column-major; give column_major=True too")

    return check


def _rows_check(op: str, argument: Rows, dtypes: tuple[torch.dtype, ...]) -> Check:
    name, like, any_strides, least = argument.name, argument.like, argument.any_strides, 1 + argument.heads
    known = ", ".join(map(str, dtypes))

    def check(x: Any, other: Any) -> None:
        if x is None:  # which the dispatcher lets through for the first argument
            raise TypeError(f"{op}: {name} must be a tensor, got None")
        shape = x.shape
        if len(shape) < least:
            if least == 1:
                raise ValueError(f"{op}: {name} needs at least one dimension, got a scalar")
            raise ValueError(f"{op}: {name} must be (..., heads, width), got {tuple(shape)}")
        if x.dtype not in dtypes:
            raise ValueError(f"{op}: {name} must be one of {known}, got {x.dtype}")
        if shape[-1] == 0:
            raise ValueError(f"{op}: {name} {tuple(shape)} has rows of no columns")
        if not any_strides and x.stride(-1) != 1 and shape[-1] > 1 and x.numel() > 0:
            raise ValueError(_gaps(op, name, x))
        if x is not other:
            if x.device != other.device:
                raise ValueError(f"{op}: {name} is on {x.device}, {like} on {other.device}; move one of them")
            if x.dtype != other.dtype:
                raise ValueError(f"{op}: {name} is {x.dtype}, {like} is {other.dtype}; they must agree")
            if shape[:-1] != other.shape[:-1]:
                raise ValueError(
                    f"{op}: {name} must have the leading dimensions of {like} {tuple(other.shape[:-1])}, "
                    f"got {tuple(shape[:-1])}"
                )

    return check


def _gaps(op: str, name: str, x: Tensor) -> str:
    return (
        f"{op}: {name} has stride {x.stride(-1)} along its last dimension, and kernels read rows whose elements "
        f"lie together; pass {name}.contiguous()"
    )


def _weight_check(op: str, argument: Weight, strided: bool) -> Check:
    name, of = argument.name, argument.of

    def check(weight: Any, x: Any) -> None:
        if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{op}: {name} must have shape ({x.shape[-1]},), the last dimension of {of} {tuple(x.shape)}; "
                f"got {tuple(weight.shape)}"
            )
        if weight.dtype not in FLOATS:
            raise ValueError(f"{op}: {name} must be one of {', '.join(map(str, FLOATS))}, got {weight.dtype}")
        if weight.device != x.device:
            raise ValueError(f"{op}: {name} is on {weight.device}, {of} on {x.device}; move one of them")
        if not strided and weight.stride(0) != 1 and weight.shape[0] > 1:
            raise ValueError(_gaps(op, name, weight))

    return check


def _epsilon_check(op: str, argument: Epsilon) -> Check:
    def check(epsilon: Any, _: Any) -> None:
        if not epsilon >= 0:
            raise ValueError(f"{op}: {argument.name} must be at least 0, got {epsilon!r}")

    return check


def _one_of(op: str, name: str, known: tuple[Any, ...]) -> Check:
    def check(value: Any, _: Any) -> None:
        if value not in known:
            raise ValueError(f"{op}: {name} must be one of {', '.join(map(str, known))}, got {value}")

    return check
