"""bench/scripts/serving.py: which rounds count."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "bench" / "scripts")
    import serving

    yield serving
    for name in ("serving", "vllm_engine", "workloads"):
        sys.modules.pop(name, None)


@contextlib.contextmanager
def engines(compiled: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    """Two that compile so many kernels in each of their rounds, and none later."""
    asked: list[str] = []

    def ask(arm: str, turn: int) -> dict[str, Any]:
        asked.append(arm)
        several = compiled[arm]
        return {"speed": float(turn), "compiled": several[turn] if turn < len(several) else 0}

    yield {arm: lambda turn, arm=arm: ask(arm, turn) for arm in compiled}
    in_turns = [*reversed(compiled), *compiled]  # the other one first each time
    assert asked[:4] == in_turns[: len(asked)]


def test_a_round_that_compiled_is_none_and_another_follows(serving: Any) -> None:
    given, until = SimpleNamespace(shape="tiny", rounds=2), time.monotonic() + 60
    rounds = serving.in_rounds(given, until, engines({"vllm": [5, 0, 3], "default": [5, 2, 0, 1]}))
    assert [each["speed"] for each in rounds["vllm"]] == [1.0, 2.0, 3.0, 4.0]  # the first is none either
    counted = {arm: [each["speed"] for each in several] for arm, several in serving.counted(rounds).items()}
    assert counted == {"vllm": [1.0, 3.0, 4.0], "default": [2.0, 4.0]}


def test_it_ends_with_its_time(serving: Any) -> None:
    given = SimpleNamespace(shape="tiny", rounds=9)
    rounds = serving.in_rounds(given, time.monotonic() - 1, engines({"vllm": [1] * 9, "default": [1] * 9}))
    assert rounds == {"vllm": [], "default": []}
