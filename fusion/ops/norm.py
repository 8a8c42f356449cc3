"""RMSNorm in plain torch, the reference of every norm here: float32 accumulation and one rounding, at the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What is normed, and what it is multiplied by."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a norm of this dtype is computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def normalise_wide(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    """The norm before its one rounding: (..., width) in the accumulator dtype, with x's strides where it can."""
    wide = x.to(accumulator(x.dtype))
    if wide is not x:
        return normalise_over(wide, weight, epsilon, weight_offset)
    return _weighted(wide * _scale(wide, epsilon), weight, weight_offset)


def normalise_over(wide: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    """The norm written over what is normed, which is in the accumulator dtype and nobody else's."""
    return _weighted(wide.mul_(_scale(wide, epsilon)), weight, weight_offset)


def _scale(wide: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon), (..., 1)."""
    # The mean square comes from the vector norm: one pass over x, and no squared copy of it.
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    if _plain_on_cpu(norm):
        return torch.addcmul(_constant(epsilon, norm.dtype), norm, norm, value=1 / wide.shape[-1]).rsqrt_()
    return norm.square_().mul_(1 / wide.shape[-1]).add_(epsilon).rsqrt_()


def _weighted(scaled: Tensor, weight: Tensor, weight_offset: float) -> Tensor:
    return scaled.mul_(weight.to(scaled.dtype) + weight_offset if weight_offset else weight)


def normalise(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    """The reference: `x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)` over the last dimension.

    x: (..., width), any strides; weight: (width,). Returns a contiguous tensor of x's shape and dtype.
    """
    if x.numel() == x.shape[-1] and weight.dtype == x.dtype and not weight_offset and _plain_on_cpu(x):
        return _normalise_row(x, weight, epsilon)
    wide = normalise_wide(x, weight, epsilon, weight_offset)
    return wide.to(x.dtype, memory_format=torch.contiguous_format).contiguous()


def normalise_both(
    q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, *options: float
) -> tuple[Tensor, Tensor]:
    """Of an MLA layer's two latents, each norm by itself: with a way of its own for a single row. `options`: both epsilons, both offsets."""
    return normalise(q, q_weight, *options[::2]), normalise(kv, kv_weight, *options[1::2])


# A call on a CPU tensor takes about a microsecond however small the tensor is; for few rows that is all of the time.


def _plain_on_cpu(x: Tensor) -> bool:
    """Whether this is a real tensor on the CPU, and not one that a tracer follows."""
    return x.device.type == "cpu" and type(x) is Tensor


_constants: dict[tuple[float, torch.dtype], Tensor] = {}


def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor on the CPU, made once."""
    constant = _constants.get((value, dtype))
    if constant is None:
        constant = torch.tensor(value, dtype=dtype)
        if type(constant) is Tensor:
            _constants[value, dtype] = constant
    return constant


def _normalise_row(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The norm of a single row, whose scale is a Python number. addcmul_ multiplies in float32 and rounds once."""
    length = torch.linalg.vector_norm(x, 2, dtype=accumulator(x.dtype)).item()
    shifted = length * length / x.shape[-1] + epsilon
    scale = 1 / math.sqrt(shifted) if shifted else math.inf
    return torch.zeros(x.shape, dtype=x.dtype).addcmul_(x, weight, value=scale)


def normalise_backward(grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, offset: float) -> tuple[Tensor, Tensor]:
    """Gradients of `normalise` with respect to x and weight, computed in the accumulator dtype."""
    wide, grad_wide = x.to(accumulator(x.dtype)), grad.to(accumulator(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    unit = wide * scale
    through = grad_wide * (weight.to(wide.dtype) + offset)
    grad_x = (through - unit * (through * unit).mean(-1, keepdim=True)) * scale
    grad_weight = (grad_wide * unit).reshape(-1, x.shape[-1]).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)
