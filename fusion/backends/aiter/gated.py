"""Gated norms quantised to fp8 over AITER's HIP and Triton kernels: the norm of each head, its gate, then the scale.

HIP's give a row whose largest magnitude is at most 1e-10 the scale 1e-10, where layerfuse's own ops give 1e-10 / largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.quantisation import LARGEST, SMALLEST_AMAX, round_up_to_power_of_two
from .table import Resolved
from .tensors import dense, flat, flat_like, scale_buffer, scales_of, vector

Pair = tuple[Tensor, Tensor]
Gated = Callable[..., Pair]
"""`(x, gate, weight, epsilon, weight_offset, activation, norm_before_gate, dtype, ...)`, in the order of the op: then `use_ue8m0`, or
`group_size, column_major, tma_aligned, use_ue8m0`."""

FLOORS = {
    (dtype, ue8m0): float(round_up_to_power_of_two(torch.tensor(floor)) if ue8m0 else floor)
    for dtype, floor in ((dtype, SMALLEST_AMAX / largest) for dtype, largest in LARGEST.items())
    for ue8m0 in (False, True)
}
"""The least scale of a dtype, which is a power of two where all are: AITER applies it after rounding them up."""


def hip_group(found: Resolved) -> Gated:
    """`gated_rms_norm_group_quant`, for heads of 128 columns: one scale per head."""
    run = _hip(found)

    def call(*given: Any) -> Pair:
        *norm, dtype, group_size, column_major, _tma_aligned, _ue8m0 = given
        scale = scale_buffer(given[0], 1).view(-1, given[0].shape[-2])
        out = run(norm, dtype, scale, group_size=group_size, transpose_scale=column_major)
        return out, scales_of(scale, out.shape[:-1], column_major)

    return call


def hip_per_token(found: Resolved) -> Gated:
    """`gated_rms_norm_per_token_quant`, for at most 128 heads of 128 columns."""
    run = _hip(found)

    def call(*given: Any) -> Pair:
        *norm, dtype, _ue8m0 = given
        x = given[0]
        scale = x.new_empty(x.shape[:-2].numel(), dtype=torch.float32)
        out = run(norm, dtype, scale)
        return out, scale.view(*x.shape[:-2], 1)

    return call


def _hip(found: Resolved) -> Callable[..., Tensor]:
    """From the norm, the dtype and a buffer for the scales to the values: (..., heads * 128)."""
    function = found.function

    def run(norm: list[Any], dtype: torch.dtype, scale: Tensor, **options: Any) -> Tensor:
        x, gate, weight, epsilon, *_built_in = norm
        out = torch.empty((*x.shape[:-2], x.shape[-2] * x.shape[-1]), dtype=dtype, device=x.device)
        function(
            out=flat_like(out),
            scale=scale,
            x=_heads(x),
            z=_heads(gate),
            weight=vector(weight),
            epsilon=epsilon,
            **options,
        )
        return out

    return run


def triton_group(found: Resolved) -> Gated:
    """`gated_rms_norm_group_quant`, for heads of any width that the groups divide.

    The bounds and the floor of the scales are layerfuse's own; left alone, AITER takes 224 for e4m3fnuz here and 240
    elsewhere.
    """
    function = found.function

    def call(*given: Any) -> Pair:
        x, gate, weight, epsilon, _weight_offset, activation, norm_before_gate, dtype, *quantisation = given
        group_size, _column_major, _tma_aligned, use_ue8m0 = quantisation
        leading, width = x.shape[:-2], x.shape[-2] * x.shape[-1]
        largest = LARGEST[dtype]
        out, scales = function(
            x=flat(x).contiguous(),
            weight=dense(weight),
            bias=None,
            z=flat(gate).contiguous(),
            eps=epsilon,
            norm_before_gate=norm_before_gate,
            use_ue8m0=use_ue8m0,
            activation=activation,
            out_dtype=dtype,
            fp8_min=-largest,
            fp8_max=largest,
            fp8_min_scaling_factor=FLOORS[dtype, use_ue8m0],
            group_size=group_size,
        )
        return out.view(*leading, width), scales.view(*leading, width // group_size)

    return call


def _heads(x: Tensor) -> Tensor:
    """The tensor as (tokens, heads, head width), its last dimension without gaps and every head on 16 bytes; else a copy."""
    three = x.reshape(-1, x.shape[-2], x.shape[-1])
    size = three.element_size()
    if three.stride(2) == 1 and not (three.stride(0) * size | three.stride(1) * size | three.data_ptr()) & 15:
        return three
    return three.clone(memory_format=torch.contiguous_format)
