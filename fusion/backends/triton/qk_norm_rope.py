"""The launch of `qk_norm_rope`, see `family` for what all launches have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from ...declare import PAIRS
from . import launcher, tuning
from .head_kernel import head_norms_rope
from .queries import heads_of, unit_of


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_epsilon: float,
    k_epsilon: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_offset: float,
    k_offset: float,
    pairs: str,
) -> tuple[Tensor, Tensor]:
    """The op of this name, by the kernel."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    q, k = heads_of(q), heads_of(k)
    tokens, q_heads, width = q.shape
    k_heads = k.shape[1]
    if tokens == 0 or q_heads + k_heads == 0:
        return q_out, k_out
    table_rows = min(cos.shape[0], sin.shape[0])
    q_unit, k_unit = unit_of(q), unit_of(k)
    numbers = (
        tokens, q.stride(0) // q_unit, q.stride(1) // q_unit, k.stride(0) // k_unit, k.stride(1) // k_unit,
        table_rows, cos.stride(0), sin.stride(0),
    )  # fmt: skip
    index = cos if positions is None else positions
    every = (q, k, q_weight, k_weight, cos, sin, index, q_out, k_out)
    addresses = tuple([tensor.data_ptr() for tensor in every])
    special = launcher.special(max(numbers), addresses, every)
    step, device = tuning.regime(tokens), q.get_device()
    half = cos.shape[1]
    key = (
        "qk_norm_rope", device, step, q.dtype, q_weight.dtype, k_weight.dtype, cos.dtype, sin.dtype, index.dtype, q_heads,
        k_heads, width, half, q_epsilon, k_epsilon, q_offset, k_offset, q_unit, k_unit, positions is None, pairs, special,
    )  # fmt: skip
    if launcher.again(key, device, addresses, numbers):
        return q_out, k_out
    rows, together, warps = tuning.launch_heads(step, k_heads, width, launcher.wave(q.device))
    rest = tuning.power_of_two(width - 2 * half) if width > 2 * half else 0
    constants = (
        q_heads, k_heads, width, 2 * half, q_epsilon, k_epsilon, q_offset, k_offset, q_unit, k_unit,
        positions is not None, PAIRS.index(pairs), tuning.power_of_two(half), rest, together, rows,
    )  # fmt: skip
    parts = -(-together * q_heads // rows) + -(-together * k_heads // rows)
    launcher.first(head_norms_rope, key, every, numbers, constants, rows=together, sides=parts, warps=warps)
    return q_out, k_out
