"""The launch of `mla_norm_rope_cache` and its quantised forms, see `family` for what all launches have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...declare import PAIRS, Op
from ...formats import FORMATS, FP8
from ...latent_ops import BEFORE_OPTIONS
from ...ops.cache_layout import layout_of
from ...ops.quantisation import LARGEST
from .. import repeatable
from . import launcher, refuses_fp8, tuning
from .family import NO_QUANT, Given, as_rows, quantised
from .latent_kernel import norm_rope_cache

FORMS = {"plain": 0, "fp8": 1, "fp8_ds_mla": 2}
"""As the kernel counts them."""


def refuses(case: Any) -> str | None:
    """A cache in a format that Triton cannot convert to here."""
    if case.cache_dtype in LARGEST:
        return refuses_fp8(case.cache_dtype)
    return refuses_fp8(torch.float8_e4m3fn) if case.cache_dtype == torch.uint8 else None


def function_of(op: Op) -> Callable[..., Any]:
    """The function that takes the op's arguments by position and launches the kernel."""
    if not op.results:
        return _into
    options = tuple(argument.name for argument in op.args[BEFORE_OPTIONS:])
    mode = next((FORMATS[word].mode for word in FP8 if FORMATS[word].options == options), None) or NO_QUANT
    name = op.name

    def function(*args: Any) -> Any:
        q, kv, k_rope = args[:3]
        given = quantised(mode, q, q.shape, args[BEFORE_OPTIONS:])
        _launch(name, mode, (as_rows(q), as_rows(kv), as_rows(k_rope)), args, given)
        return given.results if len(given.results) > 1 else given.results[0]

    return function


def _into(*args: Any) -> None:
    _launch_into(*args)


repeatable[_into] = lambda: launcher.repeated(_launch_into, _tensors_into)


def _launch_into(*args: Any) -> launcher.Launch | None:
    q, kv, k_rope, q_out = *args[:3], args[-1]
    out = q_out if q_out.is_contiguous() else torch.empty_like(q_out, memory_format=torch.contiguous_format)
    given = Given(out, out, out, (0, 0), 0, 0.0, 0, (out,))
    launch = _launch("mla_norm_rope_cache_into", NO_QUANT, (as_rows(q), as_rows(kv), as_rows(k_rope)), args, given)
    if out is not q_out:
        q_out.copy_(out)
        return None
    return launch if args[11].dtype != torch.uint8 and q.dim() == 2 else None


def _tensors_into(*args: Any) -> tuple[torch.Tensor, ...]:
    """The kernel's, of rows that are no blocks of rows, and of a cache of one dtype."""
    q, kv, k_rope, q_weight, kv_weight, _, _, cos, sin, positions, slots, cache, cache_scale = args[:13]
    out = args[-1]
    rows, tables = (q, kv, k_rope, q_weight, kv_weight), (cos, sin, positions, slots)
    return (*rows, *tables, out, cache_scale, out, out, cache, cache, cache)


def _unit(stride: int) -> int:
    """The largest power of two that divides a stride, up to 16."""
    return stride & -stride & 15 or 16


def _launch(
    name: str, mode: int, rows: tuple[torch.Tensor, ...], args: tuple[Any, ...], given: Given
) -> launcher.Launch | None:
    q, kv, k_rope = rows
    q_weight, kv_weight, q_epsilon, kv_epsilon, cos, sin, positions, slots, cache, cache_scale = args[3:13]
    q_offset, kv_offset, pairs = args[13:BEFORE_OPTIONS]
    tokens, q_width = q.shape
    if tokens == 0:
        return None
    kv_width, rope_width = kv.shape[1], k_rope.shape[1]
    layout = layout_of(cache, kv_width, rope_width, kv.dtype)
    values, scales, rope = _views(cache, layout.form)
    q_stride, kv_stride, rope_stride = q.stride(0), kv.stride(0), k_rope.stride(0)
    q_unit, kv_unit, rope_unit = _unit(q_stride), _unit(kv_stride), _unit(rope_stride)
    entry_unit = _unit(layout.page_stride | layout.slot_stride)
    numbers = (
        tokens, q_stride // q_unit, kv_stride // kv_unit, rope_stride // rope_unit, *given.strides,
        min(cos.shape[0], sin.shape[0]), cos.stride(0), sin.stride(0),
        layout.slots, layout.page_size, layout.page_stride // entry_unit, layout.slot_stride // entry_unit,
    )  # fmt: skip
    inputs = (q, kv, k_rope, q_weight, kv_weight, cos, sin, positions, slots, given.scale_in, cache_scale)
    every = (*inputs, given.out, given.scales, values, scales, rope)
    addresses = tuple(tensor.data_ptr() for tensor in every)
    # The cache too: a page may start anywhere in a larger allocation.
    special = launcher.special(max(numbers), addresses, every)
    step, device = tuning.regime(tokens), q.get_device()
    key = (
        name, device, step, q.dtype, q_weight.dtype, kv_weight.dtype, cos.dtype, sin.dtype, positions.dtype, slots.dtype,
        given.out.dtype, cache.dtype, q_width, kv_width, rope_width, q_epsilon, kv_epsilon, q_offset, kv_offset, pairs,
        given.group, given.scaling, q_unit, kv_unit, rope_unit, entry_unit, special,
    )  # fmt: skip
    launch = launcher.Launch(key, device, numbers)
    if launcher.again(key, device, addresses, numbers):
        return launch
    item = q.element_size()
    aligned = not any(address & 15 for address in addresses[:5]) and not (q_unit | kv_unit) * item & 15
    dual = tuning.Dual(q_width, kv_width, item, mode != NO_QUANT, given.group, aligned)
    plan = tuning.launch_latents(step, dual, layout.form, launcher.wave(q.device))
    constants = (
        q_width, kv_width, rope_width, q_epsilon, kv_epsilon, q_offset, kv_offset,
        q_unit, kv_unit, rope_unit, entry_unit, mode, given.group, given.largest, given.scaling,
        PAIRS.index(pairs), FORMS[layout.form], LARGEST.get(cache.dtype, 0.0), tuning.power_of_two(rope_width // 2),
        plan.chunk, plan.tail, plan.kv_chunk, plan.split, plan.hold,
    )  # fmt: skip
    sides = 2 if plan.split else 1
    launcher.first(norm_rope_cache, key, every, numbers, constants, rows=1, sides=sides, warps=plan.warps)
    return None


def _views(cache: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cache as values, as scales and as rope columns: the same memory by other dtypes in `fp8_ds_mla`."""
    if form != "fp8_ds_mla":
        return cache, cache, cache
    return cache.view(torch.float8_e4m3fn), cache.view(torch.float32), cache.view(torch.bfloat16)
