"""`layerfuse::rms_norm`, the canonical norm: float32 accumulation and one rounding, at the end.

It is what a model may call to be recognised at once; what no pass has taken is lowered back to plain arithmetic.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .library import define

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What is normed, and what it is multiplied by."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a norm of this dtype is computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_norm(op: str, x: Tensor, weight: Tensor, epsilon: float, names: tuple[str, str, str]) -> None:
    """What every backend needs of one norm, checked before anything is launched.

    Raises:
        ValueError: an argument no backend could take; the message names it.
    """
    x_name, weight_name, epsilon_name = names
    if x is None:  # which the dispatcher lets through for the first argument
        raise TypeError(f"{op}: {x_name} must be a tensor, got None")
    if x.dim() < 1:
        raise ValueError(f"{op}: {x_name} needs at least one dimension, got a scalar")
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: {x_name} must be one of {', '.join(map(str, FLOATS))}, got {x.dtype}")
    if x.shape[-1] == 0:
        raise ValueError(f"{op}: {x_name} {tuple(x.shape)} has rows of no columns, of which there is no mean square")
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{op}: {weight_name} must have shape ({x.shape[-1]},), the last dimension of {x_name} "
            f"{tuple(x.shape)}; got {tuple(weight.shape)}"
        )
    if weight.dtype not in FLOATS:
        raise ValueError(f"{op}: {weight_name} must be one of {', '.join(map(str, FLOATS))}, got {weight.dtype}")
    if weight.device != x.device:
        raise ValueError(f"{op}: {weight_name} is on {weight.device}, {x_name} on {x.device}; move one of them")
    if not epsilon >= 0:
        raise ValueError(f"{op}: {epsilon_name} must be at least 0, got {epsilon!r}")


def normalise_wide(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    """The norm before its one rounding: (..., width) in the accumulator dtype, with x's strides where it can."""
    wide = x.to(accumulator(x.dtype))
    # The mean square comes from the vector norm: one pass over x, and no squared copy of it.
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    if _plain_on_cpu(norm):
        scale = torch.addcmul(_constant(epsilon, norm.dtype), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    else:
        scale = norm.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
    factor = weight.to(wide.dtype) + weight_offset if weight_offset else weight
    return (wide * scale if wide is x else wide.mul_(scale)).mul_(factor)


def normalise(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    """The reference: `x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)` over the last dimension.

    x: (..., width), any strides; weight: (width,). Returns a contiguous tensor of x's shape and dtype.
    """
    if x.numel() == x.shape[-1] and weight.dtype == x.dtype and not weight_offset and _plain_on_cpu(x):
        return _normalise_row(x, weight, epsilon)
    wide = normalise_wide(x, weight, epsilon, weight_offset)
    return wide.to(x.dtype, memory_format=torch.contiguous_format).contiguous()


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


class NormCase(NamedTuple):
    """What of a call decides which backend takes it."""

    dtype: torch.dtype
    width: int


def _case(x: Tensor, _weight: Tensor, _epsilon: float, _weight_offset: float) -> NormCase:
    return NormCase(x.dtype, x.shape[-1])


def _check(x: Tensor, weight: Tensor, epsilon: float, _weight_offset: float) -> None:
    check_norm("layerfuse::rms_norm", x, weight, epsilon, ("x", "weight", "epsilon"))


def _fake(x: Tensor, _weight: Tensor, _epsilon: float, _weight_offset: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 (torch passes it by name)
    x, weight, ctx.epsilon, ctx.weight_offset = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return (*normalise_backward(grad, x, weight, ctx.epsilon, ctx.weight_offset), None, None)


_op = define(
    "rms_norm(Tensor x, Tensor weight, float epsilon, float weight_offset) -> Tensor",
    reference=normalise,
    check=_check,
    fake=_fake,
    case=_case,
    backward=_backward,
    setup_context=_setup,
)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    """RMSNorm over the last dimension (arXiv 1910.07467).

    Args:
        x: (..., width), any floating dtype, any strides; zero rows are fine.
        weight: (width,), any floating dtype, on x's device.
        epsilon: added to the mean square, at least 0.
        weight_offset: added to the weight: 1.0 for zero-centred norms.

    Returns:
        A contiguous tensor of x's shape and dtype, rounded once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names the argument.
    """
    result: Tensor = _op(x, weight, epsilon, weight_offset)
    return result
