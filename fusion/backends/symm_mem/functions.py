"""The ops that start with an all-reduce: few tokens in one launch, more of them in pieces."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...compose import op_of
from ...declare import GroupName, Op
from ...ops.groups import summed
from ..triton import family
from .launch import launch
from .workspaces import why_not, workspaces_of


def function_of(op: Op) -> Callable[..., Any]:
    """The function that takes the op's arguments by position.

    Up to the workspaces' numbers of tokens it launches the kernel, which sums in float32 in the order of ranks. Beyond that, and
    where the ranks could not set workspaces up, it is NCCL's all-reduce, in NCCL's order and rounded to the dtype of x, and
    the kernel of the op without it.
    """
    place = next(place for place, argument in enumerate(op.args) if isinstance(argument, GroupName))
    rest = op_of(op.name.removeprefix("all_reduce_"), (op.chain or ())[1:])
    behind = family.function_of(rest)

    def function(x: Tensor, *args: Any) -> Any:
        group, others = args[place - 1], args[: place - 1] + args[place:]
        workspaces = workspaces_of(group, x)
        for workspace in workspaces:
            if x.numel() <= workspace.tokens * x.shape[-1]:
                fused = workspace.functions.get(op.name)
                if fused is None:
                    fused = workspace.functions[op.name] = family.function_of(rest, partial(launch, workspace))
                return fused(x, *others)
        if not workspaces:
            _say_why(op.name, group)
        return behind(summed(x, group), *others)

    return function


_said: set[str] = set()


def _say_why(name: str, group: str) -> None:
    reason = why_not(group)
    if reason is not None and reason not in _said:
        _said.add(reason)
        warnings.warn(f"{name} runs as an all-reduce and a kernel behind it: {reason}", RuntimeWarning, stacklevel=3)
