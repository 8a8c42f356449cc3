"""What layerfuse says inside an engine, as tests read it."""

from __future__ import annotations

import pytest

from layerfuse.adapters.errors import counted

PROFILING, FIRST = "profiling run", "first run"
"""The runs that are looked at: of a model that vLLM compiles, and of any other."""


def told(fusion: str, sites: int, run: str = PROFILING, *, called: int | None = None) -> str:
    """The line of a report of a fusion that stands at all of its sites, and is called at each, or so often."""
    calls = sites if called is None else called
    return f"{fusion}: {sites} expected, {sites} fused, 0 missed; called {counted(calls, 'time')} in the {run}"


def missed(fusion: str, sites: int, fused: int = 0, run: str = PROFILING) -> str:
    """The line of one that stands at some of them, or at none, and is called at each of those."""
    return f"{fusion}: {sites} expected, {fused} fused, {sites - fused} missed; called {counted(fused, 'time')} in the {run}"


class Said:
    """What layerfuse has logged, line by line."""

    def __init__(self, caplog: pytest.LogCaptureFixture, engine: str) -> None:
        self._caplog, self._name = caplog, f"{engine}.layerfuse"

    def messages(self) -> list[str]:
        """Each as it was logged."""
        return [record.getMessage() for record in self._caplog.records if record.name == self._name]

    def __call__(self) -> list[str]:
        return [line.strip() for message in self.messages() for line in message.splitlines()]

    def clear(self) -> None:
        """Forget it."""
        self._caplog.clear()

    def new(self) -> list[str]:
        """What was logged since this was asked last."""
        lines = self()
        self.clear()
        return lines
