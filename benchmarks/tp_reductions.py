"""All-reduces that are not NCCL's, as one opaque op: which of them runs is chosen when it is called or captured.

So a layer is compiled once for all of them. Each takes a tensor as the layer before left it, copies it where peers can read it, and
gives a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tp_ranks import Ranks

Reduction = Callable[[Tensor], Tensor]
chosen: list[Reduction] = []
"""The one that runs."""


@torch.library.custom_op("layerfuse_benchmarks::sum_over_ranks", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """The sum of all ranks' x."""
    return chosen[0](x)


@opaque.register_fake
def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def functional(group: str) -> Reduction:
    """As DTensor and transformers leave it in a graph; NCCL's on GPUs."""
    c10d = torch.ops._c10d_functional

    def all_reduce(x: Tensor) -> Tensor:
        result: Tensor = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
        return result

    return all_reduce


def _symmetric(like: Tensor, group: str) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer: Tensor = symmetric_memory.empty(like.numel(), dtype=like.dtype, device=like.device)
    symmetric_memory.rendezvous(buffer, group)
    return buffer


def _one_shot(like: Tensor, group: str) -> Reduction:
    buffer = _symmetric(like, group)

    def reduced(x: Tensor) -> Tensor:
        # Its kernel begins with the copy.
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.contiguous().view(-1), "sum", group)
        return result.view(x.shape)

    return reduced


def _two_shot(like: Tensor, group: str) -> Reduction:
    buffer = _symmetric(like, group)

    def reduced(x: Tensor) -> Tensor:
        buffer.copy_(x.reshape(-1))
        result = torch.empty_like(buffer)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", group, result)
        return result.view(x.shape)

    return reduced


def _gloo(_like: Tensor, _group: str) -> Reduction:
    def reduced(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    return reduced


KINDS: dict[str, dict[str, Callable[[Tensor, str], Reduction]]] = {
    "cuda": {"torch one-shot": _one_shot, "torch two-shot": _two_shot},
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
        reduction = KINDS[ranks.device.type][kind](like, ranks.group)
        for _ in range(3):
            got = reduction(part)
        error = float((got.float() - right.float()).norm() / right.float().norm())
        if not error < 0.01:
            raise ValueError(f"its sum is off by {error:.3g}")
        return reduction

    for kind in KINDS[ranks.device.type]:
        reduction: Any
        reduction, reason = ranks.attempt(kind, lambda kind=kind: checked(kind))  # type: ignore[misc]
        if reason is None:
            found[kind] = reduction
        else:
            ranks.say(f"  {kind}: not measured: {reason}")
    return found
