"""Floor 3: what is done with specs. Planning needs no torch; ops, passes and compile load when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach
from .activation_quant import ActivationQuant, ActivationQuantError
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
    "ActivationQuant",
    "ActivationQuantError",
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

_getattr, _dir = attach(__name__, {**_NEEDS_TORCH, "metadata": ".metadata"})
__getattr__, __dir__ = _getattr, lambda: sorted({*_dir(), *__all__})
