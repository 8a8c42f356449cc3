"""Norms that quantise to fp8 over AITER's kernels: HIP's for one norm, HIP's for two latents with one of them, Triton's.

Each quantises the norm before any rounding, and norms the sum with the residual before its rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.quantisation import empty_scales
from .resolved import Resolved
from .signatures import Results, one_norm
from .tensors import (
    dense,
    empty_like,
    flat,
    flat_like,
    is_gemma,
    next_power_of_two,
    no_offset,
    rows,
    same_shape,
    scale_buffer,
    scales_of,
    shaped,
    unpermuted,
    vector,
)


def hip(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_{per_token,group}_quant`, over `rmsnorm_quant` and `add_rmsnorm_quant`."""
    name, function = found.name, found.function
    gemma_known = "gemma_norm" in found.names

    def core(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        epsilon: float,
        weight_offset: float,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
        *_: bool,
    ) -> Results:
        out, summed = empty_like(x, dtype), None if residual is None else empty_like(x)
        if residual is not None:
            same_shape(name, "residual", residual, x)
        if not x.numel():
            return out, empty_scales(x, group_size, column_major), None, summed
        scale = scale_buffer(x, 1 if group_size is None else x.shape[-1] // group_size)
        options: dict[str, Any] = {"gemma_norm": True} if is_gemma(name, weight_offset, gemma_known) else {}
        if residual is not None and summed is not None:
            options |= {"residual_in": rows(residual), "residual_out": flat_like(summed)}
        function(
            out=flat_like(out),
            input=rows(x),
            scale=scale,
            weight=vector(name, "weight", weight, x),
            epsilon=epsilon,
            group_size=group_size or 0,
            shuffle_scale=column_major,
            **options,
        )
        return out, scales_of(scale, x.shape[:-1], column_major), None, summed

    return one_norm(found, core)


def latents(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_{per_token,group}_quant[_with_norm]`, by the kernels of two latents with the first of them only."""
    name, function, keeps_norm = found.name, found.function, found.binding.keeps_norm
    gemma_known = "gemma_norm" in found.names

    def core(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        epsilon: float,
        weight_offset: float,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
        *_: bool,
    ) -> Results:
        out, summed = empty_like(x, dtype), None if residual is None else empty_like(x)
        normed = empty_like(x) if keeps_norm else None
        if residual is not None:
            same_shape(name, "residual", residual, x)
        if not x.numel():
            return out, empty_scales(x, group_size, column_major), normed, summed
        scale = scale_buffer(x, 1 if group_size is None else x.shape[-1] // group_size)
        options: dict[str, Any] = {"gemma_norm": True} if is_gemma(name, weight_offset, gemma_known) else {}
        if group_size is not None:
            options |= {"group_size": group_size, "transpose_scale": column_major}
        if normed is not None:
            options["q_out_unquantized"] = flat_like(normed)
        if residual is not None and summed is not None:
            options |= {"q_residual": rows(residual), "q_res_out": flat_like(summed)}
        function(
            q_out_quantized=flat_like(out),
            q_out_scale=scale,
            q=rows(x),
            q_weight=vector(name, "weight", weight, x),
            q_epsilon=epsilon,
            **options,
        )
        return out, scales_of(scale, x.shape[:-1], column_major), normed, summed

    return one_norm(found, core)


def triton(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_{per_token,group}_quant[_with_norm]`, over `fused_rms_fp8_group_quant`.

    One scale per row is one group of a power of two, behind whose columns are zeros.
    """
    name, function, keeps_norm = found.name, found.function, found.binding.keeps_norm

    def core(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        epsilon: float,
        weight_offset: float,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
        *_: bool,
    ) -> Results:
        no_offset(name, weight_offset)
        if residual is not None:
            same_shape(name, "residual", residual, x)
        if not x.numel():
            normed, summed = empty_like(x) if keeps_norm else None, None if residual is None else empty_like(x)
            return empty_like(x, dtype), empty_scales(x, group_size, column_major), normed, summed
        (out, scales), normed, _second, summed = function(
            inp1=flat(x),
            inp1_weight=dense(weight),
            inp1_epsilon=epsilon,
            group_size=group_size or next_power_of_two(x.shape[-1]),
            dtype_quant=dtype,
            res1=None if residual is None else flat(residual),
            output_unquantized_inp1=keeps_norm,
            transpose_scale=column_major,
        )
        return out.view(x.shape), unpermuted(scales, x.shape[:-1], column_major), shaped(normed, x), shaped(summed, x)

    return one_norm(found, core)


def triton_static(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_static_quant[_with_norm](..., scale, dtype)`, over `fused_rms_fp8_per_tensor_static_quant`."""
    name, function, keeps_norm = found.name, found.function, found.binding.keeps_norm

    def core(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        epsilon: float,
        weight_offset: float,
        scale: Tensor,
        dtype: torch.dtype,
    ) -> Results:
        no_offset(name, weight_offset)
        if residual is not None:
            same_shape(name, "residual", residual, x)
        if not x.numel():
            normed, summed = empty_like(x) if keeps_norm else None, None if residual is None else empty_like(x)
            return empty_like(x, dtype), None, normed, summed
        out, normed, _second, summed = function(
            inp1=flat(x),
            inp1_weight=dense(weight),
            inp1_epsilon=epsilon,
            inp1_scale=scale,
            dtype_quant=dtype,
            res1=None if residual is None else flat(residual),
            output_unquantized_inp1=keeps_norm,
        )
        return out.view(x.shape), None, shaped(normed, x), shaped(summed, x)

    return one_norm(found, core)
