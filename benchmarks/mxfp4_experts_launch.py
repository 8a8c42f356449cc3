"""How the kernels of `mxfp4_experts` are launched: the layout of their weights, and launches to choose from.

Which launch is the fastest depends on how many tokens there are: more of them read the weights of more experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from mxfp4_experts_kernel import GROUP, expert_mm, sum_parts
from mxfp4_plain import BLOCK
from torch import Tensor

MOST_PAIRS = 1024
"""Every program looks through all pairs of a token and an expert."""
MOST_SCALE = 128
"""Larger ones leave bfloat16's exponent, together with the 126 that makes up for where the codes lie in it."""


class Launch(NamedTuple):
    """Tiles of tokens, of rows of a weight and of their columns, and what Triton calls warps and stages.

    One warp or two: for more, Triton takes instructions whose registers do not hold 4 neighbours of a row.
    """

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


FEW = (
    Launch(8, 32, 256, 2, 4),
    Launch(8, 32, 256, 1, 5),
    Launch(8, 32, 128, 2, 8),
    Launch(8, 16, 256, 1, 6),
    Launch(8, 64, 256, 2, 4),
)
"""Few programs read the weights of few experts: narrow tiles make more of them."""
MANY = (
    Launch(8, 64, 128, 2, 4),
    Launch(8, 64, 256, 2, 3),
    Launch(8, 64, 128, 1, 4),
    Launch(8, 32, 256, 1, 4),
    Launch(16, 64, 128, 2, 4),
)


def launches(pairs: int) -> tuple[Launch, ...]:
    """What is worth trying for so many pairs."""
    return FEW if pairs < 16 else MANY


def packed(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as the kernels read them: (columns, depth / 2) and (columns, blocks), of one expert, both uint8.

    To (columns / 16, blocks, 16, 16) and (columns / 16, blocks, 16), both uint8.

    Raises:
        ValueError: columns that are no multiple of 16, a depth that is none of 32, a scale above 2.
    """
    (columns, half), group = codes.shape, GROUP.value
    if columns % group or half % (BLOCK // 2) or int(scales.max()) > MOST_SCALE:
        raise ValueError(
            f"expected columns in {group}s, a depth in {BLOCK}s and scales up to {MOST_SCALE}; "
            f"got {columns}, {2 * half} and {int(scales.max())}"
        )
    each = torch.stack((codes & 15, codes >> 4), -1).int().view(columns, -1, 2, 4, 2, 2)
    first, second, third, last = each.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
    words = [((code & 8) << 12 | (code & 7) << 6) >> 3 * place for place, code in enumerate((first, second, third))]
    words.append((last & 8) << 11 | (last & 6) << 9 | (last & 1) << 13)
    word = words[0] | words[1] | words[2] | words[3]
    data = torch.stack((word & 255, word >> 8), -1).to(torch.uint8).view(columns // group, group, -1, BLOCK // 2)
    biased = (scales + 126).view(columns // group, group, -1)
    return data.transpose(1, 2).contiguous(), biased.transpose(1, 2).contiguous()


def run(launch: Launch, x: Tensor, ids: Tensor, factors: Tensor, *given: Any) -> Tensor:
    """The op's arguments, but with the weights and scales of all experts `packed`, one behind another; all contiguous.

    Raises:
        ValueError: more pairs than `MOST_PAIRS`, or columns that the launch's tile does not divide.
    """
    gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, alpha, limit = given
    (tokens, hidden), top_k, (experts, columns) = x.shape, ids.shape[1], gate_up_bias.shape
    pairs = tokens * top_k
    if pairs > MOST_PAIRS or hidden % launch.rows or columns % launch.rows:
        raise ValueError(
            f"expected up to {MOST_PAIRS} pairs and columns in {launch.rows}s; got {pairs}, and {columns} and {hidden}"
        )
    inner = x.new_empty((pairs, columns // 2))
    parts = x.new_empty((tokens, top_k, hidden), dtype=torch.float32)
    for source, weight, scales, bias, out in (
        (x, gate_up, gate_up_scales, gate_up_bias, inner),
        (inner, down, down_scales, down_bias, parts),
    ):
        rows = bias.shape[1]
        expert_mm[(rows // launch.rows, min(pairs, experts))](
            source, ids, weight, scales, bias, factors, out, pairs, rows, source.shape[1], alpha, limit,
            top_k=top_k, gated=source is x, by_pair=pairs <= experts, every=triton.next_power_of_2(pairs),
            interpreted=triton.knobs.runtime.interpret, tile_m=launch.tokens, tile_n=launch.rows, tile_k=launch.columns,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    result = torch.empty_like(x)
    sum_parts[(triton.cdiv(hidden, 1024), tokens)](parts, result, hidden, top_k=top_k, tile=1024, num_warps=4)
    return result
