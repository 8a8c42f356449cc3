"""Routed experts with few tokens, whose products wait for their weights: `block_scaled_experts` beside vLLM's.

Shapes are what one GPU holds of a mixture: fp8 weights in blocks of 128 x 128. Each token chooses different experts at random, as many as the model
says, anew for each call of a CUDA graph, so that no weights are in the L2 cache. Activations come in bfloat16 and are quantised by vLLM's own
kernel for both. The floor is what reading each chosen expert once takes at a copy's speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from few_token_gemm import Calls, compared, copy_speed
from torch import Tensor
from workloads import SAID

from layerfuse.bench.files import save
from layerfuse.fusion import ops
from layerfuse.fusion.ops.linear import block_scaled_experts as reference


class Mixture(NamedTuple):
    """What one GPU holds."""

    experts: int
    choices: int
    width: int
    inner: int


MIXTURES = {name: Mixture(**said) for name, said in SAID["few_token"]["mixtures"].items()}
TOKENS = (1, 2, 4, 8, 16)
CALLS = 16
VLLM, OURS = "vLLM", "layerfuse"


class Held(NamedTuple):
    """Weights and their scales."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


def drawn(mixture: Mixture) -> Held:
    """Random weights: what they are does not change a time."""

    def weights(columns: int, depth: int) -> tuple[Tensor, Tensor]:
        values = torch.empty(mixture.experts, columns, depth, dtype=torch.float8_e4m3fn, device="cuda")
        for each in values:
            each.copy_(torch.randn(columns, depth, device="cuda") * 60)
        scales = torch.rand(mixture.experts, columns // 128, depth // 128, device="cuda") + 0.5
        return values, scales * depth**-0.5 / 60

    return Held(*weights(2 * mixture.inner, mixture.width), *weights(mixture.width, mixture.inner))


def chosen(mixture: Mixture, tokens: int) -> tuple[Tensor, Tensor]:
    """Weights and ids of a router."""
    ids = torch.rand(tokens, mixture.experts, device="cuda").topk(mixture.choices).indices.int()
    return torch.rand(tokens, mixture.choices, device="cuda").softmax(-1), ids


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    found: tuple[Tensor, Tensor] = per_token_group_quant_fp8(x, 128)
    return found


def _rounds() -> bool:
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used())


def _ours(x: Tensor, held: Held, router: Tensor, ids: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ops.block_scaled_experts(*_quantise(x), *held, router, ids, out, use_ue8m0=_rounds(), steady=True)
    return out


def _vllms(held: Held) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    config = fp8_w8a8_moe_quant_config(held.w13_scale, held.w2_scale, block_shape=[128, 128])
    return lambda x, router, ids: fused_experts(x, held.w13, held.w2, router, ids, quant_config=config)


def measured(mixture: Mixture, held: Held, tokens: int, rounds: int, speed: float) -> dict[str, Any]:
    """Entrant -> microseconds and error; the floor."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, mixture.width, device="cuda").bfloat16()
    routes = [chosen(mixture, tokens) for _ in range(CALLS)]
    right = torch.stack([x.double()] * CALLS)
    for result, route in zip(right, routes, strict=True):
        reference(*_quantise(x), *held, *route, result, _rounds(), False)
    many = sum(len(ids.unique()) for _, ids in routes) / CALLS

    def theirs() -> Calls:
        call = _vllms(held)
        return [partial(call, x, *route) for route in routes]

    rows = compared(
        [(VLLM, theirs), (OURS, lambda: [partial(_ours, x, held, *route) for route in routes])], right, rounds
    )
    timed = {name: row for name, row in rows.items() if row.us is not None}
    return {
        "floor": many * mixture.width * mixture.inner * 3 / speed, "experts": many,
        "problems": {name: row.problem for name, row in rows.items() if row.problem},
        "us": {name: row[:3] for name, row in timed.items()}, "error": {name: row.error for name, row in timed.items()},
    }  # fmt: skip


def main() -> int:
    """Time vLLM's kernels and layerfuse's, in microseconds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--mixtures", default="0,1,2", help=f"places in {', '.join(MIXTURES)}")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--limit", type=float, default=150, help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing measured: the kernels take a GPU")
        return 0
    begun, speed, wrong = time.monotonic(), copy_speed(), False
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bytes_per_us": speed, "mixtures": {}}
    print(f"{found['gpu']}: a copy moves {speed / 1e6:.2f} TB/s", flush=True)
    for name in [list(MIXTURES)[int(place)] for place in given.mixtures.split(",")]:
        mixture = MIXTURES[name]
        held = drawn(mixture)
        rows = found["mixtures"][name] = {**mixture._asdict(), "tokens": {}}
        for tokens in map(int, given.tokens.split(",")):
            if time.monotonic() - begun > given.limit:
                print(f"out of time before {name}, {tokens} tokens")
                break
            row = rows["tokens"][tokens] = measured(mixture, held, tokens, given.rounds, speed)
            wrong |= OURS in row["problems"]
            said = ", ".join(f"{entrant} {us:.1f}" for entrant, (us, *_) in row["us"].items())
            errors = ", ".join(f"{each:.4f}" for each in row["error"].values() if each is not None)
            print(
                f"{name}, {tokens} tokens, {row['experts']:.1f} experts: floor {row['floor']:.1f} us; {said}; errors {errors}; {row['problems'] or ''}",
                flush=True,
            )
            if given.out:
                save(given.out, found)
        del held
        torch.cuda.empty_cache()
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
