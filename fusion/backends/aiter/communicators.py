"""AITER's communicators: one for each process group and device, made by all ranks together.

A rank that used one alone would wait for the others for ever. So all ranks say what came of it, and none uses one unless
all can, with the same limits.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from ...ops.agreement import patience
from ...ops.groups import process_group
from .. import BackendError, decide_again
from .binding import installed_releases
from .stages import WORLD_SIZES

MODULE = "aiter.dist.device_communicators.custom_all_reduce"

MAX_SIZE = 128 * 1024 * 1024
"""Bytes of AITER's input buffer; it takes three times as much in all. Its default from v0.1.12 on is 1 GiB, of which it
uses 64 MiB: inputs up to half of the buffer, and at most as many."""

LIMITS = ("world_size", "max_size", "_car_max_size", "_car_min_size")
"""What a communicator decides by in a call: unequal values would part the ranks there."""


class CommunicatorError(BackendError):
    """A group that has no communicator of AITER's. `group` is its name, `reason` the sentence, alike on all ranks."""

    def __init__(self, group: str, reason: str) -> None:
        self.group = group
        self.reason = reason
        super().__init__(f"aiter, the communicator of group {group!r}: {reason}")


@frozen(kw_only=True, eq=False)
class _Held:
    """What came of a group: a communicator, or why there is none."""

    of: Any
    "The process group itself: another one may get its name later."
    communicator: Any = None
    reason: str = ""


_held: dict[tuple[str, torch.device], _Held] = {}
_hosts: dict[str, tuple[Any, Any]] = {}
"""Group name -> the group and its sub-group over gloo. Kept as long as the group: torch would call a second one alike, and
its ranks would meet in what is left of the first."""
_lock = threading.RLock()


def communicator(group: str, device: torch.device) -> Any:
    """AITER's `CustomAllreduce` of a group, made when first asked for: by all of its ranks together, outside of captures.

    Args:
        group: the group's name.
        device: this rank's GPU, with its index.

    Raises:
        CommunicatorError: there is none, for the same reason on all ranks, or a CUDA graph is being captured.
        GroupError: no group of this process is called that.
    """
    held = _of(group, device)
    if held.communicator is None:
        raise CommunicatorError(group, held.reason)
    return held.communicator


def ready(group: str, device: torch.device) -> Any:
    """The same for a call of an op; None where there is none, and the backend refuses the next calls."""
    return _of(group, device).communicator


def why_not(group: str) -> str | None:
    """Why a group has no communicator, where that is known already. Asks no other rank, so it may be called anywhere."""
    named = [held for (name, _), held in _held.items() if name == group and _is_current(group, held)]
    return next((held.reason for held in named if held.communicator is None), None)


def close(group: str | None = None) -> None:
    """Give back a group's communicator, or all: AITER's buffers. All ranks do, when none computes.

    CUDA graphs that were captured with it must not be replayed any more. A later call makes another one.
    """
    with _lock:
        for name, device in [key for key in _held if group in (None, key[0])]:
            held = _held.pop((name, device))
            if held.communicator is not None:
                held.communicator.close()
        decide_again()


def _of(group: str, device: torch.device) -> _Held:
    held = _held.get((group, device))
    return held if held is not None and _is_current(group, held) else _make(group, device)


def _is_current(group: str, held: _Held) -> bool:
    return process_group(group) is held.of


def _make(group: str, device: torch.device) -> _Held:
    with _lock:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CommunicatorError(
                group,
                "it cannot be made while a CUDA graph is captured; call the op once before, or communicator(group, device)",
            )
        found = _held[group, device] = _agreed(group, device)
        if found.communicator is None:
            # Whoever was to run on AITER is asked again, and says why not.
            decide_again()
        return found


def _agreed(group: str, device: torch.device) -> _Held:
    """What all ranks make, where all can use theirs; else why not, alike on all ranks."""
    of = process_group(group)
    if of.size() not in WORLD_SIZES:
        return _Held(of=of, reason=f"{of.size()} ranks: AITER's fused all-reduce takes 2, 4 and 8")
    host = _host(group, of)
    # First what needs no other rank: one that failed alone inside of AITER's set-up would leave the others there.
    reason = _difference(_told(host, {"problem": _unimportable(), "AITER": str(installed_releases())}))
    if reason is not None:
        return _Held(of=of, reason=reason)
    made, problem = None, None
    try:
        made = importlib.import_module(MODULE).CustomAllreduce(host, device, MAX_SIZE)
        if made.disabled:
            problem = "AITER has switched its communicator off, and its log says why; it needs the GPUs of one host"
    except Exception as error:  # AITER asserts, and its extension raises anything
        problem = f"{type(error).__name__}: {error}"
    limits = {name: getattr(made, name, None) for name in LIMITS} if problem is None else {}
    reason = _difference(_told(host, {"problem": problem, **limits}))
    if reason is None:
        return _Held(of=of, communicator=made)
    if made is not None and not made.disabled:
        made.close()
    return _Held(of=of, reason=reason)


def _told(host: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says, in the order of the ranks."""
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size(host)
    dist.all_gather_object(everyone, mine, group=host)
    return everyone


def _difference(everyone: list[dict[str, Any]]) -> str | None:
    """What keeps the ranks from going on together, or None."""
    problems = [f"rank {rank}: {said['problem']}" for rank, said in enumerate(everyone) if said["problem"] is not None]
    if problems:
        return "; ".join(problems)
    for name, first in everyone[0].items():
        for rank, said in enumerate(everyone):
            if said[name] != first:
                return f"ranks differ in {name}: rank 0 has {first}, rank {rank} {said[name]}"
    return None


def _unimportable() -> str | None:
    try:
        found = getattr(importlib.import_module(MODULE), "CustomAllreduce", None)
    except (Exception, SystemExit) as error:  # AITER raises RuntimeError, KeyError, OSError and others when imported
        return f"importing {MODULE} raised {type(error).__name__}: {error}"
    return None if found is not None else f"{MODULE} has no CustomAllreduce"


def _host(group: str, of: Any) -> Any:
    """The same ranks over gloo: AITER takes no group of NCCL's."""
    known = _hosts.get(group)
    if known is None or known[0] is not of:
        ranks = dist.get_process_group_ranks(of)
        host = dist.new_group(ranks, timeout=patience(of), backend="gloo", use_local_synchronization=True)
        known = _hosts[group] = (of, host)
    return known[1]
