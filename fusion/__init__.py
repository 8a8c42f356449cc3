"""Floor 3: fusions from specs. Planning needs no torch; ops, rewriting and compile load when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..adapters.activation_quant import ActivationQuant, ActivationQuantError
    from .catalog import FUSIONS
    from .chain import Fusion, FusionError
    from .compiler import FusedModel, compile  # noqa: A004 (torch.compile's own name)
    from .config import FusionConfig, FusionConfigError
    from .dynamo_backend import report_of
    from .engine import Engine
    from .planning import Decision, Plan, plan
    from .recurrences import keep_recurrences
    from .report import FusionMissedError, Report
    from .rewrite import Pipeline
    from .shadow import ResultsDifferError
    from .sites import Site, sites_of
    from .target import Target, UnknownTargetError

_WHERE = {
    "..adapters.activation_quant": ("ActivationQuant", "ActivationQuantError"),
    ".catalog": ("FUSIONS",),
    ".chain": ("Fusion", "FusionError"),
    ".compiler": ("FusedModel", "compile"),
    ".config": ("FusionConfig", "FusionConfigError"),
    ".dynamo_backend": ("report_of",),
    ".engine": ("Engine",),
    ".planning": ("Decision", "Plan", "plan"),
    ".recurrences": ("keep_recurrences",),
    ".report": ("FusionMissedError", "Report"),
    ".rewrite": ("Pipeline",),
    ".shadow": ("ResultsDifferError",),
    ".sites": ("Site", "sites_of"),
    ".target": ("Target", "UnknownTargetError"),
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
    "ResultsDifferError",
    "Site",
    "Target",
    "UnknownTargetError",
    "compile",
    "keep_recurrences",
    "plan",
    "report_of",
    "sites_of",
]

__getattr__, __dir__ = attach(
    __name__, {**{name: module for module, names in _WHERE.items() for name in names}, "metadata": ".metadata"}
)
