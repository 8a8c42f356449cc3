"""Fused all-reduces over symmetric memory as a backend: where they run, and what they refuse."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from ...declare import Kernel, Op
from ...ops.groups import GroupError, process_group
from .. import Backend, loaded, refusal_of
from ..triton import refuses_case
from ..triton.tuning import STEPS
from .crossovers import in_words, shots_of, why_never


def backend(op: Op, kernel: Kernel) -> Backend:
    """A kernel over symmetric memory as a backend of an op. Nothing that is asked here waits for another rank."""
    own = refusal_of(kernel)

    def refuses(case: Any) -> str | None:
        return refuses_case(case) or _refuses_group(case) or own(case)

    return Backend(
        name="symm_mem",
        op=op.name,
        load=functools.partial(loaded, op, kernel),
        runs_on=_runs_on,
        refuses=refuses,
        prepare=_prepare,
        steps=steps_of,
        settings=_settings,
    )


def _prepare(case: Any, device: Any) -> str | None:
    from .workspaces import why_not, workspaces_of

    if workspaces_of(case.group, torch.empty((1, case.width), dtype=case.dtype, device=device)):
        return None
    return why_not(case.group) or "the group has no workspace"


def steps_of(case: Any) -> tuple[int, ...]:
    """Where another form takes over, where programs have to take turns, and behind the last form the steps of the kernel without all-reduce."""
    from .workspaces import ready

    own = {number for workspace in ready(case.group) for number in (workspace.tokens, workspace.layout.resident)}
    return (*STEPS, *sorted(own))


def _settings(case: Any) -> str:
    ranks = process_group(case.group).size()
    return in_words(shots_of(case.width, case.dtype.itemsize, ranks))


def _runs_on(device: str) -> tuple[bool, str]:
    if device != "cuda" or torch.version.hip:
        where = "AMD GPUs" if device == "cuda" else device
        return False, f"symmetric memory is taken on NVIDIA GPUs, not on {where}"
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed (pip install triton)"
    if not dist.is_available():
        return False, f"torch {torch.__version__} was built without torch.distributed"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return False, f"torch {torch.__version__} has no symmetric memory"
    return True, "each rank writes into its peers' memory, without multicast"


def _refuses_group(case: Any) -> str | None:
    from .workspaces import why_not

    try:
        group = process_group(case.group)
    except GroupError as error:
        return str(error)
    never = why_never(case.width, case.dtype.itemsize, group.size())
    if never is not None:
        return never
    library = dist.get_backend_config(group)
    if "cuda:nccl" not in library:
        return f"the group's backends are {library}; it needs NCCL for CUDA tensors, which takes over beyond few tokens"
    return why_not(case.group)
