"""The residual add and the norm, unquantised: over AITER's HIP and CK kernels, and over Triton's norm that pads.

The HIP kernels take the width from dimension 1, so everything is handed over in two dimensions. Triton's allocate what they return,
and read every stride.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .resolved import Resolved
from .tensors import dense, empty_like, flat, flat_like, is_gemma, no_offset, packed_rows, rows, same_shape, vector

Pair = tuple[Tensor, Tensor]
AddNorm = Callable[[Tensor, Tensor, Tensor, float, float], Pair]

HIP_WIDTH = 8192
"""The widest row of AITER's HIP norms. Wider ones, and float32, go through its generic kernels, which get rows without gaps."""


def add_rms_norm(found: Resolved) -> AddNorm:
    """`add_rms_norm(x, residual, weight, epsilon, weight_offset) -> (out, residual_out)`.

    residual_out is the rounded sum; out is the norm of the sum before rounding. x: (..., width), and residual like
    it; weight: (width,), of x's dtype; weight_offset: 0, or 1 where the build has `gemma_norm`.

    Raises:
        AiterCallError: an offset the build does not know, or a weight or residual that does not fit.
    """
    name, function = found.name, found.function
    gemma_known = "gemma_norm" in found.names

    def call(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Pair:
        out, residual_out = empty_like(x), empty_like(x)
        same_shape(name, "residual", residual, x)
        if not x.numel():
            return out, residual_out
        strided = x.shape[-1] <= HIP_WIDTH and x.dtype != torch.float32
        rows_of = rows if strided else packed_rows
        options = {"gemma_norm": True} if is_gemma(name, weight_offset, gemma_known) else {}
        function(
            out=flat_like(out),
            input=rows_of(x),
            residual_in=rows_of(residual),
            residual_out=flat_like(residual_out),
            weight=vector(name, "weight", weight, x),
            epsilon=epsilon,
            **options,
        )
        return out, residual_out

    return call


def triton_add_rms_norm(found: Resolved) -> AddNorm:
    """The same, over the norm that pads. AITER's Triton `rmsnorm2d_fwd_with_add` is not called: it norms the rounded sum.

    Raises:
        AiterCallError: a weight_offset other than 0, or a residual that is not like x.
    """
    padded = triton_add_rms_norm_pad(found)

    def call(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Pair:
        return padded(x, residual, weight, epsilon, weight_offset, x.shape[-1])

    return call


def triton_add_rms_norm_pad(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, float, float, int], Pair]:
    """`add_rms_norm_pad(x, residual, weight, epsilon, weight_offset, padded_width)`.

    Raises:
        AiterCallError: a weight_offset other than 0, or a residual that is not like x.
    """
    name, function = found.name, found.function

    def call(
        x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float, padded_width: int
    ) -> Pair:
        no_offset(name, weight_offset)
        same_shape(name, "residual", residual, x)
        shape = (*x.shape[:-1], padded_width)
        if not x.numel():
            return torch.zeros(shape, dtype=x.dtype, device=x.device), empty_like(x)
        # The next multiple of the padded width is the padded width.
        out, residual_out = function(
            x=_stepped(x), weight=dense(weight), epsilon=epsilon, res=_stepped(residual), x_pad_to_multiple=padded_width
        )
        return out.view(shape), residual_out.view(x.shape)

    return call


def _stepped(x: Tensor) -> Tensor:
    """Two dimensions with strides above 0: the kernel tells its compiler that they are."""
    two = flat(x)
    return two if 0 not in two.stride() else two.contiguous()
