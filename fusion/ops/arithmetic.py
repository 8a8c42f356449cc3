"""What the references of composed ops are made of: each step of a chain in plain torch, in float32 until it is stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (everybody's name for it)

from .norm import accumulator, normalise_wide
from .quantisation import quantise, quantise_mxfp4, quantise_mxfp8, quantise_static


def _add(x: Tensor, residual: Tensor) -> Tensor:
    return x.to(accumulator(x.dtype)) + residual


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, offset: float, activation: str, norm_before_gate: bool
) -> Tensor:
    """The gated norm of each head, (..., heads, width) in the accumulator dtype: nothing is rounded in between."""
    wide = gate.to(accumulator(gate.dtype))
    factor = F.silu(wide) if activation == "silu" else wide.sigmoid()
    if norm_before_gate:
        return normalise_wide(x, weight, epsilon, offset).mul_(factor)
    return normalise_wide(x * factor, weight, epsilon, offset)


def silu_mul(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`silu(gate) * up` in the accumulator dtype; gate is clamped from above and up on both sides."""
    wide, other = gate.to(accumulator(gate.dtype)), up
    if math.isfinite(limit):
        wide, other = wide.clamp(max=limit), up.to(wide.dtype).clamp(-limit, limit)
    return F.silu(wide).mul_(other)


def _pad(value: Tensor, width: int) -> Tensor:
    return F.pad(value, (0, width - value.shape[-1]))


def _store(value: Tensor, rows: Tensor) -> Tensor:
    return value.to(rows.dtype).contiguous()


REFERENCE: dict[str, Callable[..., Any]] = {
    "_add": _add,
    "_norm": normalise_wide,
    "_gated_norm": gated_norm,
    "_silu_mul": silu_mul,
    "_quantise": quantise,
    "_quantise_static": quantise_static,
    "_quantise_mxfp8": quantise_mxfp8,
    "_quantise_mxfp4": quantise_mxfp4,
    "_pad": _pad,
    "_store": _store,
}
"""As `compose.lines` names them."""
