"""Process groups by name, as ops take them: a schema cannot carry a communicator."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...adapters.errors import LayerfuseError, shown


class GroupError(LayerfuseError, LookupError):
    """A name that is no process group here."""


def process_group(name: Any) -> dist.ProcessGroup:
    """The process group of a name.

    Raises:
        GroupError: no group of this process is called that; the message says what to give.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise GroupError("there are no process groups; call torch.distributed.init_process_group(...) first")
    try:
        # What functional collectives resolve names with.
        return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, TypeError, ValueError):
        pass
    raise GroupError(
        f"no process group of this process is called {shown(name)}; give its group_name, as "
        f"torch.distributed.group.WORLD.group_name, which is {dist.group.WORLD.group_name!r}"
    )


def world_size(name: str) -> int:
    """How many ranks a group has.

    Raises:
        GroupError: no such group.
    """
    return int(process_group(name).size())


_OTHERS = {
    **dict.fromkeys(("dp", "data", "replicate", "fsdp", "shard"), "data"),
    **dict.fromkeys(("pp", "pipeline", "pipe", "stage"), "pipeline"),
    **dict.fromkeys(("cp", "dcp", "pcp", "sp", "context", "sequence"), "context"),
}


def other_kind(name: str) -> str | None:
    """`data`, `pipeline` or `context`, where a group's description says that its ranks share that, as `mesh_dp` of a `DeviceMesh` does.

    Raises:
        GroupError: no such group.
    """
    words = re.split(r"[^a-z]+", str(process_group(name).group_desc).lower())
    return (
        None
        if {"tp", "tensor", "model"} & {*words}
        else next((_OTHERS[word] for word in words if word in _OTHERS), None)
    )


def summed(x: Tensor, group: str) -> Tensor:
    """The sum over a group's ranks as its own library gives it: in its order, rounded to the dtype of x."""
    reduced = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group)
    total: Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
    return total
