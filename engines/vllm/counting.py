"""Calls of fused ops, counted by torch's profiler while vLLM's profiling run runs: what was executed, not what was planned."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ...fusion.catalog import FUSIONS

NAMESPACE = "layerfuse::"


def fused_ops() -> dict[str, str]:
    """Every fused op -> the fusion that it belongs to."""
    return {form.op.name: fusion.name for fusion in FUSIONS.values() for form in fusion.forms}


class Counting:
    """Counts from `start` to `stop`."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: the profiler is in use.
        """
        profiled = profile(activities=[ProfilerActivity.CPU])
        profiled.__enter__()
        self._profile = profiled

    def stop(self) -> Counter[str] | None:
        """Calls of fused ops by the op's name; None where counting had not begun."""
        if self._profile is None:
            return None
        self._profile.__exit__(None, None, None)
        known, counts = fused_ops(), Counter[str]()
        for event in self._profile.events():
            name = event.name.removeprefix(NAMESPACE)
            # Under a dispatch mode, as in Inductor's first call of a graph, one call is seen twice, one inside the other.
            if name != event.name and name in known and not _inside(event, event.name):
                counts[name] += 1
        return counts


def _inside(event: Any, name: str) -> bool:
    outer = event.cpu_parent
    while outer is not None:
        if outer.name == name:
            return True
        outer = outer.cpu_parent
    return False
