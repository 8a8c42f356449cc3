"""Where a loaded model is, and what it runs on: asked before anything is planned, and without what plans."""

from __future__ import annotations

import torch
from torch import nn

from ..fusion.target import Target


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first parameter is."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def target_of(module: nn.Module) -> Target:
    """What a module runs on."""
    return Target.named("cpu") if device_of(module).type == "cpu" else Target.detect()
