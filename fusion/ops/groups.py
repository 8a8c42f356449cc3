"""Process groups by name, as ops take them: a schema cannot carry a communicator."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...adapters.errors import LayerfuseError


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
        f"no process group of this process is called {name!r}; give its group_name, as "
        f"torch.distributed.group.WORLD.group_name, which is {dist.group.WORLD.group_name!r}"
    )


def world_size(name: str) -> int:
    """How many ranks a group has.

    Raises:
        GroupError: no such group.
    """
    return int(process_group(name).size())


def rank_in(name: str) -> int:
    """This process's rank in a group.

    Raises:
        GroupError: no such group.
    """
    return int(process_group(name).rank())
