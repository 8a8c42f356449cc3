"""From the declaration of an op to `torch.ops.layerfuse.<name>`: schema, checks, fake, case and public function.

A `Library` is used rather than `custom_op`, whose Python wrapper costs more per call than a small norm takes.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..declare import (
    REQUIRED,
    TMA_ALIGNED,
    Argument,
    Choice,
    Epsilon,
    Exponents,
    GroupSize,
    Kernel,
    Like,
    Limit,
    Op,
    Packed,
    Padded,
    PaddedWidth,
    QuantDtype,
    Quantised,
    Result,
    Rows,
    StaticScale,
    Weight,
)
from .norm import FLOATS
from .quantisation import GROUP_SIZES, LARGEST, MX_COLUMNS, empty_scales

_LIBRARY = torch.library.Library("layerfuse", "FRAGMENT")
_defined: dict[str, Op] = {}
_QUANTISED_FROM = (torch.float32, torch.bfloat16, torch.float16)

Check = Callable[..., None]


def define(op: Op, kernels: tuple[Kernel, ...] = ()) -> Any:
    """Register an op once, with its reference and its kernels, and return `torch.ops.layerfuse.<name>.default`.

    Args:
        op: the declaration.
        kernels: beside the reference, the preferred one first.

    Raises:
        ValueError: another op of this name is defined.
    """
    name = op.name
    if name in _defined:
        if _defined[name] is not op:
            raise ValueError(f"an op called layerfuse::{name} is defined already; give one of the two another name")
        return getattr(torch.ops.layerfuse, name).default
    # The row stride of a split view must reach the kernel as it is: Inductor keeps the strides that were traced
    # instead of laying out a copy.
    _LIBRARY.define(op.schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    backends.register(backends.reference(name, op.reference))
    for kernel in reversed(kernels):
        backends.register(backends.backend_of(op, kernel))
    check, fake, case, signature = checker(op), _fake(op), case_maker(op), signature_maker(op)
    known, inference_only, checked_always = backends.Memory(), op.backward is None, op.check is not None

    def run(x: Tensor, *args: Any) -> Any:
        # What passed once passes again: shapes, strides, dtypes, devices and options are all that is looked at.
        function = None if checked_always or x is None else known.get(signature(x, *args))
        if function is None:
            check(x, *args)
            function = known.choose(signature(x, *args), name, x.device.type, case(x, *args))
        elif inference_only and torch.is_grad_enabled():
            check(x, *args)
        return function(x, *args)

    def run_fake(x: Tensor, *args: Any) -> Any:
        check(x, *args)
        return fake(x, *args)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"layerfuse::{name}", run_fake, lib=_LIBRARY)
    if op.backward is not None:
        # About 10 us per call outside inference mode.
        torch.library.register_autograd(f"layerfuse::{name}", op.backward, setup_context=op.setup_context, lib=_LIBRARY)
    _defined[name] = op
    return getattr(torch.ops.layerfuse, name).default


# ---- checks ----------------------------------------------------------------------------------------------------------


def checker(op: Op) -> Check:
    """What every backend needs of the arguments, checked before anything is launched.

    The function raises TypeError, ValueError or RuntimeError, and the message names the argument.
    """
    name = f"layerfuse::{op.name}"
    places = {argument.name: place for place, argument in enumerate(op.args)}
    quantises = any(isinstance(result, Quantised | Packed) for result in op.results)
    checks: list[tuple[int, Callable[..., None], int]] = []
    for place, argument in enumerate(op.args):
        found = _check_of(name, argument, quantises, op.rows[0].any_strides)
        if found is not None:
            other = _other(op, argument)
            checks.append((place, found, place if other is None else places[other]))
    widths = [
        (places[each.name], places[first.name], each.name, first.name)
        for each in op.rows
        if (first := next(rows for rows in op.rows if rows.width == each.width)) is not each
    ]
    tensors = tuple(place for place, argument in enumerate(op.args) if isinstance(argument, Rows | Weight))
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
    if isinstance(argument, Weight):
        return argument.of
    if isinstance(argument, StaticScale | PaddedWidth):
        return op.rows[0].name
    if argument.name == TMA_ALIGNED.name:
        return next((each.name for each in op.args if each.name == "column_major"), None)
    return None


def _check_of(op: str, argument: Argument, quantises: bool, strided: bool) -> Check | None:
    if isinstance(argument, Rows):
        return _rows_check(op, argument, _QUANTISED_FROM if quantises else FLOATS)
    if isinstance(argument, Weight):
        return _weight_check(op, argument, strided)
    if isinstance(argument, Epsilon):
        return _epsilon_check(op, argument)
    if isinstance(argument, QuantDtype):
        return _one_of(op, argument.name, tuple(LARGEST))
    if isinstance(argument, GroupSize):
        return _one_of(op, argument.name, GROUP_SIZES)
    if isinstance(argument, Choice):
        return _one_of(op, argument.name, argument.words)
    if isinstance(argument, Limit):
        return _limit_check(op, argument)
    if isinstance(argument, StaticScale):
        return _scale_check(op, argument)
    if isinstance(argument, PaddedWidth):
        return _padded_check(op, argument)
    return _aligned_check(op) if argument.name == TMA_ALIGNED.name else None


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


# ---- what torch and the backends need --------------------------------------------------------------------------------


def _fake(op: Op) -> Callable[..., Any]:
    places = {argument.name: place for place, argument in enumerate(op.args)}
    dtype = next((places[argument.name] for argument in op.args if isinstance(argument, QuantDtype)), None)
    padded = next((places[argument.name] for argument in op.args if isinstance(argument, PaddedWidth)), None)
    group, major, aligned = places.get("group_size"), places.get("column_major"), places.get("tma_aligned")
    joined = {rows.name for rows in op.rows if rows.heads}

    def option(place: int | None, given: tuple[Any, ...]) -> Any:
        return False if place is None else given[place]

    def one(result: Result, given: tuple[Any, ...]) -> Tensor:
        x = given[places[result.of]]
        if isinstance(result, Like):
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        shape = (*x.shape[:-2], x.shape[-2] * x.shape[-1]) if result.of in joined else tuple(x.shape)
        if isinstance(result, Padded):
            return torch.empty((*shape[:-1], option(padded, given)), dtype=x.dtype, device=x.device)
        if isinstance(result, Quantised):
            return torch.empty(shape, dtype=torch.float8_e4m3fn if dtype is None else given[dtype], device=x.device)
        if isinstance(result, Packed):
            return torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=x.device)
        if isinstance(result, Exponents):
            return torch.empty((*shape[:-1], shape[-1] // MX_COLUMNS), dtype=torch.uint8, device=x.device)
        size = None if group is None else given[group]
        return empty_scales(x.new_empty(shape), size, option(major, given), option(aligned, given))

    def fake(*given: Any) -> Any:
        results = tuple(one(result, given) for result in op.results)
        return results[0] if len(results) == 1 else results

    return fake


_NOT_OF_THE_CASE = (Rows, Weight, Epsilon, StaticScale)


def case_fields(op: Op) -> tuple[str, ...]:
    """The fields of the op's case: dtype, widths, heads, the weights' dtypes, and every option that is no number."""
    weights = [f"{argument.name}_dtype" for argument in op.args if isinstance(argument, Weight)]
    options = [
        "quant_dtype" if isinstance(argument, QuantDtype) else argument.name
        for argument in op.args
        if not isinstance(argument, _NOT_OF_THE_CASE)
    ]
    return ("dtype", *op.widths, *(("heads",) if op.rows[0].heads else ()), *weights, *options)


def case_type(op: Op) -> Callable[..., Hashable]:
    """The named tuple of `case_fields`."""
    return namedtuple("Case", case_fields(op))


def case_maker(op: Op) -> Callable[..., Hashable]:
    """From the op's arguments to what of them decides which backend takes the call: a named tuple of `case_fields`."""
    make = case_type(op)
    first = {rows.width: place for place, rows in reversed(list(enumerate(op.args))) if isinstance(rows, Rows)}
    widths = tuple(first[width] for width in op.widths)
    weights = tuple(place for place, argument in enumerate(op.args) if isinstance(argument, Weight))
    options = tuple(place for place, argument in enumerate(op.args) if not isinstance(argument, _NOT_OF_THE_CASE))
    heads = op.rows[0].heads

    def case(*given: Any) -> Hashable:
        # Lists are quicker than generators here, and this runs at every call.
        return make(
            given[0].dtype,
            *[given[place].shape[-1] for place in widths],
            *([given[0].shape[-2]] if heads else []),
            *[given[place].dtype for place in weights],
            *[given[place] for place in options],
        )

    return case


