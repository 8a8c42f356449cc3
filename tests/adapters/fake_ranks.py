"""This process as one rank of several, without the others: torch's fake process group, and real device meshes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def ranks(shape: Sequence[int], names: Sequence[str] | None, rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh of these sizes, seen from `rank` of all."""
    size = 1
    for length in shape:
        size *= length
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=None if names is None else tuple(names))
    finally:
        dist.destroy_process_group()


def cut(linear: nn.Linear, mesh: DeviceMesh, *dims: int | None) -> None:
    """Make the weight a DTensor: one dimension of it per mesh dimension, or None where it is replicated."""
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    linear.weight = nn.Parameter(
        distribute_tensor(linear.weight.detach(), mesh, placements, src_data_rank=None), requires_grad=False
    )


def cut_plainly(linear: nn.Linear, size: int, dim: int) -> None:
    """Keep only the first shard of the weight, as loaders without DTensor do; the declared features stay."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim)[0], requires_grad=False)


def with_plan(model: Any, mesh: DeviceMesh) -> Any:
    """The model sharded as transformers shards it: by the plan of its own config, through its own functions."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    return apply_tensor_parallelism(model, mesh, plan)
