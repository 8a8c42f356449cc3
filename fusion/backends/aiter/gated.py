"""Gated norms quantised to fp8 over AITER's HIP kernels: `norm(x) * silu(z)` per head of 128, then the scale.

A row whose largest magnitude is at most 1e-10 gets the scale 1e-10, where layerfuse's own ops give 1e-10 / largest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...ops.quantisation import empty_scales
from .errors import AiterCallError
from .resolved import Resolved
from .tensors import scale_buffer, scales_of, vector

Pair = tuple[Tensor, Tensor]


def group_quant(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, float, torch.dtype, bool], Pair]:
    """`gated_rms_norm_group_quant(x, z, weight, epsilon, dtype, column_major) -> (out, scales)`.

    x, z: (..., heads, 128), alike; weight: (128,). out: (..., heads * 128) in fp8; scales: (..., heads), one per head.

    Raises:
        AiterCallError: another shape, or dtypes that differ.
    """
    name, function = found.binding, found.function
    heads_of = _heads if found.releases.surely_from("v0.1.14-rc0") else _packed_heads

    def call(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype, column_major: bool) -> Pair:
        _check(name, x, z, weight)
        out, leading = _flat_out(x, dtype)
        if not x.numel():
            return out, empty_scales(x.flatten(-2), x.shape[-1], column_major)
        scale = scale_buffer(out, x.shape[-2])
        function(
            out=out.view(-1, out.shape[-1]),
            scale=scale,
            x=heads_of(x),
            z=heads_of(z),
            weight=vector(name, "weight", weight, x),
            epsilon=epsilon,
            group_size=x.shape[-1],
            transpose_scale=column_major,
        )
        return out, scales_of(scale, leading, column_major)

    return call


def per_token_quant(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, float, torch.dtype], Pair]:
    """`gated_rms_norm_per_token_quant(x, z, weight, epsilon, dtype) -> (out, scales)`; scales: (..., 1).

    x, z: (..., heads, 128), at most 128 heads; else as `group_quant`.

    Raises:
        AiterCallError: another shape, or dtypes that differ.
    """
    name, function = found.binding, found.function

    def call(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Pair:
        _check(name, x, z, weight)
        if x.shape[-2] > 128:
            raise AiterCallError(name, f"{x.shape[-2]} heads: AITER's kernel covers at most 128")
        out, leading = _flat_out(x, dtype)
        if not x.numel():
            return out, empty_scales(x.flatten(-2), None, False)
        scale = scale_buffer(out, 1)
        function(
            out=out.view(-1, out.shape[-1]),
            scale=scale.view(-1),
            x=_heads(x),
            z=_heads(z),
            weight=vector(name, "weight", weight, x),
            epsilon=epsilon,
        )
        return out, scales_of(scale, leading, False)

    return call


def _check(name: str, x: Tensor, z: Tensor, weight: Tensor) -> None:
    if x.dim() < 2 or x.shape[-1] != 128 or weight.shape != x.shape[-1:]:
        raise AiterCallError(
            name, f"x must be (..., heads, 128) with a weight of (128,), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if z.shape != x.shape or z.dtype != x.dtype:
        raise AiterCallError(name, f"z must be like x, {x.dtype} {tuple(x.shape)}; got {z.dtype} {tuple(z.shape)}")


def _flat_out(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, torch.Size]:
    leading = x.shape[:-2]
    return torch.empty((*leading, x.shape[-2] * x.shape[-1]), dtype=dtype, device=x.device), leading


def _heads(x: Tensor) -> Tensor:
    """The tensor as (tokens, heads, head width), its last dimension without gaps and every head on 16 bytes; else a copy."""
    flat = x.reshape(-1, x.shape[-2], x.shape[-1])
    size = flat.element_size()
    if flat.stride(2) == 1 and not (flat.stride(0) * size | flat.stride(1) * size | flat.data_ptr()) & 15:
        return flat
    return flat.clone(memory_format=torch.contiguous_format)


def _packed_heads(x: Tensor) -> Tensor:
    """The same, contiguous: the kernels before v0.1.14-rc0 ignore strides and say nothing."""
    flat = x.reshape(-1, x.shape[-2], x.shape[-1])
    if flat.is_contiguous() and not flat.data_ptr() & 15:
        return flat
    return flat.clone(memory_format=torch.contiguous_format)
