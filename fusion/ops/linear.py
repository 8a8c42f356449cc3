"""The references of linears and routed experts with few tokens, in plain torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._library.utils import lookup_op

from ..linear_ops import LARGE as LARGE
from ..linear_ops import MOST as MOST
from ..linear_ops import WIDEST as WIDEST
from .quantisation import quantise, scale_shape

BLOCK = 128
"""Columns that share a scale, and rows of a weight."""


def are_many(x: Tensor, weight: Tensor) -> bool:
    """Whether no kernel for few tokens takes x (..., width) times a weight (columns, width)."""
    return x.shape[:-1].numel() > MOST or len(weight) > WIDEST


def goes_beyond(x: Tensor, weight: Tensor, beyond: str) -> Callable[..., Tensor] | None:
    """What takes this many tokens in the place of a kernel for few; None where they are few, or nothing is named."""
    return op_of(beyond) if beyond and are_many(x, weight) else None


def scales_shape(weight: Tensor) -> tuple[int, int]:
    """Of a weight (columns, width): one per block, the last of which may be short."""
    return scale_shape((-(-weight.shape[0] // BLOCK),), weight.shape[1], BLOCK)  # type: ignore[return-value]


def dequantised(values: Tensor, scales: Tensor, rows: int) -> Tensor:
    """In float32. values (..., M, width), scales (..., M / rows, width / 128); the last rows and columns may be short."""
    wide = scales.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]
    return values.float() * wide.repeat_interleave(rows, -2)[..., : values.shape[-2], :]


def group_quant_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, use_ue8m0: bool, _steady: bool, beyond: str
) -> Tensor:
    """`layerfuse::group_quant_linear`."""
    other = goes_beyond(x, weight, beyond)
    if other is not None:
        return other(x, weight, weight_scale)
    values, scales = quantise(x.reshape(-1, x.shape[-1]).float(), weight.dtype, BLOCK, False, use_ue8m0)
    product = dequantised(values, scales, 1) @ dequantised(weight, weight_scale, BLOCK).t()
    return product.to(x.dtype).view(*x.shape[:-1], len(weight))


def block_scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype, _steady: bool, beyond: str
) -> Tensor:
    """`layerfuse::block_scaled_linear`."""
    other = goes_beyond(x, weight, beyond)
    if other is not None:
        return other(x, x_scale, weight, weight_scale)
    rows = dequantised(x.reshape(-1, x.shape[-1]), x_scale.reshape(-1, x_scale.shape[-1]), 1)
    product = rows @ dequantised(weight, weight_scale, BLOCK).t()
    return product.to(out_dtype).view(*x.shape[:-1], len(weight))


def few_token_linear(x: Tensor, weight: Tensor, bias: Tensor | None, _steady: bool) -> Tensor:
    """`layerfuse::few_token_linear`."""
    return torch.nn.functional.linear(x, weight, bias)


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    _steady: bool,
    beyond: str,
) -> Tensor:
    """`layerfuse::scaled_linear`."""
    other = goes_beyond(x, weight, beyond)
    if other is not None:
        return other(x, x_scale, weight, weight_scale, bias)
    rows = x.reshape(-1, x.shape[-1]).float() * x_scale.reshape(-1, 1)
    product = rows @ (weight.float() * weight_scale.reshape(-1, 1)).t()
    return (product if bias is None else product + bias).to(out_dtype).view(*x.shape[:-1], len(weight))


def block_scaled_experts(
    x: Tensor, x_scale: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, router: Tensor, ids: Tensor,
    out: Tensor, use_ue8m0: bool, _steady: bool,
) -> None:  # fmt: skip
    """`layerfuse::block_scaled_experts`."""
    rows = dequantised(x, x_scale, 1)
    total = torch.zeros(len(x), w2.shape[1], dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(w13):
            chose = ids == expert
            has = chose.any(1)
            gates = rows[has] @ dequantised(w13[expert], w13_scale[expert], BLOCK).t()
            gate, up = gates.to(out.dtype).float().chunk(2, 1)
            product = (torch.nn.functional.silu(gate) * up).to(out.dtype).float()
            values, scales = quantise(product, w2.dtype, BLOCK, False, use_ue8m0)
            result = dequantised(values, scales, 1) @ dequantised(w2[expert], w2_scale[expert], BLOCK).t()
            total[has] += result * router.where(chose, 0).sum(1, keepdim=True)[has]
    out.copy_(total)


@functools.cache
def op_of(name: str) -> Callable[..., Tensor]:
    """What is registered as `namespace::op`.

    Raises:
        AttributeError: nothing is.
    """
    found: Callable[..., Tensor] = lookup_op(name)
    return found


# ---- torch's own products of more tokens


def _scaled_mm(
    dtype: torch.dtype,
    fast: bool,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
) -> Tensor:
    of_columns = weight_scale if weight_scale.numel() == 1 else weight_scale.view(1, -1)
    return torch._scaled_mm(x, weight.t(), x_scale, of_columns, bias, out_dtype=dtype, use_fast_accum=fast)


_LIBRARY = torch.library.Library("layerfuse_torch", "FRAGMENT")


def _scaled(dtype: torch.dtype, fast: bool) -> str:
    name = f"scaled_mm_{str(dtype).removeprefix('torch.')}{'_fast' if fast else ''}"
    _LIBRARY.define(f"{name}(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor")
    _LIBRARY.impl(name, functools.partial(_scaled_mm, dtype, fast), "CompositeExplicitAutograd")
    return f"layerfuse_torch::{name}"


SCALED_MM = {key: _scaled(*key) for key in itertools.product((torch.bfloat16, torch.float16), (False, True))}
"""Dtype of the product, and whether its sums are quick ones -> the op that takes more tokens by torch._scaled_mm."""
