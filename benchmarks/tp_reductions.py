"""All-reduces that are not NCCL's, as one opaque op: which of them runs is chosen when it is called or captured.

So a layer is compiled once for all of them. Each takes a tensor as the layer before left it, copies it where peers can read it, and
gives a new one.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from layerfuse.bench.team import PATIENCE, RankError, first, said, team


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


def functional() -> Callable[[Tensor], Tensor]:
    """As DTensor and transformers leave it in a graph; NCCL's on GPUs."""
    c10d, ranks = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def all_reduce(x: Tensor) -> Tensor:
        result: Tensor = c10d.wait_tensor(c10d.all_reduce(x, "sum", ranks))
        return result

    return all_reduce


def _symmetric(like: Tensor) -> Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer: Tensor = symmetric_memory.empty(like.numel(), dtype=like.dtype, device=like.device)
    symmetric_memory.rendezvous(buffer, dist.group.WORLD.group_name)
    return buffer


def _one_shot(like: Tensor) -> Reduction:
    buffer, ranks = _symmetric(like), dist.group.WORLD.group_name

    def reduced(x: Tensor) -> Tensor:
        # Its kernel begins with the copy.
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x.contiguous().view(-1), "sum", ranks)
        return result.view(x.shape)

    return Reduction(reduced)


def _two_shot(like: Tensor) -> Reduction:
    buffer, ranks = _symmetric(like), dist.group.WORLD.group_name

    def reduced(x: Tensor) -> Tensor:
        buffer.copy_(x.reshape(-1))
        result = torch.empty_like(buffer)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", ranks, result)
        return result.view(x.shape)

    return Reduction(reduced)


def _vllm(_like: Tensor) -> Reduction:
    """As `layerfuse bench` sets it up: what a graph reduces is registered once it is captured."""
    from layerfuse.bench import vllm_all_reduce, vllm_peer

    reason = vllm_peer.why_not_loaded(SimpleNamespace(vllm=library[0]))
    if reason is not None:
        raise ValueError(reason)
    found = vllm_all_reduce._communicator()

    def reduced(x: Tensor) -> Tensor:
        x = x.contiguous()
        total = torch.empty_like(x)
        found.reduce(x, total)
        return total

    return Reduction(reduced, found.register_captured)


def _gloo(_like: Tensor) -> Reduction:
    def reduced(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    return Reduction(reduced)


KINDS: dict[str, dict[str, Callable[[Tensor], Reduction]]] = {
    "cuda": {"torch one-shot": _one_shot, "torch two-shot": _two_shot, "vLLM": _vllm},
    "cpu": {"opaque gloo": _gloo},
}
"""By device: what sets one up for tensors like one, on all ranks together."""


def attempt(what: str, function: Callable[[], Any]) -> tuple[Any, str | None]:
    """A call's result, or why it failed on all ranks.

    Raises:
        RankError: it failed on some ranks and not on others, which may now wait for them on their GPUs: nothing can go on.
    """
    result, problem = None, None
    try:
        result = function()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:  # what is tried may fail in any way, and the others wait to hear of it
        traceback.print_exc()
        problem = said(error)
    # Whoever waits on its GPU for a rank that failed does not come here.
    problems = team().gather(problem, PATIENCE if problem is None else PATIENCE / 5)
    reason = first(problems)
    if reason is not None and None in problems:
        raise RankError(f"{what}: {reason}")
    return result, reason


def set_up(like: Tensor, say: Callable[[str], None]) -> dict[str, Reduction]:
    """Those that run here and give the right sum; of the others the reason is said."""
    torch.manual_seed(team().rank)
    part = torch.randn(like.shape, device=like.device).to(like.dtype)
    right = part.clone()
    dist.all_reduce(right)
    found: dict[str, Reduction] = {}

    def checked(kind: str) -> Reduction:
        reduction = KINDS[like.device.type][kind](like)
        for _ in range(3):
            got = reduction.run(part)
        error = float((got.float() - right.float()).norm() / right.float().norm())
        if not error < 0.01:
            raise ValueError(f"its sum is off by {error:.3g}")
        return reduction

    for kind in KINDS[like.device.type]:
        reduction: Any
        if kind == "vLLM" and not library:
            continue
        reduction, reason = attempt(kind, lambda kind=kind: checked(kind))
        if reason is None:
            found[kind] = reduction
        else:
            say(f"  {kind}: not measured: {reason}")
    return found
