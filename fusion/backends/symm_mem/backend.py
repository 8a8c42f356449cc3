"""Fused all-reduces over symmetric memory as a backend: where they run, and what they refuse."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from ...ops.groups import GroupError, process_group
from ..backend import Backend
from ..triton import refuses_case
from ..triton.tuning import STEPS
from .crossovers import in_words, shots_of, why_never


@frozen(kw_only=True, eq=False)
class SymmMem(Backend):
    """Kernels over symmetric memory. Nothing that is asked here, but for `prepare`, waits for another rank."""

    def runs_on(self, device: str) -> tuple[bool, str]:
        """On NVIDIA GPUs, with Triton and torch's symmetric memory."""
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

    def refuses(self, case: Any) -> str | None:
        """What Triton refuses, or a group that cannot share memory."""
        return refuses_case(case) or _refuses_group(case) or super().refuses(case)

    def prepare(self, case: Any, device: Any) -> str | None:
        """Set the group's workspaces up."""
        from .workspaces import why_not, workspaces_of

        if workspaces_of(case.group, torch.empty((1, case.width), dtype=case.dtype, device=device)):
            return None
        return why_not(case.group) or "the group has no workspace"

    def steps(self, case: Any) -> tuple[int, ...]:
        """Where another form takes over, where programs have to take turns, and behind the last form the steps of the kernel without all-reduce."""
        from .workspaces import ready

        own = {number for workspace in ready(case.group) for number in (workspace.tokens, workspace.layout.resident)}
        return (*STEPS, *sorted(own))

    def settings(self, case: Any) -> str:
        """The crossovers."""
        return in_words(shots_of(case.width, case.dtype.itemsize, process_group(case.group).size()))


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
