"""From what is asked for to what can happen in a loaded model, as far as it is the same in all engines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from ..adapters.errors import LayerfuseError
from ..fusion.planning import Decision
from ..fusion.target import Target
from .compiled_module import unfound_lines
from .process import once


class NotFusedError(LayerfuseError, RuntimeError):
    """`strict` is set, and of what is asked for nothing can happen in a model. `fusions` holds a reason for each; empty: for any."""

    def __init__(self, model: str, why: str, fusions: dict[str, str] | None = None) -> None:
        self.model, self.why, self.fusions = model, why, fusions or {}
        super().__init__(model, why, fusions)

    def __str__(self) -> str:
        told = [f"layerfuse is strict, and {line}" for line in unfound_lines(self.model, self.fusions)]
        told = told or [f"layerfuse is strict, and nothing is fused in {self.model}: {self.why}"]
        return "\n".join([*told, "Leave it out of `fusions`, or set `strict` to false, if that is acceptable."])


def nothing(model: nn.Module, why: str, stops: bool = False) -> None:
    """Say once that nothing is fused in a model.

    Raises:
        NotFusedError: it stops the engine.
    """
    if stops:
        raise NotFusedError(type(model).__name__, why)
    once(logging.WARNING, "layerfuse: nothing is fused in %s: %s", type(model).__name__, why)


def why_unfound(name: str, decisions: Iterable[Decision], taken: str | None = None) -> str | None:
    """Why a fusion that is asked for by name can happen at no site of a model, or None where it can.

    Args:
        name: the fusion's.
        decisions: of all plans for the model.
        taken: the reason of a decision at whose site something else does the same.
    """
    of_it = [each for each in decisions if each.fusion == name]
    if any(each.kind in ("expected", "fallback") or each.reason == taken for each in of_it):
        return None
    refused = [each.reason for each in of_it if each.kind == "refused"]
    reasons = Counter(refused or [each.reason for each in of_it])
    return reasons.most_common(1)[0][0] if reasons else "none of its layers has such a chain"


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter is."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def target_of(module: nn.Module) -> Target:
    """What a module runs on."""
    return Target.named("cpu") if device_of(module).type == "cpu" else Target.detect()
