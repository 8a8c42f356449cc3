"""Norms that quantise over AITER's kernels: HIP's for one norm, HIP's for two latents with both or one of them, Triton's.

Each quantises the norm before any rounding, but for Triton's static form, which is told. Each norms the sum with the residual before its rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.quantisation import MX_COLUMNS
from .resolved import Resolved
from .signatures import Norm, Results, norms
from .tensors import (
    dense,
    empty_like,
    flat,
    flat_like,
    gemma,
    next_power_of_two,
    rows,
    scale_buffer,
    scales_of,
    shaped,
    unpermuted,
    vector,
)


def hip(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_{per_token,group,mxfp8}_quant`, over `[add_]rmsnorm_quant`, which writes bytes where it is given a buffer of bytes."""
    function = found.function
    kind = torch.uint8 if found.binding.per == "none" else torch.float32

    def core(
        norm: Norm,
        residual: Tensor | None,
        _: None,
        dtype: torch.dtype = torch.float8_e4m3fn,
        group_size: int | None = MX_COLUMNS,
        column_major: bool = False,
    ) -> Results:
        x, weight, epsilon, offset = norm
        out, summed, options = empty_like(x, dtype), None, gemma(offset)
        scale = scale_buffer(x, 1 if group_size is None else x.shape[-1] // group_size, kind)
        if residual is not None:
            summed = empty_like(x)
            options |= {"residual_in": rows(residual), "residual_out": flat_like(summed)}
        function(
            out=flat_like(out),
            input=rows(x),
            scale=scale,
            weight=vector(weight),
            epsilon=epsilon,
            group_size=group_size or 0,
            shuffle_scale=column_major,
            **options,
        )
        return out, scales_of(scale, x.shape[:-1], column_major), None, summed

    return norms(found, core)


def latents(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_{per_token,group}_quant[_with_norm]` and `mla_dual_rms_norm_...`, by the kernels of two latents."""
    function, keeps_norm = found.function, found.binding.keeps_norm

    def core(
        norm: Norm,
        residual: Tensor | None,
        second: Norm | None,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
    ) -> Results:
        x, weight, epsilon, offset = norm
        out, normed, other, options = empty_like(x, dtype), None, None, gemma(offset)
        # A contiguous buffer is written group by group where `transpose_scale` is set.
        scale = scale_buffer(x, 1 if group_size is None else x.shape[-1] // group_size)
        if group_size is not None:
            options |= {"group_size": group_size, "transpose_scale": column_major}
        if keeps_norm:
            normed = empty_like(x)
            options["q_out_unquantized"] = flat_like(normed)
        if residual is not None:
            other = empty_like(x)
            options |= {"q_residual": rows(residual), "q_res_out": flat_like(other)}
        if second is not None:
            kv, kv_weight, kv_epsilon, _same_offset = second
            other = empty_like(kv)
            options |= {
                "k_out": flat_like(other),
                "k": rows(kv),
                "k_weight": vector(kv_weight),
                "k_epsilon": kv_epsilon,
            }
        function(
            q_out_quantized=flat_like(out),
            q_out_scale=scale,
            q=rows(x),
            q_weight=vector(weight),
            q_epsilon=epsilon,
            **options,
        )
        return out, scales_of(scale, x.shape[:-1], column_major), normed, other

    return norms(found, core)


def triton(found: Resolved) -> Callable[..., Any]:
    """The same over `fused_rms_fp8_group_quant`, for any width.

    One scale per row is one group of a power of two, behind whose columns are zeros.
    """
    run = _triton(found)

    def core(
        norm: Norm,
        residual: Tensor | None,
        second: Norm | None,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
    ) -> Results:
        x = norm[0]
        size = group_size or next_power_of_two(x.shape[-1])
        (out, scales), *others = run(
            norm, residual, second, group_size=size, dtype_quant=dtype, transpose_scale=column_major
        )
        return out.view(x.shape), unpermuted(scales, x.shape[:-1], column_major), *others

    return norms(found, core)


def triton_static(found: Resolved) -> Callable[..., Any]:
    """`{[add_]rms_norm,mla_dual_rms_norm}_static_quant[_with_norm]`, over `fused_rms_fp8_per_tensor_static_quant`."""
    run = _triton(found)

    def core(norm: Norm, residual: Tensor | None, second: Norm | None, scale: Tensor, dtype: torch.dtype) -> Results:
        options = {"inp1_scale": scale, "dtype_quant": dtype, "rmsnorm_convert_to_inp1_type": True}
        out, *others = run(norm, residual, second, **options)
        return out.view(norm[0].shape), None, *others

    return norms(found, core)


def _triton(found: Resolved) -> Callable[..., tuple[Any, Tensor | None, Tensor | None]]:
    """What Triton's two functions have in common: they give the quantised norm, the norm, the second norm, and the sum."""
    function, keeps_norm = found.function, found.binding.keeps_norm

    def run(norm: Norm, residual: Tensor | None, second: Norm | None, **options: Any) -> Any:
        x, weight, epsilon, _ = norm
        other = x
        if second is not None:
            other, kv_weight, kv_epsilon, _ = second
            options |= {"inp2": flat(other), "inp2_weight": dense(kv_weight), "inp2_epsilon": kv_epsilon}
        if residual is not None:
            options["res1"] = flat(residual)
        out, normed, kv_out, summed = function(
            inp1=flat(x),
            inp1_weight=dense(weight),
            inp1_epsilon=epsilon,
            output_unquantized_inp1=keeps_norm,
            **options,
        )
        return out, shaped(normed, x), shaped(summed if second is None else kv_out, other)

    return run
