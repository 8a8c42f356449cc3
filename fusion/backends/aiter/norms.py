"""The residual add and the norm over AITER's HIP and CK kernels, `aiter.ops.rmsnorm`.

The HIP kernels take the width from dimension 1, so everything is handed over in two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .resolved import Resolved
from .tensors import (
    empty_like,
    flat_like,
    is_gemma,
    packed_rows,
    rows,
    same_shape,
    vector,
)

Pair = tuple[Tensor, Tensor]

HIP_WIDTH = 8192
"""The widest row of AITER's HIP norms. Wider ones, and float32, go through its generic kernels."""


def add_rms_norm(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, float, float], Pair]:
    """`add_rms_norm(x, residual, weight, epsilon, weight_offset) -> (out, residual_out)`.

    residual_out is the rounded sum; out is the norm of the sum before rounding. x: (..., width), and residual like
    it; weight: (width,), of x's dtype; weight_offset: 0, or 1 where the build has `gemma_norm`.

    Raises:
        AiterCallError: an offset the build does not know, or a weight or residual that does not fit.
    """
    name, function = found.binding, found.function
    gemma_known = "gemma_norm" in found.names
    # Up to v0.1.10, and in v0.1.10.post2 again, every width goes through CK: it gets rows without gaps.
    widest_strided = HIP_WIDTH if found.releases.surely_from("v0.1.10.post3") else 0

    def call(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Pair:
        out, residual_out = empty_like(x), empty_like(x)
        same_shape(name, "residual", residual, x)
        if not x.numel():
            return out, residual_out
        strided = x.shape[-1] <= widest_strided and x.dtype != torch.float32
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
