"""Floor 3: what is done with specs. Planning needs no torch; ops, passes and compile load when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import FusionConfig, FusionConfigError
from .plan import Decision, Plan, plan
from .rules import FUSIONS, Fusion
from .target import Target, UnknownTargetError

if TYPE_CHECKING:
    from .compiler import FusedModel, compile  # noqa: A004 (torch.compile's own name)
    from .passes import MLADualRMSNormPass
    from .report import FusionMissedError, Report

_NEEDS_TORCH = {
    "FusedModel": ".compiler",
    "FusionMissedError": ".report",
    "MLADualRMSNormPass": ".passes",
    "Report": ".report",
    "compile": ".compiler",
}

__all__ = [
    "FUSIONS",
    "Decision",
    "FusedModel",
    "Fusion",
    "FusionConfig",
    "FusionConfigError",
    "FusionMissedError",
    "MLADualRMSNormPass",
    "Plan",
    "Report",
    "Target",
    "UnknownTargetError",
    "compile",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(_NEEDS_TORCH[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
