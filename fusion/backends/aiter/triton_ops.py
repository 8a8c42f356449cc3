"""AITER's Triton functions under our conventions. They allocate what they return, and take two dimensions.

They carry strides to the kernel, so nothing is copied for them but what has more than two dimensions and no flat view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.quantisation import LARGEST, SMALLEST_AMAX, empty_scales, scale_shape, scale_strides
from .errors import AiterCallError
from .resolved import Resolved
from .tensors import empty_like, no_offset, same_shape

Pair = tuple[Tensor, Tensor]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
GATES = ("silu", "sigmoid")
"""AITER's function also accepts other words, and then does not gate, without an error."""


def rms_norm(found: Resolved) -> Callable[[Tensor, Tensor, float, float], Tensor]:
    """`triton_rms_norm(x, weight, epsilon, weight_offset) -> out`, x: (..., width).

    Raises:
        AiterCallError: a weight_offset other than 0.
    """
    name, function = found.binding, found.function

    def call(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Tensor:
        no_offset(name, weight_offset)
        if not x.numel():
            return empty_like(x)
        result: Tensor = function(input=_flat(x), weight=weight, epsilon=epsilon)
        return result.view(x.shape)

    return call


def rms_norm_group_quant(found: Resolved) -> Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """`triton_rms_norm_group_quant(x, weight, epsilon, dtype, group_size, column_major, ...)`.

    Optional: `second`, `second_weight`, `second_epsilon` (another input of x's leading dimensions, normed only) and
    `residual` (like x, added first). Returns (out in fp8, float32 scales, second normed or None, rounded sum or None).

    Raises:
        AiterCallError: a residual that is not like x, or half of a second input.
    """
    name, function = found.binding, found.function

    def call(
        x: Tensor,
        weight: Tensor,
        epsilon: float,
        dtype: torch.dtype,
        group_size: int,
        column_major: bool,
        second: Tensor | None = None,
        second_weight: Tensor | None = None,
        second_epsilon: float | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        if (second is None) is not (second_weight is None) or (second is None) is not (second_epsilon is None):
            raise AiterCallError(name, "second, second_weight and second_epsilon come together")
        if residual is not None:
            same_shape(name, "residual", residual, x)
        if second is not None and second.shape[:-1] != x.shape[:-1]:
            raise AiterCallError(name, f"second {tuple(second.shape)} must have x's leading dimensions {x.shape[:-1]}")
        if not x.numel():
            summed = None if residual is None else empty_like(x)
            scales = empty_scales(x, group_size, column_major)
            return empty_like(x, dtype), scales, None if second is None else empty_like(second), summed
        (out, scales), _, second_out, residual_out = function(
            inp1=_flat(x),
            inp1_weight=weight,
            inp1_epsilon=epsilon,
            inp2=None if second is None else _flat(second),
            inp2_weight=second_weight,
            inp2_epsilon=second_epsilon,
            group_size=group_size,
            dtype_quant=dtype,
            res1=None if residual is None else _flat(residual),
            output_unquantized_inp1=False,
            transpose_scale=column_major,
        )
        return (
            out.view(x.shape),
            _scales(scales, x, group_size, column_major),
            None if second is None else second_out.view(second.shape),
            None if residual is None else residual_out.view(x.shape),
        )

    return call


def gated_rms_norm_quant(found: Resolved) -> Callable[..., Pair]:
    """`triton_gated_rms_norm_quant(x, z, weight, epsilon, dtype, group_size, ...) -> (out, scales)`.

    x, z: (..., width), alike: the norm is over the last dimension. Options: `activation` (silu or sigmoid),
    `norm_before_gate`, `use_ue8m0`. scales: (..., groups), or (..., 1) with group_size None. The bounds and the floor
    of the scales are layerfuse's own; left alone, AITER takes 224 for e4m3fnuz here and 240 elsewhere.

    Raises:
        AiterCallError: an activation that AITER would leave out without an error, or z unlike x.
    """
    name, function = found.binding, found.function

    def call(
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        epsilon: float,
        dtype: torch.dtype,
        group_size: int | None,
        activation: str = "silu",
        norm_before_gate: bool = True,
        use_ue8m0: bool = False,
    ) -> Pair:
        if activation not in GATES:
            raise AiterCallError(name, f"activation must be one of {', '.join(GATES)}, got {activation!r}")
        same_shape(name, "z", z, x)
        if not x.numel():
            return empty_like(x, dtype), empty_scales(x, group_size, False)
        largest = LARGEST[dtype]
        out, scales = function(
            x=_flat(x).contiguous(),
            weight=weight,
            bias=None,
            z=_flat(z).contiguous(),
            eps=epsilon,
            norm_before_gate=norm_before_gate,
            use_ue8m0=use_ue8m0,
            activation=activation,
            out_dtype=dtype,
            fp8_min=-largest,
            fp8_max=largest,
            fp8_min_scaling_factor=SMALLEST_AMAX / largest,
            group_size=group_size,
        )
        return out.view(x.shape), scales.view(scale_shape(tuple(x.shape[:-1]), x.shape[-1], group_size))

    return call


def add_rms_norm_pad(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, float, int], Pair]:
    """`triton_add_rms_norm_pad(x, residual, weight, epsilon, multiple) -> (out, residual_out)`.

    x: (..., width); out: (..., width rounded up to `multiple`), zeros behind the width; residual_out: the rounded sum.
    A residual is required: without one AITER's kernel rests on an assumption that is then false.

    Raises:
        AiterCallError: a residual that is not like x.
    """
    name, function = found.binding, found.function

    def call(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, multiple: int) -> Pair:
        same_shape(name, "residual", residual, x)
        width = -(-x.shape[-1] // multiple) * multiple if multiple else x.shape[-1]
        if not x.numel():
            return torch.zeros((*x.shape[:-1], width), dtype=x.dtype, device=x.device), empty_like(x)
        out, residual_out = function(
            x=_flat(x), weight=weight, epsilon=epsilon, res=_flat(residual), x_pad_to_multiple=multiple
        )
        return out.view(*x.shape[:-1], width), residual_out.view(x.shape)

    return call


def act_mul_group_quant(found: Resolved) -> Callable[[Tensor, str, int, torch.dtype], Pair]:
    """`triton_act_mul_group_quant(x, activation, group_size, dtype) -> (out, scales)`.

    x: (..., 2 * width), first the half that is activated, then the one that it is multiplied with; out: (..., width).

    Raises:
        AiterCallError: an odd width or an unknown activation.
    """
    name, function = found.binding, found.function

    def call(x: Tensor, activation: str, group_size: int, dtype: torch.dtype) -> Pair:
        if x.shape[-1] % 2 or activation not in ACTIVATIONS:
            raise AiterCallError(
                name,
                f"x must have two halves and activation be one of {ACTIVATIONS}; got {x.shape[-1]}, {activation!r}",
            )
        half = x[..., : x.shape[-1] // 2]
        if not x.numel():
            return empty_like(half, dtype), empty_scales(half, group_size, False)
        out, scales = function(x=_flat(x), activation=activation, group_size=group_size, dtype_quant=dtype)
        return out.view(half.shape), scales.view(scale_shape(tuple(half.shape[:-1]), half.shape[-1], group_size))

    return call


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _scales(scales: Any, x: Tensor, group_size: int, column_major: bool) -> Tensor:
    """AITER's scales as ours: column-major ones come as a contiguous tensor whose own indexing is wrong."""
    shape = scale_shape(tuple(x.shape[:-1]), x.shape[-1], group_size)
    result: Tensor = scales.as_strided(shape, scale_strides(shape, True)) if column_major else scales.view(shape)
    return result
