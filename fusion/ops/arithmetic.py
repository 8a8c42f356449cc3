"""What the references of composed ops are made of: each step of a chain in plain torch, in float32 until it is stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (everybody's name for it)

from .groups import world_size
from .norm import accumulator, normalise_over, normalise_wide
from .rope import turn_heads


@frozen(eq=False)
class _Sum:
    """A residual sum on its way through a chain: what is normed, in the accumulator dtype, and what the op returns."""

    wide: Tensor
    stored: Tensor
    "Rounded already, so that the norm may be written over `wide`; `wide` itself where nothing is rounded."


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum over a group's ranks, in the order of the ranks, in the accumulator dtype: not rounded.

    Every rank gathers all parts, so that all get the same bits. A library's all-reduce promises no order and rounds in
    between.
    """
    parts = torch.ops._c10d_functional.all_gather_into_tensor(x.reshape(1, -1), world_size(group), group)
    total = torch.zeros(x.numel(), dtype=accumulator(x.dtype), device=x.device)
    for part in torch.ops._c10d_functional.wait_tensor(parts):
        total += part
    return total.view(x.shape)


def _add(x: Tensor, residual: Tensor) -> _Sum:
    wide = x.to(accumulator(x.dtype))
    if wide is x and x.dtype == residual.dtype:
        total = x + residual
        return _Sum(total, total)
    # Widened here, or the sum of an all-reduce: nobody else reads it.
    wide.add_(residual)
    # Contiguous by name: a single row counts as contiguous whatever its stride, and would keep it.
    return _Sum(wide, wide.to(residual.dtype, memory_format=torch.contiguous_format))


def _wide(x: Tensor | _Sum) -> Tensor:
    return x.wide if isinstance(x, _Sum) else x.to(accumulator(x.dtype))


def _norm(x: Tensor | _Sum, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    if not isinstance(x, _Sum):
        return normalise_wide(x, weight, epsilon, offset)
    function = normalise_wide if x.stored is x.wide else normalise_over
    return function(x.wide, weight, epsilon, offset)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, offset: float, activation: str, norm_before_gate: bool
) -> Tensor:
    """The gated norm of each head, (..., heads, width) in the accumulator dtype: nothing is rounded in between."""
    wide = gate.to(accumulator(gate.dtype))
    factor = F.silu(wide, inplace=wide is not gate) if activation == "silu" else wide.sigmoid()
    if norm_before_gate:
        return normalise_wide(x, weight, epsilon, offset).mul_(factor)
    return normalise_over(factor.mul_(x), weight, epsilon, offset)


def silu_mul(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`silu(gate) * up` in the accumulator dtype; gate is clamped from above and up on both sides."""
    wide, other = gate.to(accumulator(gate.dtype)), up
    if math.isfinite(limit):
        wide, other = wide.clamp(max=limit), up.to(wide.dtype).clamp(-limit, limit)
    return F.silu(wide, inplace=wide is not gate).mul_(other)


def _pad(value: Tensor, width: int) -> Tensor:
    return F.pad(value, (0, width - value.shape[-1]))


def _store(value: Tensor | _Sum, rows: Tensor) -> Tensor:
    if isinstance(value, _Sum):
        return value.stored.contiguous()
    return value.to(rows.dtype, memory_format=torch.contiguous_format).contiguous()


REFERENCE: dict[str, Callable[..., Any]] = {
    "_all_reduce": all_reduce,
    "_add": _add,
    "_wide": _wide,
    "_norm": _norm,
    "_gated_norm": gated_norm,
    "_silu_mul": silu_mul,
    "_rope": turn_heads,
    "_pad": _pad,
    "_store": _store,
}
"""As `compose.lines` names them; what quantises is its format's (`Format.function`)."""
