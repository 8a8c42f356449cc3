"""MXFP4 as published, and gpt-oss' routed experts with such weights in plain torch: what the kernels must agree with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1, by its three lower bits."""
BLOCK = 32


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """(..., columns, depth / 2) to (..., columns, depth) in bfloat16, exactly."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    wide = scales.repeat_interleave(BLOCK, -1)[..., : both.shape[-1]]
    return (table[both.int()] * torch.exp2(wide.float() - 127)).bfloat16()


def gated(product: Tensor, alpha: float, limit: float) -> Tensor:
    """As GptOssExperts gates: (..., 2 * intermediate), gate and up taking turns, to (..., intermediate)."""
    gate, up = product[..., ::2].clamp(max=limit), product[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def plain_sum(x: Tensor, ids: Tensor, factors: Tensor, *given: Any) -> Tensor:
    """Token by token, in float32 but for the rounding in between."""
    gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, alpha, limit = given
    rows = []
    for token, several, weights in zip(x.float(), ids.tolist(), factors.float(), strict=True):
        total = torch.zeros_like(token)
        for expert, factor in zip(several, weights, strict=True):
            product = dequantised(gate_up[expert], gate_up_scales[expert]).float() @ token + gate_up_bias[expert]
            inner = gated(product, alpha, limit).bfloat16().float()
            total += factor * (dequantised(down[expert], down_scales[expert]).float() @ inner + down_bias[expert])
        rows.append(total)
    return torch.stack(rows).to(x.dtype)
