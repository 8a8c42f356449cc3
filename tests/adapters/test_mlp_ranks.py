"""Over how many ranks an MLP's result is summed, as its weights tell: real DTensors on meshes of a fake process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from layerfuse.adapters.errors import UnreadableError
from layerfuse.adapters.parallel import ranks_summed


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


class Experts(nn.Module):
    """Their weights, (experts, hidden, columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(8, 16, 16))


def linear(sizes: tuple[int, ...], names: tuple[str, ...], *placements: Shard | Replicate) -> nn.Linear:
    module = nn.Linear(16, 16, bias=False)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, placements))
    return module


def experts(name: str, placement: Shard | Replicate) -> torch.Tensor:
    return distribute_tensor(torch.zeros(8, 16, 16), init_device_mesh("cpu", (8,), mesh_dim_names=(name,)), [placement])


@pytest.mark.parametrize(
    ("part", "ranks"),
    [
        (lambda: nn.Linear(16, 16), 1),
        (lambda: linear((8,), ("tp",), Shard(1)), 8),
        (lambda: linear((8,), ("tp",), Shard(0)), 1),  # gathered, not summed
        (lambda: linear((8,), ("tp",), Replicate()), 1),
        (lambda: linear((2, 4), ("dp", "tp"), Shard(0), Shard(1)), 4),
        (lambda: experts("tp", Shard(2)), 8),
        (lambda: experts("ep", Shard(0)), 8),
        (lambda: experts("ep", Replicate()), 1),
        (lambda: experts("fsdp", Shard(0)), 1),
    ],
)
def test_what_a_weight_tells(part: object, ranks: int) -> None:
    assert ranks_summed(part()) == ranks  # type: ignore[operator]


def test_what_fsdp_cuts_is_not_summed() -> None:
    module = Experts()
    fully_shard(module, mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("world",)))
    with pytest.raises(UnreadableError, match=r"dimensions \('world',\): none is called tp or ep"):
        ranks_summed(module.down_proj)


def test_a_plain_weight_of_experts_tells_nothing() -> None:
    with pytest.raises(UnreadableError, match="tells nothing of its shards"):
        ranks_summed(Experts().down_proj)
