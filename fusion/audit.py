"""An audit: what ran, counted by torch's profiler, beside what the counters and the plan say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch.profiler import ProfilerActivity, profile

from ..adapters.errors import counted
from .catalog import FUSIONS
from .report import Missed, Report
from .sites import sites_in_words

MOST_CALLS = 3
"""Calls before the counted one, at most: the first compiles, the second may compile for dynamic sizes."""


@frozen(kw_only=True)
class Counted:
    """One fusion in one call."""

    expected: int
    "Sites that the plan expects it at."
    profiled: int
    "Calls of its ops that the profiler saw."
    counted: int
    "Uses that ran fused by the counters of the compiled graphs."


@frozen(kw_only=True)
class Audit:
    """One audited call."""

    fusions: dict[str, Counted]
    missed: Missed
    "Fusion -> site -> why it did not run fused in this call."
    compiled: int = 0
    "Graphs that the counted call compiled: compiling runs ops too, and the profiler sees those."
    nothing: str | None = None
    "Why nothing is in `fusions`, as a sentence."

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences: what was missed, and where profiler and counters disagree. Empty where all is well."""
        while_compiling = (
            f"; the counted call compiled {counted(self.compiled, 'graph')}, as the {MOST_CALLS} before it did "
            "(TORCH_LOGS=recompiles says why), and ops that run while compiling are counted too"
        )
        found = [
            f"{name}: the profiler saw {counted(each.profiled, 'call')} of the op, the counters {each.counted}"
            + (while_compiling if self.compiled else "")
            for name, each in self.fusions.items()
            if each.profiled != each.counted
        ]
        found += [f"{name}: {site}: {why}" for name, sites in self.missed.items() for site, why in sites.items()]
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Whether everything expected ran, by the profiler and by the counters."""
        return not self.problems

    def __str__(self) -> str:
        lines = ["audit of one call:", *([] if self.nothing is None else [f"  {self.nothing}"])]
        for name, each in self.fusions.items():
            lines.append(
                f"  {name}: expected at {sites_in_words(each.expected)}, {each.profiled} by the profiler, "
                f"{each.counted} by the counters"
            )
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


def audit_call(call: Callable[[], Any], report: Report) -> Audit:
    """Call until nothing new is compiled, and count one call.

    Args:
        call: calls the model once and adds the call to the report.
        report: the model's; its plan may be made anew by a call.
    """
    for _ in range(MOST_CALLS):
        graphs = report.graphs
        call()
        if report.graphs == graphs:
            break
    graphs = report.graphs
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    seen = Counter(event.name for event in profiled.events() if event.name.startswith("layerfuse::"))
    if report.last is None:
        raise RuntimeError("the call was not counted")
    last = report.last
    expected = Counter(decision.fusion for decision in report.plan.expected())
    ran = {name: sum(seen[f"layerfuse::{form.op.name}"] for form in fusion.forms) for name, fusion in FUSIONS.items()}
    fusions = {
        name: Counted(expected=expected[name], profiled=ran[name], counted=last.fused(name))
        for name in FUSIONS
        if expected[name] or ran[name] or last.fused(name)
    }
    nothing = None if fusions else report.plan.why_empty or "no fusion is expected: the report says why"
    return Audit(fusions=fusions, missed=last.missed, compiled=report.graphs - graphs, nothing=nothing)
