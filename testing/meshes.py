"""Two tensor-parallel ranks in one process: torch's fake process group, which answers every collective itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest


@contextmanager
def rank_of_two(rank: int) -> Iterator[Any]:
    """A device mesh of two ranks with one dimension, `tp`, seen from one of them.

    Raises:
        SkipTest: torch has no distributed build, or this process already belongs to a process group.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise SkipTest("this torch was built without torch.distributed")
    if dist.is_initialized():
        raise SkipTest("this process already belongs to a process group, which must not be replaced")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def sharded_linear(linear: Any, mesh: Any, dim: int) -> Any:
    """The weight of a linear layer as this rank's DTensor, cut in two along one dimension."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    weight = linear.weight
    half = list(weight.shape)
    half[dim] //= 2
    local = torch.empty(half, dtype=weight.dtype, device=weight.device)
    sharded = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=weight.shape, stride=weight.stride())
    return torch.nn.Parameter(sharded, requires_grad=False)


def cuts_of(plan: Mapping[str, str], layer: Any, path: str) -> dict[tuple[str, ...], str]:
    """The projections of a layer that a transformers plan cuts: steps from the layer -> the plan's style.

    `colwise` and `colwise_gather_output` cut the output features, `rowwise` the input features.
    """
    found = {}
    for name, _ in layer.named_modules():
        full = f"{path}.{name}"
        for pattern, style in plan.items():
            matches = re.search(r"(^|\.)" + re.escape(pattern).replace(r"\*", r"\d+") + "$", full)
            if matches and style in ("colwise", "colwise_gather_output", "rowwise"):
                found[tuple(name.split("."))] = style
    return found
