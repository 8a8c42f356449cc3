"""gpt-oss' routed experts at decode as one op, with their weights in MXFP4 as published: what engines run as a fused mixture.

Two Triton kernels multiply each chosen expert with its tokens, bfloat16 by 4 bits, as weight-only kernels on Hopper do. Where
they do not run, transformers' own grouped products do, with weights in bfloat16. The op is opaque to compilers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from mxfp4_plain import BLOCK, dequantised, gated, plain_sum
from torch import Tensor, nn

from layerfuse.bench.timing import Graph, time_graphs

chosen = ["mxfp4"]
"""Which of `KERNELS` runs on a GPU."""
fastest: dict[int, Any] = {}
"""By tokens: the launch of its kernels that `try_out` found."""


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


_kept: dict[tuple[str, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
"""Weights as a kernel reads them, made once as engines do when they load them, by its name and where they lie as published.

Together with the latter, so that nothing else comes to lie there.
"""


def _once(name: str, change: Callable[[Tensor, Tensor], tuple[Tensor, ...]], *several: Tensor) -> tuple[Tensor, ...]:
    key = name, several[0].data_ptr()
    if key not in _kept:
        changed = [change(*one) for one in zip(*several, strict=True)]
        _kept[key] = several, tuple(torch.stack(each) for each in zip(*changed, strict=True))
    return _kept[key][1]


def _mxfp4(x: Tensor, ids: Tensor, factors: Tensor, *given: Any, launch: Any = None) -> Tensor:
    import mxfp4_experts_launch as source

    gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, alpha, limit = given
    launch = launch or fastest.get(len(x)) or source.launches(ids.numel())[0]
    first, second = (_once("mxfp4", source.packed, *both) for both in ((gate_up, gate_up_scales), (down, down_scales)))
    return source.run(launch, x, ids, factors, *first, gate_up_bias, *second, down_bias, alpha, limit)


def _grouped_mm(x: Tensor, ids: Tensor, factors: Tensor, *given: Any) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, alpha, limit = given
    (wide_gate_up,), (wide_down,) = (
        _once("wide", lambda *one: (dequantised(*one).t().contiguous(),), *both)
        for both in ((gate_up, gate_up_scales), (down, down_scales))
    )
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
    function = KERNELS[chosen[0]] if x.is_cuda else plain_sum
    return function(
        x.contiguous(), ids.contiguous(), factors.contiguous(),
        gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, alpha, limit,
    )  # fmt: skip


@expert_sum.register_fake
def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def drawn(experts: Experts, tokens: int, top_k: int) -> list[tuple[Any, ...]]:
    """The op's arguments, several times, with other experts each time: so many that a cache cannot hold their weights."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, experts.down.shape[1], device="cuda", generator=generator).bfloat16()
    several = []
    for _ in range(max(4, 32 // tokens)):
        scores = torch.randn(tokens, experts.gate_up.shape[0], device="cuda", generator=generator).bfloat16()
        factors, ids = scores.topk(top_k)
        several.append((x, ids, factors.softmax(-1), *experts.given()))
    return several


def try_out(experts: Experts, tokens: int, top_k: int) -> dict[str, str | None]:
    """For each kernel, what is wrong with it for so many tokens, on this rank; None: it runs and is right.

    The first that does is the last one tried, and from then on takes the fastest of its launches.
    """
    said: dict[str, str | None] = {}
    calls = drawn(experts, tokens, top_k)
    right = plain_sum(*calls[0]).float()
    for name in KERNELS:
        problems, times = compared(name, calls, right)
        said[name] = None if times else "; ".join(problems)
        if times:
            fastest[tokens] = min(times, key=lambda launch: times[launch])
            break
    return said


def compared(name: str, calls: list[tuple[Any, ...]], right: Tensor) -> tuple[list[str], dict[Any, float]]:
    """What is wrong with some launches of a kernel, and the microseconds of each that is right for the first of the calls."""
    problems, graphs = [], {}
    for launch, function in _variants(name, calls[0][1].numel()):
        try:
            got = function(*calls[0]).float()
            error = float((got - right).norm() / right.norm())
            if error < 0.02:
                graphs[launch] = Graph([partial(function, *call) for call in calls], 1)
            else:
                problems.append(f"{launch}: off by {error:.3g}")
        except Exception as problem:  # whatever this build of torch or Triton cannot do
            problems.append(f"{launch}: {type(problem).__name__}: {str(problem).strip().splitlines()[0][:200]}")
    return problems, {launch: timing.us for launch, timing in time_graphs(graphs, rounds=9).items()}


def _variants(name: str, pairs: int) -> list[tuple[Any, Callable[..., Tensor]]]:
    if name != "mxfp4":
        return [(name, KERNELS[name])]
    from mxfp4_experts_launch import launches

    return [(launch, partial(KERNELS[name], launch=launch)) for launch in launches(pairs)]


def main() -> int:
    """Print what each kernel takes with one of two ranks' part of gpt-oss-120b, and how that compares with a copy."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing measured: the kernels take a GPU")
        return 0
    experts = Experts(128, 2880, 1440, 1.702, 7.0, biased=True, device="cuda", seed=1)
    source, copy = torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda")
    graph = {"copy": Graph([lambda: copy.copy_(source)], 4)}
    speed = 2 * source.numel() / time_graphs(graph, rounds=9)["copy"].us
    print(f"{torch.cuda.get_device_name()}: a copy moves {speed / 1e6:.2f} TB/s")
    each = sum(value[0].nbytes for value in experts.given() if isinstance(value, Tensor))
    wrong = False
    for tokens in map(int, given.tokens.split(",")):
        calls = drawn(experts, tokens, 4)
        right = plain_sum(*calls[0]).float()
        floor = sum(len(call[1].unique()) for call in calls) / len(calls) * each / speed
        print(f"{tokens} tokens: the weights of the chosen experts at that speed: {floor:.1f} us", flush=True)
        for name in given.kernels.split(","):
            problems, times = compared(name, calls, right)
            for launch, us in sorted(times.items(), key=lambda pair: pair[1]):
                print(f"  {us:7.1f} us, {us / floor:5.2f} times that: {name} {launch if launch != name else ''}")
            for problem in problems:
                wrong = True
                print(f"  FAILED: {name} {problem}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
