"""Norms quantised in blocks of 32 columns with a byte for each scale: MXFP8 over AITER's HIP and Triton kernels, MXFP4 over Triton's.

Triton's round the scales as `ops.quantisation` does. HIP's differ in one thing: a block whose largest magnitude is exactly 448 times a
power of two keeps the scale with which that is 448, and a block of zeros has the scale of 1e-10. HIP's MXFP4, which rounds up, is not called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import norm_quant
from .resolved import Resolved
from .signatures import Norm, Results, norms
from .tensors import dense, flat, rows, shaped


def hip_mxfp8(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_mxfp8_quant`."""
    return norm_quant.hip(found)


def triton_mxfp8(found: Resolved) -> Callable[..., Any]:
    """`rms_norm_mxfp8_quant`, over `fused_rms_mxfp8_quant`."""
    function = found.function

    def core(norm: Norm, *_: None) -> Results:
        x, weight, epsilon, _offset = norm
        out, scale = function(x=flat(x), weight=dense(weight), eps=epsilon)
        return out.view(x.shape), scale.view(*x.shape[:-1], -1), None, None

    return norms(found, core)


def triton_mxfp4(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_mxfp4_quant[_with_norm]`, over `fused_rms_mxfp4_quant`."""
    function, keeps_norm = found.function, found.binding.keeps_norm

    def core(norm: Norm, residual: Tensor | None, _second: None) -> Results:
        x, weight, epsilon, _offset = norm
        (out, scale), normed, _, summed = function(
            x1=rows(x),
            x1_weight=dense(weight),
            x1_epsilon=epsilon,
            res1=None if residual is None else rows(residual),
            output_unquantized_inp1=keeps_norm,
        )
        leading = x.shape[:-1]
        return out.view(*leading, -1), scale.view(*leading, -1), shaped(normed, x), shaped(summed, x)

    return norms(found, core)
