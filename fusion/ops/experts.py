"""The reference of routed experts with few tokens, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .linear import BLOCK, dequantised
from .quantisation import quantise


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
            product = (functional.silu(gate) * up).to(out.dtype).float()
            values, scales = quantise(product, w2.dtype, BLOCK, False, use_ue8m0)
            result = dequantised(values, scales, 1) @ dequantised(w2[expert], w2_scale[expert], BLOCK).t()
            total[has] += result * router.where(chose, 0).sum(1, keepdim=True)[has]
    out.copy_(total)
