"""AITER's Triton norms that do not quantise. They allocate what they return, take two dimensions and read every stride."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .resolved import Resolved
from .tensors import dense, empty_like, flat, no_offset, same_shape

Pair = tuple[Tensor, Tensor]


def add_rms_norm(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, float, float], Pair]:
    """`add_rms_norm(x, residual, weight, epsilon, weight_offset)`, over the norm that pads.

    AITER's Triton `rmsnorm2d_fwd_with_add` is not called: it norms the rounded sum.

    Raises:
        AiterCallError: a weight_offset other than 0, or a residual that is not like x.
    """
    padded = add_rms_norm_pad(found)

    def call(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Pair:
        return padded(x, residual, weight, epsilon, weight_offset, x.shape[-1])

    return call


def add_rms_norm_pad(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, float, float, int], Pair]:
    """`add_rms_norm_pad(x, residual, weight, epsilon, weight_offset, padded_width)`.

    Raises:
        AiterCallError: a weight_offset other than 0, or a residual that is not like x.
    """
    name, function = found.binding, found.function

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
