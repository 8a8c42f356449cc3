"""What every fusion pass is: a pass for Inductor that is built from a plan, keeps a report, and names itself for caches.

It runs inside `fusion.compile`, and alone in any slot that takes a graph pass: Inductor's
`post_grad_custom_pre_pass`, vLLM's `post_grad_custom_post_pass`.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import attrs
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from ..plan import Plan
from ..report import GraphRecord, Report


@cache
def source_hash() -> str:
    """A hash of this library's rules, passes and ops: what decides which graph comes out."""
    fusion = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(p for folder in (fusion, fusion / "passes", fusion / "ops") for p in folder.glob("*.py")):
        digest.update(path.relative_to(fusion).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def plan_hash(plan: Plan) -> str:
    """A hash of everything in a plan that a pass may act on: specs, decisions, target, config."""
    specs = [(layer, type(spec).__name__, attrs.asdict(spec)) for layer, spec in plan.specs]
    text = json.dumps([plan.to_dict(), specs], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


class FusionPass(CustomGraphPass):  # type: ignore[misc]
    """One fusion, as a graph pass. Picklable: its state is the plan and the report."""

    fusion: ClassVar[str]
    "The fusion's name in `rules.FUSIONS`."

    def __init__(self, plan: Plan, report: Report | None = None) -> None:
        self.plan = plan
        self.report = Report(plan) if report is None else report

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place and add one record to the report."""
        seen = sum(record.fusion == self.fusion for record in self.report.records)
        record = self.rewrite(graph, seen)
        self.report.add(record)

    @abstractmethod
    def rewrite(self, graph: Graph, number: int) -> GraphRecord:
        """Rewrite the graph in place. `number`: graphs this pass has seen before."""

    def uuid(self) -> Any:
        """Changes with the specs, the plan, the config and the source: Inductor's cache key for this pass."""
        return f"{type(self).__name__}-{source_hash()}-{plan_hash(self.plan)}"
