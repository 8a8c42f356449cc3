"""The graph passes, and the order in which they run."""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from ..plan import Plan
from ..report import Report
from ..rules import FUSIONS
from .base import FusionPass
from .lower_canonical import LowerCanonicalPass
from .mla_dual_rms_norm import MLADualRMSNormPass
from .mla_dual_rms_norm_quant import MLADualRMSNormGroupQuantPass, MLADualRMSNormPerTokenQuantPass

PIPELINE: tuple[type[FusionPass], ...] = (
    MLADualRMSNormPerTokenQuantPass,
    MLADualRMSNormGroupQuantPass,
    MLADualRMSNormPass,
)
"""The fusions, in order: a fusion comes before the one that it falls back to. `LowerCanonicalPass` runs after them."""


class Pipeline(CustomGraphPass):  # type: ignore[misc]
    """All passes of a plan as one graph pass, sharing one report. Picklable."""

    def __init__(self, plan: Plan, report: Report | None = None) -> None:
        self.plan = plan
        self.report = Report(plan) if report is None else report
        self.passes: tuple[CustomGraphPass, ...] = (
            *(build(plan, self.report) for build in PIPELINE if plan.config.concerns(FUSIONS[build.fusion])),
            LowerCanonicalPass(),
        )

    def __call__(self, graph: Graph) -> None:
        """Run every pass on the graph, in place."""
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        """Changes with the specs, the plan, the config and the source."""
        return tuple(each.uuid() for each in self.passes)


__all__ = [
    "PIPELINE",
    "FusionPass",
    "LowerCanonicalPass",
    "MLADualRMSNormGroupQuantPass",
    "MLADualRMSNormPass",
    "MLADualRMSNormPerTokenQuantPass",
    "Pipeline",
]
