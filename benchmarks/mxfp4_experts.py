"""gpt-oss' routed experts at decode as one op, with their weights in MXFP4 as published: what engines run as a fused mixture.

Two Triton kernels multiply each chosen expert with its tokens, bfloat16 by 4 bits, as weight-only kernels on Hopper do. Where
they do not run, transformers' own grouped products do, with weights in bfloat16. The op is opaque to compilers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1, by its three lower bits."""
BLOCK = 32
chosen = ["mxfp4"]
"""Which of `KERNELS` runs on a GPU."""


class Experts(nn.Module):
    """In place of GptOssExperts: random 4-bit weights, which keep the size of a row.

    Args:
        experts: how many there are.
        hidden: columns of a token.
        intermediate: of this rank.
        alpha, limit: of the activation, as GptOssExperts has them.
        biased: whether this rank adds the bias behind the down projection: one of them does.
        device, seed: of the weights.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        alpha: float,
        limit: float,
        *,
        biased: bool,
        device: str,
        seed: int,
    ) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit
        drawn: Any = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}
        for name, columns, depth in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
            codes = torch.randint(0, 256, (experts, columns, depth // 2), dtype=torch.uint8, **drawn)
            # The mean square of the codes is 8.6.
            scale = 127 + round(math.log2((8.6 * depth) ** -0.5))
            shape = experts, columns, -(-depth // BLOCK)
            scales = torch.randint(scale - 1, scale + 1, shape, dtype=torch.uint8, **drawn)
            bias = torch.randn(experts, columns, **drawn).bfloat16() * (biased or name == "gate_up")
            self.register_buffer(name, codes)
            self.register_buffer(f"{name}_scales", scales)
            self.register_buffer(f"{name}_bias", bias)

    def given(self) -> tuple[Any, ...]:
        """What the op takes behind tokens, choice and factors."""
        return (
            self.gate_up, self.gate_up_scales, self.gate_up_bias, self.down, self.down_scales, self.down_bias,
            self.alpha, self.limit,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """(tokens, hidden), (tokens, top_k) twice, to (tokens, hidden): this rank's part of the sum."""
        result: Tensor = expert_sum(hidden_states, router_indices, routing_weights, *self.given())
        return result


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


def _plain(x: Tensor, ids: Tensor, factors: Tensor, *given: Any) -> Tensor:
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


def _mxfp4(x: Tensor, ids: Tensor, factors: Tensor, *given: Any) -> Tensor:
    import triton
    from mxfp4_experts_kernel import expert_mm, group_pairs

    gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, alpha, limit = given
    (tokens, hidden), top_k, experts = x.shape, ids.shape[1], gate_up.shape[0]
    pairs, intermediate = tokens * top_k, gate_up.shape[1] // 2
    order, *groups = (x.new_empty(pairs, dtype=torch.int32) for _ in range(4))
    number = x.new_empty(1, dtype=torch.int32)
    tile = max(16, triton.next_power_of_2(pairs))
    group_pairs[(1,)](ids, order, *groups, number, pairs, tile=tile, part=min(32, tile), num_warps=8)
    inner = x.new_empty((pairs, intermediate))
    parts = x.new_empty((pairs, hidden), dtype=torch.float32)
    # Few programs read the weights of few experts: narrow tiles make more of them.
    tile_n = 32 if pairs < 16 else 64
    for source, weight, scales, bias, out in (
        (x, gate_up, gate_up_scales, gate_up_bias, inner),
        (inner, down, down_scales, down_bias, parts),
    ):
        columns, depth = weight.shape[1], 2 * weight.shape[2]
        grid = (triton.cdiv(columns, tile_n), min(pairs, experts))
        expert_mm[grid](
            source, weight, scales, bias, factors, out, order, *groups, number, columns, depth, scales.shape[2],
            alpha, limit, top_k=top_k, gated=source is x, tile_m=16, tile_n=tile_n, tile_k=128, num_warps=4, num_stages=4,
        )  # fmt: skip
    return parts.view(tokens, top_k, hidden).sum(1, dtype=torch.float32).to(x.dtype)


_wide: dict[int, tuple[Tensor, ...]] = {}


def _grouped_mm(x: Tensor, ids: Tensor, factors: Tensor, *given: Any) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, alpha, limit = given
    if gate_up.data_ptr() not in _wide:
        several = ((gate_up, gate_up_scales), (down, down_scales))
        _wide[gate_up.data_ptr()] = tuple(
            torch.stack([dequantised(*one).t().contiguous() for one in zip(*both, strict=True)]) for both in several
        )
    wide_gate_up, wide_down = _wide[gate_up.data_ptr()]
    module: Any = SimpleNamespace(
        gate_up_proj=wide_gate_up, gate_up_proj_bias=gate_up_bias, down_proj=wide_down, down_proj_bias=down_bias,
        num_experts=gate_up.shape[0], has_gate=True, has_bias=True, is_transposed=True, has_post_expert_norm=False,
        _is_expert_parallel=False, _apply_gate=lambda product: gated(product, alpha, limit),
    )  # fmt: skip
    result: Tensor = grouped_mm_experts_forward(module, x, ids, factors)
    return result


KERNELS: dict[str, Callable[..., Tensor]] = {"mxfp4": _mxfp4, "grouped_mm": _grouped_mm}


@torch.library.custom_op("layerfuse_benchmarks::expert_sum", mutates_args=())
def expert_sum(
    x: Tensor, ids: Tensor, factors: Tensor,
    gate_up: Tensor, gate_up_scales: Tensor, gate_up_bias: Tensor, down: Tensor, down_scales: Tensor, down_bias: Tensor,
    alpha: float, limit: float,
) -> Tensor:  # fmt: skip
    """(tokens, hidden), the experts of each token and their factors, (tokens, top_k) both, to (tokens, hidden)."""
    function = KERNELS[chosen[0]] if x.is_cuda else _plain
    return function(
        x.contiguous(), ids.contiguous(), factors.contiguous(),
        gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, alpha, limit,
    )  # fmt: skip


@expert_sum.register_fake
def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def try_out(experts: Experts, tokens: int, top_k: int) -> dict[str, str | None]:
    """For each kernel, what is wrong with it for so many tokens, on this rank; None: it runs and is right."""
    said: dict[str, str | None] = {}
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, experts.down.shape[1], device="cuda", generator=generator).bfloat16()
    scores = torch.randn(tokens, experts.gate_up.shape[0], device="cuda", generator=generator).bfloat16()
    factors, ids = scores.topk(top_k)
    given = x, ids, factors.softmax(-1), *experts.given()
    right = _plain(*given).float()
    for name, function in KERNELS.items():
        try:
            got = function(*given).float()
            error = float((got - right).norm() / right.norm())
            said[name] = None if error < 0.02 else f"off by {error:.3g}"
        except Exception as problem:  # whatever this build of torch or Triton cannot do
            said[name] = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0][:200]}"
        if said[name] is None:
            break
    return said
