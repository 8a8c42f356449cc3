"""Floor 3: fusions from specs. Planning needs no torch; ops, rewriting and compile load when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach
from ..adapters.activation_quant import ActivationQuant, ActivationQuantError
from .catalog import FUSIONS
from .chain import Fusion, FusionError
from .config import FusionConfig, FusionConfigError
from .engine import Engine
from .plan import Decision, Plan, plan
from .sites import Site, sites_of
from .target import Target, UnknownTargetError

if TYPE_CHECKING:
    from .compiler import FusedModel, compile  # noqa: A004 (torch.compile's own name)
    from .recurrences import keep_recurrences
    from .report import FusionMissedError, Report
    from .rewrite import Pipeline

_NEEDS_TORCH = {
    "FusedModel": ".compiler",
    "FusionMissedError": ".report",
    "Pipeline": ".rewrite",
    "Report": ".report",
    "compile": ".compiler",
    "keep_recurrences": ".recurrences",
}

__all__ = [
    "FUSIONS",
    "ActivationQuant",
    "ActivationQuantError",
    "Decision",
    "Engine",
    "FusedModel",
    "Fusion",
    "FusionConfig",
    "FusionConfigError",
    "FusionError",
    "FusionMissedError",
    "Pipeline",
    "Plan",
    "Report",
    "Site",
    "Target",
    "UnknownTargetError",
    "compile",
    "keep_recurrences",
    "plan",
    "sites_of",
]

_getattr, _dir = attach(__name__, {**_NEEDS_TORCH, "metadata": ".metadata"})
__getattr__, __dir__ = _getattr, lambda: sorted({*_dir(), *__all__})
