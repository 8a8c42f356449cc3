"""From what is asked for to what can happen in a loaded model, as far as it is the same in all engines."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..adapters.errors import LayerfuseError
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


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter is."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def target_of(module: nn.Module) -> Target:
    """What a module runs on."""
    return Target.named("cpu") if device_of(module).type == "cpu" else Target.detect()
