"""From the declaration of an op to `torch.ops.layerfuse.<name>`: schema, checks, fake, case and public function.

A `Library` is used rather than `custom_op`, whose Python wrapper costs more per call than a small norm takes.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...adapters.errors import ArgumentValueError, did_you_mean, shown
from .. import backends, declare
from ..backends.backend import backend_of, kernels_for
from ..declare import Argument, Kernel, Op, Result, Rows
from .agreement import agree
from .checks import checker
from .linear import goes_beyond
from .quantisation import DTYPES, empty_scales, swizzled_shape

_LIBRARY = torch.library.Library("layerfuse", "FRAGMENT")
_defined: dict[str, Op] = {}
_direct: dict[str, Callable[..., Any]] = {}


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
        return overload(name)
    # The row stride of a split view must reach the kernel as it is: Inductor keeps the strides that were traced
    # instead of laying out a copy.
    _LIBRARY.define(op.schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    backends.register(backends.Backend(op=op))
    for kernel in reversed((*kernels, *kernels_for(op))):
        backends.register(backend_of(op, kernel))
    groups = [place for place, argument in enumerate(op.args) if isinstance(argument, declare.GroupName)]
    check, fake, case, signature = checker(op), fake_of(op), case_maker(op), signature_maker(op)
    if op.mutated:
        _count_versions(op)
    known, inference_only, checked_always = backends.Memory(), op.backward is None, op.check is not None
    more = handed_on(op)

    def run(x: Tensor, *args: Any) -> Any:
        # What passed once passes again: shapes, strides, dtypes, devices and options are all that is looked at.
        function = None if checked_always or x is None else known.get(signature(x, *args))
        if function is None:
            check(x, *args)
            for place in groups:
                decision = backends.decision(name, x.device.type, case(x, *args))
                agree(args[place - 1], f"layerfuse::{name}", decision)
            # A backend meets the first call of a kind; what it hands on goes there directly from the second on.
            later = None if more is None else more(x, *args)
            function = known.choose(signature(x, *args), name, case(x, *args), (x, *args), later)
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
    _defined[name], _direct[name] = op, run
    return overload(name)


def overload(name: str) -> Any:
    """The op that was registered."""
    return getattr(torch.ops.layerfuse, name).default


def direct(name: str) -> Callable[..., Any]:
    """What an op does, all arguments by position, without torch's dispatcher: for callers under inference mode.

    Raises:
        KeyError: none is called that.
    """
    return _direct[name]


def repeating(name: str) -> Callable[..., Any]:
    """As `direct`, behind a first argument: calls with the same one are alike in everything but where their tensors lie.

    The caller vouches for that. The first such call is checked like any other; a backend may make the next ones with little work on
    the host (`backends.repeatable`).

    Raises:
        KeyError: none is called that.
    """
    run, case, known = direct(name), case_maker(declared(name)), backends.Memory()

    def call(same: Hashable, *args: Any) -> Any:
        function = known.get(same)
        if function is not None:
            return function(*args)
        before, result = backends.choices(), run(*args)
        function = backends.choose(name, args[0].device.type, case(*args)).function
        alike = backends.repeatable.get(function)
        known.keep(same, function if alike is None else alike(), before)
        return result

    return call


def _count_versions(op: Op) -> None:
    """Autograd learns of each write: a tensor that was saved for a backward pass and then written to is an error there."""
    places = [place for place, argument in enumerate(op.args) if argument.is_mutated]

    def run(keys: Any, *args: Any) -> Any:
        for place in places:
            torch.autograd.graph.increment_version(args[place])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload(op.name).redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

    _LIBRARY.impl(op.name, run, "ADInplaceOrView", with_keyset=True)


def declared(name: str) -> Op:
    """The declaration of an op that is defined.

    Raises:
        ArgumentValueError: none is called that.
    """
    if name not in _defined:
        raise ArgumentValueError(f"no op is called {shown(name)}{did_you_mean(name, _defined)}")
    return _defined[name]


# ---- what torch and the backends need --------------------------------------------------------------------------------


def fake_of(op: Op) -> Callable[..., Any]:
    """From the op's arguments to uninitialised results."""
    places = {argument.name: place for place, argument in enumerate(op.args)}

    def place_of(kind: type[Argument]) -> int | None:
        return next((place for place, argument in enumerate(op.args) if isinstance(argument, kind)), None)

    dtype, padded, group = place_of(declare.QuantDtype), place_of(declare.PaddedWidth), place_of(declare.GroupSize)
    major, aligned, floating = place_of(declare.ColumnMajor), place_of(declare.TmaAligned), place_of(declare.FloatDtype)
    swizzled = place_of(declare.Swizzled)
    joined = {rows.name for rows in op.rows if rows.heads}

    def option(place: int | None, given: tuple[Any, ...]) -> Any:
        return False if place is None else given[place]

    def one(result: Result, given: tuple[Any, ...]) -> Tensor:
        x = given[places[result.of]]
        if isinstance(result, declare.Like):
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        shape = (*x.shape[:-2], x.shape[-2] * x.shape[-1]) if result.of in joined else tuple(x.shape)
        if isinstance(result, declare.Joined):
            first = x if result.through is None else given[places[result.through]]
            width = first.shape[-1] + given[places[result.beside]].shape[-1]
            return torch.empty(
                (*x.shape[:-1], width), dtype=x.dtype if dtype is None else given[dtype], device=x.device
            )
        if isinstance(result, declare.Product):
            made = x.dtype if floating is None else given[floating]
            return torch.empty((*x.shape[:-1], given[places[result.through]].shape[-2]), dtype=made, device=x.device)
        if isinstance(result, declare.Padded):
            return torch.empty((*shape[:-1], option(padded, given)), dtype=x.dtype, device=x.device)
        if isinstance(result, declare.Quantised):
            if not result.dtype and dtype is not None:
                return torch.empty(shape, dtype=given[dtype], device=x.device)
            held = result.dtype or "float8_e4m3fn"
            narrow = (*shape[:-1], shape[-1] // declare.ELEMENTS[held].per)
            return torch.empty(narrow, dtype=DTYPES[held], device=x.device)
        if isinstance(result, declare.BlockScale):
            rowwise = (*shape[:-1], shape[-1] // result.columns)
            laid_out = swizzled_shape(shape, shape[-1]) if option(swizzled, given) else rowwise
            return torch.empty(laid_out, dtype=DTYPES[result.dtype], device=x.device)
        size = None if group is None else given[group]
        return empty_scales(x.new_empty(shape), size, option(major, given), option(aligned, given))

    def fake(*given: Any) -> Any:
        results = tuple(one(result, given) for result in op.results)
        return results[0] if len(results) == 1 else results or None

    return fake


_BY_DTYPE = (declare.Weight, declare.Table, declare.Cache, declare.LinearWeight, declare.ExpertWeights)
"""Of these the case knows the dtype."""


def _is_option(argument: Argument) -> bool:
    """Whether the case has its value: of tensors it has none, nor of an epsilon."""
    return not (argument.is_tensor or isinstance(argument, declare.Epsilon))


def case_fields(op: Op) -> tuple[str, ...]:
    """The fields of the op's case: dtype, widths, heads, the weights' dtypes, and every option that is no number."""
    weights = [f"{argument.name}_dtype" for argument in op.args if isinstance(argument, _BY_DTYPE)]
    options = [
        "quant_dtype" if isinstance(argument, declare.QuantDtype) else argument.name
        for argument in op.args
        if _is_option(argument)
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
    weights = tuple(place for place, argument in enumerate(op.args) if isinstance(argument, _BY_DTYPE))
    options = tuple(place for place, argument in enumerate(op.args) if _is_option(argument))
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
    parts = []
    for each in op.args:
        looked_at = f"{each.name}.shape, {each.name}.stride(), {each.name}.dtype, {each.name}.device"
        if each.default is None:  # a tensor that may be left out
            looked_at = f"{each.name} is None or ({looked_at})"
        parts.append(looked_at if each.is_tensor else each.name)
    source = f"lambda {', '.join(each.name for each in op.args)}: ({', '.join(parts)},)"
    made: Callable[..., Hashable] = eval(compile(source, f"<signature of {op.name}>", "eval"))
    return made


def handed_on(op: Op) -> Callable[..., Callable[..., Any] | None] | None:
    """From the op's arguments to what takes such calls, as an argument names it for more tokens than few; None: no argument does."""
    named, weight = (
        [at for at, each in enumerate(op.args) if isinstance(each, kind)]
        for kind in (declare.NamedOp, declare.LinearWeight)
    )
    if not named:
        return None
    names, tensors = (", ".join(each.name for each in op.args if each.is_tensor or every) for every in (True, False))
    source = f"lambda other: lambda {names}: other({tensors})"
    made = eval(compile(source, f"<beyond {op.name}>", "eval"))

    def more(*args: Any) -> Callable[..., Any] | None:
        other = goes_beyond(args[0], args[weight[0]], args[named[0]])
        found: Callable[..., Any] | None = None if other is None else made(other)
        return found

    return more


# ---- the public function ---------------------------------------------------------------------------------------------


def public(op: Op, kernels: tuple[Kernel, ...] = ()) -> Callable[..., Any]:
    """The op as a Python function with its arguments' names and defaults, and a docstring."""
    required = max(place for place, argument in enumerate(op.args) if argument.default is declare.REQUIRED)
    taken = ", ".join(
        # Python wants arguments without a default first: what stands before one has none either.
        f"{argument.name}: {argument.annotation}" + ("" if place <= required else f" = {argument.default!r}")
        for place, argument in enumerate(op.args)
    )
    given = ", ".join(argument.name for argument in op.args)
    several = f"tuple[{', '.join('Tensor' for _ in op.results)}]" if op.results else "None"
    result = "Tensor" if len(op.results) == 1 else several
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
    returned = f"    Contiguous: {'; '.join(results)}." if results else "    Nothing."
    grad = "" if op.backward is not None else "\n    RuntimeError: an input requires grad while grad is enabled."
    return "\n".join(
        [
            op.doc,
            "",
            "Args:",
            *arguments,
            "",
            "Returns:",
            returned,
            "",
            "Raises:",
            f"    ValueError: shapes, dtypes, devices or options that do not fit; the message names the argument.{grad}",
        ]
    )


def _describe(op: Op, argument: Argument) -> str:
    if isinstance(argument, Rows):
        dtypes = (
            "bfloat16, float16 or float32" if any(isinstance(a, declare.QuantDtype) for a in op.args) else "floating"
        )
        dtypes = "fp8" if isinstance(argument, declare.QuantisedRows) else dtypes
        like = f" Leading dimensions, dtype and device are those of {argument.like}." if argument.like else ""
        stride = "" if argument.any_strides else " Its last stride is 1."
        return f"{argument.doc or '(..., ' + argument.width + ').'}{like or f' Its dtype is {dtypes}.'}{stride}"
    if isinstance(argument, declare.Weight):
        return argument.doc or f"(width of {argument.of},), any floating dtype, on the device of {argument.of}."
    return argument.doc or "added to the mean square, at least 0."