def signature_maker(op: Op) -> Callable[..., Hashable]:
    """From the op's arguments to everything that checks and backends look at, as a key."""
    parts = [
        f"{each.name}.shape, {each.name}.stride(), {each.name}.dtype, {each.name}.device"
        if isinstance(each, Rows | Weight | StaticScale)
        else each.name
        for each in op.args
    ]
    source = f"lambda {', '.join(each.name for each in op.args)}: ({', '.join(parts)},)"
    made: Callable[..., Hashable] = eval(compile(source, f"<signature of {op.name}>", "eval"))
    return made


# ---- the public function ---------------------------------------------------------------------------------------------


def public(op: Op, kernels: tuple[Kernel, ...] = ()) -> Callable[..., Any]:
    """The op as a Python function with its arguments' names and defaults, and a docstring."""
    required = max(place for place, argument in enumerate(op.args) if argument.default is REQUIRED)
    taken = ", ".join(
        # Python wants arguments without a default first: what stands before one has none either.
        f"{argument.name}: {argument.annotation}" + ("" if place <= required else f" = {argument.default!r}")
        for place, argument in enumerate(op.args)
    )
    given = ", ".join(argument.name for argument in op.args)
    result = "Tensor" if len(op.results) == 1 else f"tuple[{', '.join('Tensor' for _ in op.results)}]"
    source = f"def {op.name}({taken}) -> {result}:\n    return _op({given})\n"
    scope: dict[str, Any] = {"_op": define(op, kernels), "torch": torch, "Tensor": Tensor}
    exec(compile(source, f"<layerfuse op {op.name}>", "exec"), scope)
    function: Callable[..., Any] = scope[op.name]
    function.__doc__ = docstring(op)
    function.__module__ = "layerfuse.fusion.ops"
    return function


