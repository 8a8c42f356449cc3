"""The memory that ranks exchange rows through: set up once per process group, device and size of a row, by all ranks together.

Either all ranks have it or none does, and then all know why: a rank that used it alone would wait for ever.
"""

from __future__ import annotations

import importlib
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....adapters.errors import LayerfuseError
from ...ops.groups import process_group
from .crossovers import rows_at_once, shots_of
from .launch import Layout, Workspace


class WorkspaceError(LayerfuseError, RuntimeError):
    """The memory cannot be set up now; the message says what to do first."""


NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
"""Environment variable that torch reads when it sets up symmetric memory. It is 1 while ours is set up, and as it was after that."""

_Key = tuple[torch.device, int, int]
_ready: weakref.WeakKeyDictionary[Any, dict[_Key, tuple[Workspace, ...]]] = weakref.WeakKeyDictionary()
"""Process group -> (device, bytes of a row, bytes of an element) -> what its ranks exchange such rows through, for few rows first."""
_failed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def why_not(group: str) -> str | None:
    """Why the ranks of a group have no symmetric memory, once they have tried; asks no other rank.

    Raises:
        GroupError: no such group.
    """
    return _failed.get(process_group(group))


def workspaces_of(group: str, x: Tensor) -> tuple[Workspace, ...]:
    """The workspaces for rows like those of x, that for the fewest rows first; none where `why_not` may say why.

    The first call sets them up and is collective: all ranks make it, with rows of the same size.

    Raises:
        GroupError: no such group.
        WorkspaceError: the first call comes while a CUDA graph is captured.
    """
    members = process_group(group)
    known, key = _ready.setdefault(members, {}), _key(x)
    if key not in known:
        known[key] = () if members in _failed else _set_up(members, x)
    return known[key]


def ready(group: str) -> tuple[Workspace, ...]:
    """What a group's ranks have set up so far, the same on all of them but for addresses. Asks no other rank.

    Raises:
        GroupError: no such group.
    """
    return tuple(workspace for several in _ready.get(process_group(group), {}).values() for workspace in several)


def _key(x: Tensor) -> _Key:
    return x.device, x.shape[-1] * x.element_size(), x.element_size()


def _set_up(group: dist.ProcessGroup, x: Tensor) -> tuple[Workspace, ...]:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise WorkspaceError(
            f"a fused all-reduce of rows of {x.shape[-1]} {x.dtype} was first called while a CUDA graph is captured, and its "
            "memory is set up by all ranks together; call it once before the capture"
        )
    forms = shots_of(x.shape[-1], x.element_size(), group.size())
    if not forms:
        return ()
    reason = problem(x.device)
    cores = torch.cuda.get_device_properties(x.device).multi_processor_count if reason is None else 0
    told = _told(group, x.device, (reason, socket.gethostname(), cores))
    hosts = sorted({host for _, host, _ in told})
    reason = _first([why for why, _, _ in told]) or (
        f"the group's ranks are on {len(hosts)} hosts ({', '.join(hosts)}), and symmetric memory is one host's"
        if len(hosts) > 1
        else None
    )
    made: list[Workspace] = []
    if reason is None:
        resident, row_bytes = min(number for _, _, number in told), -(-x.shape[-1] * x.element_size() // 16) * 16
        layouts = [
            Layout(
                group.rank(), group.size(), shots, rows_at_once(tokens, row_bytes), row_bytes, x.element_size(), resident
            )
            for shots, tokens in forms
        ]  # fmt: skip
        for layout, (_, tokens) in zip(layouts, forms, strict=True):
            reason, buffer = _by_all(group, x.device, partial(_buffer, layout, x.device))
            if reason is None:
                # All buffers are filled once everybody has answered.
                reason, workspace = _by_all(group, x.device, partial(_joined, group, layout, tokens, buffer))
            if reason is not None:
                break
            made.append(workspace)
    if reason is not None:
        _failed[group] = f"symmetric memory could not be set up: {reason}"
        return ()
    return tuple(made)


def _by_all(group: dist.ProcessGroup, device: torch.device, step: Callable[[], Any]) -> tuple[str | None, Any]:
    """What a step gives here, and why it failed on some rank: then nobody takes the next, in which all wait for all."""
    reason = done = None
    try:
        done = step()
    except Exception as error:  # drivers and torch fail in many ways, and the other ranks wait to hear of it
        reason = f"{type(error).__name__}: {error}"
    return _first(_told(group, device, reason)), done


def _told(group: dist.ProcessGroup, device: torch.device, mine: Any) -> list[Any]:
    """What each rank says, in the order of ranks."""
    every: list[Any] = [None] * group.size()
    # NCCL carries objects over the current device.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        dist.all_gather_object(every, mine, group=group)
    return every


def _first(reasons: list[str | None]) -> str | None:
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)


def problem(device: torch.device) -> str | None:
    """Why this process can have no symmetric memory on a device, before anything is tried."""
    if device.type != "cuda" or torch.version.hip:
        return f"symmetric memory is for NVIDIA GPUs here, and the rows are on {device.type}"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory ({error})"
    return None


def _buffer(layout: Layout, device: torch.device) -> Tensor:
    """This rank's buffer, empty."""
    import torch.distributed._symmetric_memory as symmetric_memory

    with torch.cuda.device(device):
        buffer = symmetric_memory.empty(layout.size, dtype=torch.uint8, device=device).fill_(255)
        torch.cuda.synchronize()
    return buffer


def _joined(group: dist.ProcessGroup, layout: Layout, tokens: int, buffer: Tensor) -> Workspace:
    """This rank's side. Collective."""
    import torch.distributed._symmetric_memory as symmetric_memory

    device = buffer.device
    with torch.cuda.device(device):
        with _without_multicast():
            handle = symmetric_memory.rendezvous(buffer, group.group_name)
        starts = list(handle.buffer_ptrs)
        # The buffer may lie inside a larger allocation, at the same place on all ranks.
        offset = buffer.data_ptr() - starts[layout.rank]
        if any((start + offset) % 16 for start in starts):
            raise WorkspaceError("a buffer does not start on 16 bytes")
        buffers = torch.tensor([start + offset for start in starts], dtype=torch.int64, device=device)
        phases = torch.zeros(layout.most, dtype=torch.int32, device=device)
        ticket = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize()
    return Workspace(layout, tokens, buffers, phases, ticket, (buffer, handle), {})


@contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before
