"""Calls of fused ops, counted by torch's profiler while vLLM's profiling run runs: what was executed, not what was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ...fusion.catalog import FUSIONS

NAMESPACE = "layerfuse::"


def fused_ops() -> dict[str, str]:
    """Every fused op -> the fusion that it belongs to."""
    return {form.op.name: fusion.name for fusion in FUSIONS.values() for form in fusion.forms}


@contextmanager
def counting(into: Counter[str]) -> Iterator[None]:
    """Add the calls of fused ops to a counter, by the op's name."""
    known = fused_ops()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield
    for event in profiled.events():
        name = event.name.removeprefix(NAMESPACE)
        # Under a dispatch mode, as in Inductor's first call of a graph, one call is seen twice, the one inside the other.
        if name != event.name and name in known and not _inside(event, event.name):
            into[name] += 1


def _inside(event: Any, name: str) -> bool:
    outer = event.cpu_parent
    while outer is not None:
        if outer.name == name:
            return True
        outer = outer.cpu_parent
    return False