def docstring(op: Op) -> str:
    """Google style, from the declaration."""
    arguments = [f"    {argument.name}: {_describe(op, argument)}" for argument in op.args]
    results = [
        f"{result.name}: {result.doc.rstrip('.') or f'of the shape and dtype of {result.of}'}" for result in op.results
    ]
    grad = "" if op.backward is not None else "\n    RuntimeError: an input requires grad while grad is enabled."
    return "\n".join(
        [
            op.doc,
            "",
            "Args:",
            *arguments,
            "",
            "Returns:",
            f"    Contiguous: {'; '.join(results)}.",
            "",
            "Raises:",
            f"    ValueError: shapes, dtypes, devices or options that do not fit; the message names the argument.{grad}",
        ]
    )


def _describe(op: Op, argument: Argument) -> str:
    if isinstance(argument, Rows):
        dtypes = "bfloat16, float16 or float32" if any(isinstance(a, QuantDtype) for a in op.args) else "floating"
        like = f" Leading dimensions, dtype and device are those of {argument.like}." if argument.like else ""
        stride = "" if argument.any_strides else " Its last stride is 1."
        return f"{argument.doc or '(..., ' + argument.width + ').'}{like or f' Its dtype is {dtypes}.'}{stride}"
    if isinstance(argument, Weight):
        return argument.doc or f"(width of {argument.of},), any floating dtype, on the device of {argument.of}."
    return argument.doc or "added to the mean square, at least 0."
