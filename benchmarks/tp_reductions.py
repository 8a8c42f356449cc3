"""All-reduces that are not NCCL's, as one opaque op: which of them runs is chosen when it is called or captured.

So a layer is compiled once for all of them. Each takes a tensor as the layer before left it, copies it where peers can read it, and
gives a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tp_ranks import Ranks


class Reduction(NamedTuple):
    """An all-reduce that was set up."""

    run: Callable[[Tensor], Tensor]
    captured: Callable[[], None] = lambda: None
    "What all ranks call once a graph with it is captured."


chosen: list[Reduction] = []
"""The one that runs."""
library: list[Path] = []
"""Where vLLM's compiled library is, if it is to be measured."""


@torch.library.custom_op("layerfuse_benchmarks::sum_over_ranks", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """The sum of all ranks' x."""
    return chosen[0].run(x)


@opaque.register_fake
def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def functional(group: str) -> Callable[[Tensor], Tensor]:
    """As DTensor and transformers leave it in a graph; NCCL's on GPUs."""
    c10d = torch.ops._c10d_functional

    def all_reduce(x: Tensor) -> Tensor:
        result: Tensor = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
        return result

    return all_reduce


def _symmetric(like: Tensor, ranks: Ranks) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer: Tensor = symmetric_memory.empty(like.numel(), dtype=like.dtype, device=like.device)
    symmetric_memory.rendezvous(buffer, ranks.group)
    return buffer


def _one_shot(like: Tensor, ranks: Ranks) -> Reduction:
    buffer, group = _symmetric(like, ranks), ranks.group

    def reduced(x: Tensor) -> Tensor:
        # Its kernel begins with the copy.
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.contiguous().view(-1), "sum", group)
        return result.view(x.shape)

    return Reduction(reduced)


def _two_shot(like: Tensor, ranks: Ranks) -> Reduction:
    buffer, group = _symmetric(like, ranks), ranks.group

    def reduced(x: Tensor) -> Tensor:
        buffer.copy_(x.reshape(-1))
        result = torch.empty_like(buffer)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", group, result)
        return result.view(x.shape)

    return Reduction(reduced)


def _vllm(_like: Tensor, ranks: Ranks) -> Reduction:
    """As `layerfuse bench` sets it up: what a graph reduces is registered once it is captured."""
    from layerfuse.bench import team, vllm_all_reduce, vllm_peer

    reason = vllm_peer.why_not_loaded(SimpleNamespace(vllm=library[0]))
    if reason is not None:
        raise ValueError(reason)
    if team.team() is team.ALONE:
        team.join(team.Team(ranks.store, ranks.rank, ranks.size, ranks.device))
    found = vllm_all_reduce._communicator()

    def reduced(x: Tensor) -> Tensor:
        x = x.contiguous()
        total = torch.empty_like(x)
        found.reduce(x, total)
        return total

    return Reduction(reduced, found.register_captured)


def _gloo(_like: Tensor, _ranks: Ranks) -> Reduction:
    def reduced(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    return Reduction(reduced)


KINDS: dict[str, dict[str, Callable[[Tensor, Ranks], Reduction]]] = {
    "cuda": {"torch one-shot": _one_shot, "torch two-shot": _two_shot, "vLLM": _vllm},
    "cpu": {"opaque gloo": _gloo},
}
"""By device: what sets one up for tensors like one, on all ranks together."""


def set_up(ranks: Ranks, like: Tensor) -> dict[str, Reduction]:
    """Those that run here and give the right sum; of the others the reason is printed."""
    torch.manual_seed(ranks.rank)
    part = torch.randn(like.shape, device=like.device).to(like.dtype)
    right = part.clone()
    dist.all_reduce(right)
    found: dict[str, Reduction] = {}

    def checked(kind: str) -> Reduction:
        reduction = KINDS[ranks.device.type][kind](like, ranks)
        for _ in range(3):
            got = reduction.run(part)
        error = float((got.float() - right.float()).norm() / right.float().norm())
        if not error < 0.01:
            raise ValueError(f"its sum is off by {error:.3g}")
        return reduction

    for kind in KINDS[ranks.device.type]:
        reduction: Any
        if kind == "vLLM" and not library:
            continue
        reduction, reason = ranks.attempt(kind, lambda kind=kind: checked(kind))
        if reason is None:
            found[kind] = reduction
        else:
            ranks.say(f"  {kind}: not measured: {reason}")
    return found
