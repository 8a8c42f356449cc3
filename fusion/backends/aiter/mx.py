"""Norms quantised in blocks of 32 columns with a byte for each scale: MXFP8 over AITER's HIP and Triton kernels, MXFP4 over Triton's.

Triton's round the scales as `ops.quantisation` does. HIP's differ in one thing: a block whose largest magnitude is exactly 448 times a
power of two keeps the scale with which that is 448, and a block of zeros has the scale of 1e-10. HIP's MXFP4, which rounds up, is not called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .resolved import Resolved
from .signatures import Results, one_norm
from .tensors import (
    dense,
    empty_like,
    flat,
    flat_like,
    is_gemma,
    no_offset,
    rows,
    same_shape,
    scale_buffer,
    shaped,
    vector,
)

BLOCK = 32
"""Columns per scale."""


def hip_mxfp8(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_mxfp8_quant`, over `[add_]rmsnorm_quant`, which writes bytes where it is given a buffer of bytes."""
    name, function = found.name, found.function
    gemma_known = "gemma_norm" in found.names

    def core(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, weight_offset: float) -> Results:
        out, summed = empty_like(x, torch.float8_e4m3fn), None if residual is None else empty_like(x)
        if residual is not None:
            same_shape(name, "residual", residual, x)
        if not x.numel():
            return out, _no_scales(x), None, summed
        scale = scale_buffer(x, x.shape[-1] // BLOCK, torch.uint8)
        options: dict[str, Any] = {"gemma_norm": True} if is_gemma(name, weight_offset, gemma_known) else {}
        if residual is not None and summed is not None:
            options |= {"residual_in": rows(residual), "residual_out": flat_like(summed)}
        function(
            out=flat_like(out),
            input=rows(x),
            scale=scale,
            weight=vector(name, "weight", weight, x),
            epsilon=epsilon,
            group_size=BLOCK,
            shuffle_scale=False,
            **options,
        )
        return out, scale.view(*x.shape[:-1], scale.shape[1]), None, summed

    return one_norm(found, core)


def triton_mxfp8(found: Resolved) -> Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]:
    """`rms_norm_mxfp8_quant`, over `fused_rms_mxfp8_quant`.

    Raises:
        AiterCallError: a weight_offset other than 0.
    """
    name, function = found.name, found.function

    def call(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> tuple[Tensor, Tensor]:
        no_offset(name, weight_offset)
        if not x.numel():
            return empty_like(x, torch.float8_e4m3fn), _no_scales(x)
        out, scale = function(x=flat(x), weight=dense(weight), eps=epsilon)
        return out.view(x.shape), scale.view(*x.shape[:-1], scale.shape[1])

    return call


def triton_mxfp4(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_mxfp4_quant[_with_norm]`, over `fused_rms_mxfp4_quant`."""
    name, function, keeps_norm = found.name, found.function, found.binding.keeps_norm

    def core(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, weight_offset: float) -> Results:
        no_offset(name, weight_offset)
        if residual is not None:
            same_shape(name, "residual", residual, x)
        if not x.numel():
            out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
            normed, summed = empty_like(x) if keeps_norm else None, None if residual is None else empty_like(x)
            return out, _no_scales(x), normed, summed
        (out, scale), normed, _second, summed = function(
            x1=rows(x),
            x1_weight=dense(weight),
            x1_epsilon=epsilon,
            res1=None if residual is None else rows(residual),
            output_unquantized_inp1=keeps_norm,
        )
        leading = x.shape[:-1]
        scale = scale.view(*leading, scale.shape[1])
        return out.view(*leading, out.shape[1]), scale, shaped(normed, x), shaped(summed, x)

    return one_norm(found, core)


def _no_scales(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // BLOCK), dtype=torch.uint8, device=x.device)
