"""How `vllm_arm` steps an engine in which sequences decode beside prompts, with an engine that only counts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "bench" / "scripts"


class Engine:
    """A step gives every request one token."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.steps: list[int] = []

    def add_request(self, name: str, _: Any, sampling: Any) -> None:
        assert name not in self.left
        self.left[name] = sampling.max_tokens

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.steps.append(len(self.left))
        self.left = {name: tokens - 1 for name, tokens in self.left.items()}
        answered = [SimpleNamespace(request_id=name, finished=not tokens) for name, tokens in self.left.items()]
        self.left = {name: tokens for name, tokens in self.left.items() if tokens}
        return answered


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm = ModuleType("vllm")
    vllm.SamplingParams = lambda **given: SimpleNamespace(**given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from vllm_arm import Arm

    made: Any = object.__new__(Arm)
    made.vocabulary, made.beside, made.decoding, made.left = 100, 0, [], 0
    made.llm = SimpleNamespace(llm_engine=Engine())
    yield made
    for name in [name for name, module in sys.modules.items() if str(SCRIPTS) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def test_prompts_are_stepped_beside_sequences_that_decode_and_begin_anew_before_they_end(arm: Any) -> None:
    arm.decode_beside(63)
    engine = arm.llm.llm_engine
    assert len(arm.prompts(2, 8, 3)) == 3 and engine.steps == [63, 65, 65, 65]
    for _ in range(400):
        arm.prompts(2, 8, 5)
    assert {*engine.steps} == {63, 65} and engine.steps.count(63) == 2
    assert len(engine.left) == 63


def test_sequences_that_never_decode_together_are_said(arm: Any) -> None:
    arm.decode_beside(3)
    arm.llm.llm_engine.add_request = lambda *_: None
    with pytest.raises(RuntimeError, match="3 sequences never decoded together"):
        arm.prompts(1, 8, 2)
