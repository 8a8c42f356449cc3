"""Norms that are not quantised, behind a residual add or of two latents: over AITER's HIP and CK kernels, and over Triton's norm that pads.

The HIP kernels take the width from dimension 1, so everything is handed over in two dimensions. Triton's allocate what they return,
and read every stride.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .table import Resolved
from .tensors import dense, empty_like, flat, flat_like, gemma, packed_rows, rows, vector

Pair = tuple[Tensor, Tensor]
AddNorm = Callable[[Tensor, Tensor, Tensor, float, float], Pair]

HIP_WIDTH = 8192
"""The widest row of AITER's HIP norms. Wider ones, and float32, go through its generic kernels, which get rows without gaps."""


def add_rms_norm(found: Resolved) -> AddNorm:
    """`add_rms_norm(x, residual, weight, epsilon, weight_offset) -> (out, residual_out)`.

    residual_out is the rounded sum; out is the norm of the sum before rounding. x: (..., width), and residual like
    it; weight: (width,), of x's dtype; weight_offset: 0, or 1 where the build has `gemma_norm`.
    """
    function = found.function

    def call(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Pair:
        out, residual_out = empty_like(x), empty_like(x)
        strided = x.shape[-1] <= HIP_WIDTH and x.dtype != torch.float32
        rows_of = rows if strided else packed_rows
        function(
            out=flat_like(out),
            input=rows_of(x),
            residual_in=rows_of(residual),
            residual_out=flat_like(residual_out),
            weight=vector(weight),
            epsilon=epsilon,
            **gemma(weight_offset),
        )
        return out, residual_out

    return call


def dual_rms_norm(found: Resolved) -> Callable[..., Pair]:
    """`mla_dual_rms_norm(q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_weight_offset, kv_weight_offset)`."""
    function = found.function

    def call(*given: Any) -> Pair:
        q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, *_ = given
        q_out, kv_out = empty_like(q), empty_like(kv)
        function(
            q_out=flat_like(q_out),
            q=rows(q),
            q_weight=vector(q_weight),
            q_eps=q_epsilon,
            k_out=flat_like(kv_out),
            k=rows(kv),
            k_weight=vector(kv_weight),
            k_eps=kv_epsilon,
        )
        return q_out, kv_out

    return call


def triton_add_rms_norm(found: Resolved) -> AddNorm:
    """The same, over the norm that pads. AITER's Triton `rmsnorm2d_fwd_with_add` is not called: it norms the rounded sum."""
    padded = triton_add_rms_norm_pad(found)

    def call(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Pair:
        return padded(x, residual, weight, epsilon, weight_offset, x.shape[-1])

    return call


def triton_add_rms_norm_pad(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, float, float, int], Pair]:
    """`add_rms_norm_pad(x, residual, weight, epsilon, weight_offset, padded_width)`."""
    function = found.function

    def call(
        x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, _weight_offset: float, padded_width: int
    ) -> Pair:
        # The next multiple of the padded width is the padded width.
        out, residual_out = function(
            x=_stepped(x), weight=dense(weight), epsilon=epsilon, res=_stepped(residual), x_pad_to_multiple=padded_width
        )
        return out.view(*x.shape[:-1], padded_width), residual_out.view(x.shape)

    return call


def _stepped(x: Tensor) -> Tensor:
    """Two dimensions with strides above 0: the kernel tells its compiler that they are."""
    two = flat(x)
    return two if 0 not in two.stride() else two.contiguous()
