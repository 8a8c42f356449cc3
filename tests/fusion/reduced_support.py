"""What the tests of the fused all-reduce share: the ways in which a graph comes to hold one in front of a residual add."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from stream_support import WIDTH, Norm, stream_spec
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from layerfuse.adapters.specs import Parallel, ResidualSpec

REDUCED = "all_reduce_add_rms_norm"
c10d = torch.ops._c10d_functional


class Over(NamedTuple):
    """The ranks that share a layer."""

    group: str
    mesh: DeviceMesh
    other: str
    "Another group of the same ranks."


def world() -> Over:
    size = dist.get_world_size()
    other = dist.new_group([*range(size)])
    return Over(str(dist.group.WORLD.group_name), init_device_mesh("cpu", (size,)), str(other.group_name))


Join = Callable[[Tensor, Tensor, Over], Tensor]
"""From this rank's part and the residual to the stream after it."""


def reduced(part: Tensor, over: Over, how: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(part, how, over.group))


def functional(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return residual + reduced(part, over)


def the_other_way_round(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return reduced(part, over) + residual


def in_place(part: Tensor, residual: Tensor, _over: Over) -> Tensor:
    part = part * 1
    dist.all_reduce(part)
    return residual + part


def in_place_of_a_view(part: Tensor, residual: Tensor, _over: Over) -> Tensor:
    part = part * 1
    dist.all_reduce(part.view(-1, part.shape[-1]))
    return residual + part


def awaited_later(part: Tensor, residual: Tensor, _over: Over) -> Tensor:
    launched = funcol.all_reduce(part, "sum", dist.group.WORLD)
    return residual * 1 + launched


def flattened(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return residual + reduced(part.view(-1, part.shape[-1]), over).view(residual.shape)


def redistributed(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return residual + DTensor.from_local(part, over.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def routed_and_shared(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    """As transformers' mixtures of experts do it, with two all-reduces."""
    routed = reduced(part.view(-1, part.shape[-1]) * 0.5, over).view(part.shape)
    return residual + (routed + reduced(part.exp(), over))


def three(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    return (reduced(part, over) + reduced(part.sin(), over) + reduced(part.cos(), over)) + residual


def stream_too(part: Tensor, residual: Tensor, over: Over) -> Tensor:
    """As behind a vocabulary-parallel embedding: both sides come from an all-reduce."""
    return reduced(residual, over) + reduced(part, over)


FORMS: dict[str, Join] = {
    each.__name__: each
    for each in (
        functional,
        the_other_way_round,
        in_place,
        in_place_of_a_view,
        awaited_later,
        flattened,
        redistributed,
        routed_and_shared,
        three,
        stream_too,
    )
}
"""What is found."""


class Joined(nn.Module):
    """A layer's end: the sum over the ranks, the residual add and the norm, and what reads it."""

    def __init__(self, join: Join, over: Over, width: int = WIDTH, reads: Callable[[Tensor], Any] = torch.exp) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.join, self.over, self.reads = join, over, reads

    def forward(self, part: Tensor, residual: Tensor) -> Any:
        total = self.join(part, residual, self.over)
        given = self.reads(self.norm(total))
        return (*(given if isinstance(given, tuple) else (given,)), total)


def sharded_spec(size: int = 2, rank: int = 0, **changes: Any) -> ResidualSpec:
    """Of a layer that is sharded by so many ranks."""
    return attrs.evolve(stream_spec(**changes), parallel=Parallel(size=size, rank=rank))


@contextmanager
def one_of_two() -> Iterator[Over]:
    """This process as rank 0 of two, with nobody else: for graphs, whose numbers mean nothing then."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield world()
    finally:
        dist.destroy_process_group()
