"""The ops of the norm family on Triton: from an op's chain to the function that launches its kernel.

Which kernel variant is launched is decided by what is constant for a layer (widths, epsilons, alignment) and by the number
of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...declare import BlockScale, Op
from ...formats import FORMATS
from ...ops.quantisation import DTYPES, LARGEST, empty_scales, scaling, swizzled_shape
from ...steps import MIDDLE, SINKS, SOURCES, format_of
from . import launcher, tuning
from .gated import gated_norm
from .kernels import dual_norm, row_norm
from .product import silu_mul

NO_QUANT = 0
PER_TOKEN, STATIC = (FORMATS[word].mode for word in ("token", "static"))
_BLOCKS = {
    form.mode: (scale.columns, form.packed, DTYPES[form.dtype], DTYPES[scale.dtype])
    for form in FORMATS.values()
    for scale in form.results
    if isinstance(scale, BlockScale) and form.mode is not None
}
"""Columns per scale, values per element, and what holds both, of the formats whose blocks are their own."""
ELEMENTS = 128
"""Columns that a program of a product handles as one where no group says how many."""


class Form(NamedTuple):
    """What of a chain decides how its kernel is launched."""

    name: str
    "The op's."
    mode: int
    "What it quantises to: `Format.mode`, or `NO_QUANT`."
    kept: bool
    "Whether the norm itself is a result beside its quantisation."
    adds: bool
    pads: bool
    launch: Callable[..., None]
    "Of single norms."


def function_of(op: Op, launch: Callable[..., None] | None = None) -> Callable[..., Any]:
    """The function that takes the op's arguments by position and launches its kernel.

    Args:
        op: the op.
        launch: for ops of single norms, what is called in place of `launch_row`.

    Raises:
        ValueError: an op that was not made from a chain, or from one that no kernel is for.
    """
    if op.chain is None:
        raise ValueError(f"{op.name} is not made from a chain; give its kernel a function of its own")
    sources = [step.adds for step in op.chain if step.stage == SOURCES]
    middle, sinks = (tuple(step.kernel for step in op.chain if step.stage == stage) for stage in (MIDDLE, SINKS))
    make = _MADE.get(middle)
    if make is None or not all(sources) or sinks not in ((), ("quant",), ("pad",)):
        raise ValueError(
            f"{op.name}: the kernels are for chains with weight offsets, all layouts of scales, and no padding behind a "
            "quantisation"
        )
    form = format_of(op.chain)
    mode = NO_QUANT if form is None or form.mode is None else form.mode
    kept = any(step.is_kept for step in op.chain)
    return make(Form(op.name, mode, kept, bool(sources), "pad" in sinks, launch or launch_row))


class Given(NamedTuple):
    """What a quantising launch gets besides its rows."""

    out: Tensor
    scales: Tensor
    "The results; for a static scale, where there are none, out again."
    scale_in: Tensor
    "The scale that is given, or out again."
    strides: tuple[int, int]
    "Of the scales, per row and per group."
    group: int
    largest: float
    scaling: int
    "Of `quantisation.Scaling`."
    results: tuple[Tensor, ...]
    swizzled: bool = False


def quantised(mode: int, x: Tensor, shape: tuple[int, ...], options: tuple[Any, ...]) -> Given:
    """Results for rows of this shape, from the op's options behind those of the norm."""
    if mode == NO_QUANT:
        out = _empty(x, x.dtype)
        return Given(out, out, out, (0, 0), 0, 0.0, 0, (out,))
    if mode in _BLOCKS:
        columns, packed, dtype, kind = _BLOCKS[mode]
        factor, swizzled = options or (None, False)
        out = torch.empty((*shape[:-1], shape[-1] // packed), dtype=dtype, device=x.device)
        # What no row and no column writes is zero: a product may read it.
        make, laid_out = torch.empty, (*shape[:-1], shape[-1] // columns)
        if swizzled:
            make, laid_out = torch.zeros, swizzled_shape(shape, shape[-1])
        scales = make(laid_out, dtype=torch.uint8, device=x.device)
        results = (out, scales if kind is torch.uint8 else scales.view(kind))
        return Given(out, scales, out if factor is None else factor, (0, 0), columns, 0.0, 0, results, swizzled)
    if mode == STATIC:
        scale, dtype = options
        out = _empty(x, dtype) if shape == x.shape else torch.empty(shape, dtype=dtype, device=x.device)
        return Given(out, out, scale, (0, 0), 0, LARGEST[dtype], 0, (out,))
    dtype = options[0]
    out = _empty(x, dtype) if shape == x.shape else torch.empty(shape, dtype=dtype, device=x.device)
    if mode == PER_TOKEN:
        scales = torch.empty((*shape[:-1], 1), dtype=torch.float32, device=x.device)
        return Given(out, scales, out, (1, 0), 0, LARGEST[dtype], scaling(options[1], groups=False), (out, scales))
    group, column_major, tma_aligned, ue8m0 = options[1:]
    scales = empty_scales(out, group, column_major, tma_aligned)
    # Strides in a scale tensor of (rows, groups): leading dimensions keep their order, so they count as one.
    strides = (1, scales.stride(-1)) if column_major else (scales.shape[-1], 1)
    return Given(out, scales, out, strides, group, LARGEST[dtype], scaling(ue8m0), (out, scales))


# ---- one norm per row ------------------------------------------------------------------------------------------------


def _row(form: Form) -> Callable[..., Any]:
    name, mode, kept, adds, pads, launch = form
    first = 1 + adds

    def function(*args: Any) -> Any:
        x, residual = args[0], args[first - 1]
        weight, epsilon, offset = args[first : first + 3]
        width = x.shape[-1]
        padded = args[-1] if pads else width
        if padded == width:
            given = quantised(mode, x, x.shape, args[first + 3 :])
        else:
            out = torch.empty((*x.shape[:-1], padded), dtype=x.dtype, device=x.device)
            given = Given(out, out, out, (0, 0), 0, 0.0, 0, (out,))
        results = given.results
        normed = given.out
        if kept:
            normed = _empty(x, x.dtype)
            results = (*results, normed)
        residual_out = normed
        if adds:
            residual_out = _empty(x, x.dtype)
            results = (*results, residual_out)
        launch(name, mode, kept, adds, padded, (x, residual, weight, normed, residual_out), epsilon, offset, given)
        return results if len(results) > 1 else results[0]

    return function


def launch_row(
    name: str,
    mode: int,
    kept: bool,
    adds: bool,
    padded: int,
    tensors: tuple[Tensor, ...],
    epsilon: float,
    offset: float,
    given: Given,
) -> None:
    """Launch the kernel of single norms. Tensors: x, residual, weight, normed, residual_out."""
    x, residual, weight, normed, residual_out = tensors
    x, residual = as_rows(x), as_rows(residual)
    rows, width = x.shape
    if rows == 0:
        return
    x_stride, residual_stride = x.stride(0), residual.stride(0)
    # Strides are counted in the largest power of two that divides them, up to 16: the kernel then knows their alignment.
    x_unit, residual_unit = x_stride & -x_stride & 15 or 16, residual_stride & -residual_stride & 15 or 16
    numbers = (rows, x_stride // x_unit, residual_stride // residual_unit, *given.strides)
    reads = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), given.scale_in.data_ptr()
    bits, high = reads[0] | reads[1] | reads[2] | reads[3], rows | x_stride | residual_stride | given.strides[1]
    every = (x, residual, weight, given.scale_in, given.out, given.scales, normed, residual_out)
    special = launcher.special(high, reads, every) if bits & 15 or high >> 31 or launcher.HIP else None
    step, device = tuning.regime(rows), x.get_device()
    key = (
        name, device, step, x.dtype, weight.dtype, given.out.dtype, width, padded, epsilon, offset, x_unit, residual_unit,
        given.group, given.scaling, given.swizzled, special,
    )  # fmt: skip
    written = given.out.data_ptr(), given.scales.data_ptr(), normed.data_ptr(), residual_out.data_ptr()
    if launcher.again(key, device, (*reads, *written), numbers):
        return
    item = x.element_size()
    aligned = not (reads[0] | reads[1] | reads[2] | x_unit * item | residual_unit * item | width * item) & 15
    shape = tuning.Row(width, item, adds, mode != NO_QUANT, kept, given.group, mode == PER_TOKEN, aligned)
    plan = tuning.launch_row(step, shape, launcher.wave(x.device))
    zeros = tuning.power_of_two(padded - width) if padded > width else 0
    constants = (
        width, epsilon, offset, x_unit, residual_unit, adds, mode, given.group, given.largest, given.scaling,
        given.swizzled, kept, padded, zeros, plan.chunk, plan.tail, plan.rows, plan.hold,
    )  # fmt: skip
    launcher.first(
        row_norm, key, every, numbers, constants, rows=plan.rows, sides=1, warps=plan.warps,
        registers=plan.registers if weight.element_size() <= item else 0,
    )  # fmt: skip


# ---- two norms per row -----------------------------------------------------------------------------------------------


def _dual(form: Form) -> Callable[..., Any]:
    name, mode, kept, *_ = form

    def function(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        q_offset: float,
        kv_offset: float,
        *options: Any,
    ) -> Any:
        given = quantised(mode, q, q.shape, options)
        normed = _empty(q, q.dtype) if kept else given.out
        kv_out = _empty(kv, kv.dtype)
        tensors = (q, kv, q_weight, kv_weight, normed, kv_out)
        _launch_dual(name, mode, kept, tensors, (q_epsilon, kv_epsilon, q_offset, kv_offset), given)
        return (*given.results, normed, kv_out) if kept else (*given.results, kv_out)

    return function


def _launch_dual(
    name: str,
    mode: int,
    kept: bool,
    tensors: tuple[Tensor, ...],
    floats: tuple[float, float, float, float],
    given: Given,
) -> None:
    q, kv, q_weight, kv_weight, normed, kv_out = tensors
    q, kv = as_rows(q), as_rows(kv)
    rows, q_width = q.shape
    if rows == 0:
        return
    kv_width = kv.shape[1]
    q_stride, kv_stride = q.stride(0), kv.stride(0)
    q_unit, kv_unit = q_stride & -q_stride & 15 or 16, kv_stride & -kv_stride & 15 or 16  # as in launch_row
    numbers = (rows, q_stride // q_unit, kv_stride // kv_unit, *given.strides)
    reads = q.data_ptr(), kv.data_ptr(), q_weight.data_ptr(), kv_weight.data_ptr(), given.scale_in.data_ptr()
    bits, high = reads[0] | reads[1] | reads[2] | reads[3] | reads[4], rows | q_stride | kv_stride | given.strides[1]
    every = (q, kv, q_weight, kv_weight, given.scale_in, given.out, given.scales, normed, kv_out)
    special = launcher.special(high, reads, every) if bits & 15 or high >> 31 or launcher.HIP else None
    step, device = tuning.regime(rows), q.get_device()
    key = (
        name, device, step, q.dtype, q_weight.dtype, kv_weight.dtype, given.out.dtype, q_width, kv_width, floats,
        given.group, given.scaling, q_unit, kv_unit, special,
    )  # fmt: skip
    written = given.out.data_ptr(), given.scales.data_ptr(), normed.data_ptr(), kv_out.data_ptr()
    if launcher.again(key, device, (*reads, *written), numbers):
        return
    item = q.element_size()
    aligned = not (reads[0] | reads[1] | reads[2] | reads[3] | q_unit * item | kv_unit * item | q_width * item) & 15
    dual = tuning.Dual(q_width, kv_width, item, mode != NO_QUANT, given.group, aligned)
    plan = tuning.launch_dual(step, dual, launcher.wave(q.device))
    constants = (
        q_width, kv_width, *floats, q_unit, kv_unit, mode, given.group, given.largest, given.scaling, kept,
        plan.chunk, plan.tail, plan.kv_chunk, plan.rows, plan.split, plan.hold,
    )  # fmt: skip
    sides = 2 if plan.split else 1
    launcher.first(
        dual_norm, key, every, numbers, constants,
        rows=plan.rows, sides=sides, warps=plan.warps, registers=plan.registers,
    )  # fmt: skip


# ---- gated norms -----------------------------------------------------------------------------------------------------


def _gated(form: Form) -> Callable[..., Any]:
    name, mode, keeps, *_ = form

    def function(
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        epsilon: float,
        offset: float,
        activation: str,
        norm_before_gate: bool,
        *options: Any,
    ) -> Any:
        heads, width = x.shape[-2:]
        shape = x.shape if mode == NO_QUANT else (*x.shape[:-2], heads * width)
        given = quantised(mode, x, shape, options)
        kept = _empty(x, x.dtype) if keeps else given.out
        x, gate = _heads(x), _heads(gate)
        tokens = x.shape[0]
        results = _with(given, kept if keeps else None)
        if tokens == 0:
            return results
        rows = tokens if mode == PER_TOKEN else tokens * heads
        strides = x.stride(0), x.stride(1), gate.stride(0), gate.stride(1)
        x_unit = (strides[0] | strides[1]) & -(strides[0] | strides[1]) & 15 or 16
        gate_unit = (strides[2] | strides[3]) & -(strides[2] | strides[3]) & 15 or 16
        numbers = (
            rows, strides[0] // x_unit, strides[1] // x_unit, strides[2] // gate_unit, strides[3] // gate_unit,
            *given.strides,
        )  # fmt: skip
        reads = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), given.scale_in.data_ptr()
        bits, high = (
            reads[0] | reads[1] | reads[2] | reads[3],
            rows | strides[0] | strides[1] | strides[2] | strides[3] | given.strides[1],
        )
        every = (x, gate, weight, given.scale_in, kept, given.out, given.scales)
        special = launcher.special(high, reads, every) if bits & 15 or high >> 31 or launcher.HIP else None
        step, device = tuning.regime(tokens * heads), x.get_device()
        key = (
            name, device, step, x.dtype, weight.dtype, given.out.dtype, heads, width, epsilon, offset, activation,
            norm_before_gate, x_unit, gate_unit, given.group, given.scaling, special,
        )  # fmt: skip
        if launcher.again(
            key, device, (*reads, kept.data_ptr(), given.out.data_ptr(), given.scales.data_ptr()), numbers
        ):
            return results
        plan = tuning.launch_gated(step, heads if mode == PER_TOKEN else 0, width, given.group, launcher.wave(x.device))
        constants = (
            heads, width, epsilon, offset, x_unit, gate_unit, activation == "sigmoid", norm_before_gate, mode,
            given.group, given.largest, given.scaling, plan.chunk, plan.rows, keeps,
        )  # fmt: skip
        each = 1 if mode == PER_TOKEN else plan.rows
        launcher.first(gated_norm, key, every, numbers, constants, rows=each, sides=1, warps=plan.warps)
        return results

    return function


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


def _product(form: Form) -> Callable[..., Any]:
    name, mode, keeps, *_ = form

    def function(gate: Tensor, up: Tensor, limit: float, *options: Any) -> Any:
        given = quantised(mode, gate, gate.shape, options)
        kept = _empty(gate, gate.dtype) if keeps else given.out
        gate, up = as_rows(gate), as_rows(up)
        rows, width = gate.shape
        results = _with(given, kept if keeps else None)
        if rows == 0:
            return results
        gate_stride, up_stride = gate.stride(0), up.stride(0)
        gate_unit, up_unit = gate_stride & -gate_stride & 15 or 16, up_stride & -up_stride & 15 or 16
        step, device = tuning.regime(rows), gate.get_device()
        group = given.group or ELEMENTS
        if mode != PER_TOKEN:
            rows *= -(-width // group)
        numbers = (rows, gate_stride // gate_unit, up_stride // up_unit, *given.strides)
        reads = gate.data_ptr(), up.data_ptr(), given.scale_in.data_ptr()
        bits, high = reads[0] | reads[1] | reads[2], rows | gate_stride | up_stride | given.strides[1]
        every = (gate, up, given.scale_in, kept, given.out, given.scales)
        special = launcher.special(high, reads, every) if bits & 15 or high >> 31 or launcher.HIP else None
        key = (
            name, device, step, gate.dtype, given.out.dtype, width, limit, gate_unit, up_unit, given.group, given.scaling,
            special,
        )  # fmt: skip
        if launcher.again(
            key, device, (*reads, kept.data_ptr(), given.out.data_ptr(), given.scales.data_ptr()), numbers
        ):
            return results
        plan = tuning.launch_product(step, width, mode == PER_TOKEN, group, launcher.wave(gate.device))
        constants = (
            width, limit if math.isfinite(limit) else 0.0, gate_unit, up_unit, mode, group, given.largest, given.scaling,
            plan.chunk, plan.rows, keeps,
        )  # fmt: skip
        launcher.first(
            silu_mul, key, every, numbers, constants,
            rows=plan.rows, sides=1, warps=plan.warps, registers=plan.registers,
        )  # fmt: skip
        return results

    return function


_MADE = {("norm",): _row, ("norm", "norm"): _dual, ("gated_norm",): _gated, ("silu_mul",): _product}
"""From the middle of a chain, as its steps say themselves (`Step.kernel`), to what makes the function."""


def _with(given: Given, kept: Tensor | None) -> Any:
    """What an op gives: what is quantised, and what it keeps beside."""
    results = given.results if kept is None else (*given.results, kept)
    return results if len(results) > 1 else results[0]


def as_rows(x: Tensor) -> Tensor:
    """The (rows, width) view of x, or a copy where its leading dimensions cannot be counted as one."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _heads(x: Tensor) -> Tensor:
    """The (tokens, heads, width) view of x, or a copy where its leading dimensions cannot be counted as one."""
    return x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    # Less than half the time of torch.empty with a shape, a dtype and a device.
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
