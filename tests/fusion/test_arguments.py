"""Arguments of another type are refused where they are given, and the message says what to give."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fusion_support import mla_spec

from layerfuse import fusion
from layerfuse.adapters import ArgumentError
from layerfuse.fusion import metadata
from layerfuse.fusion.backends import BackendError
from layerfuse.fusion.catalog import UnknownFusionError
from layerfuse.fusion.config import FusionConfigError
from layerfuse.fusion.engine import UnknownFusionEngineError
from layerfuse.fusion.target import UnknownTargetError

CPU = fusion.Target.named("cpu")
SPECS = [("layers.0", mla_spec())]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "gfx950"}, r"target: got 'gfx950'; Target.named"),
        ({"target": None}, "target: got None"),
        ({"config": {"level": 2}}, r"config: .* give FusionConfig"),
        ({"engine": 3}, r"engine: got 3; give one of transformers"),
        ({"specs": mla_spec()}, r"in a list; got MLASpec"),
        ({"specs": 5}, "in a list; got 5"),
        ({"specs": SPECS[0]}, r"pair, got 'layers.0'"),
        ({"specs": [("a", {"num_heads": 3})]}, "pair, got"),
        ({"specs": [("a", "b", "c")]}, "pair, got"),
    ],
)
def test_of_plan(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        fusion.plan(**{"specs": SPECS, "target": CPU, **changes})


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (3, {}, "model: expected a torch.nn.Module"),
        (None, {"strict": "yes"}, "strict: expected True or False"),
        (None, {"target": "gfx950"}, "target: got"),
        (None, {"specs": mla_spec()}, "in a list; got MLASpec"),
    ],
)
def test_of_compile(model: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        fusion.compile(torch.nn.Identity() if model is None else model, **{"specs": SPECS, **changes})


def test_a_backend_that_does_not_exist_is_an_error_before_the_model_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERFUSE_BACKEND", "nosuch")
    with pytest.raises(BackendError, match=r"no op has a backend called 'nosuch'\. Known: aiter, .*reference"):
        fusion.compile(torch.nn.Linear(8, 8), specs=SPECS)


@pytest.mark.parametrize("line", ["add_rms_norm,-add_rms_norm", "-add_rms_norm,+add_rms_norm"])
def test_a_fusion_that_is_both_on_and_off_is_an_error(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERFUSE_FUSIONS", line)
    said = f"LAYERFUSE_FUSIONS={re.escape(line)}: 'add_rms_norm' is both switched on and switched off"
    with pytest.raises(FusionConfigError, match=said):
        fusion.compile(torch.nn.Linear(8, 8), specs=SPECS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(
            ({"strict": "no"}, "strict"),
            ({"switches": ["add_rms_norm"]}, "parse"),
            ({"switches": "-add_rms_norm"}, "parse"),
        ),
        *(({"switches": ("add_rms_norm",)}, "parse"), ({"switches": {3: True}}, "no fusion is called 3")),
        *(
            ({"switches": (("add_rms_norm", True, 1),)}, "parse"),
            ({"switches": {"x" * 10**6: True}}, r"called 'x+\.\.\."),
        ),
        *(({"quant": ("input",)}, "a mapping from roles"), ({"quant": {3: None}}, "no role is called 3")),
        *(({"level": 10**5000}, "level: .* too long"), ({"quant": {"input": 10**5000}}, "ActivationQuant or None")),
    ],
)
def test_of_a_config(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FusionConfigError, match=says):
        fusion.FusionConfig(**changes)


def test_words_that_stand_alone() -> None:
    with pytest.raises(FusionConfigError, match="'none' stands alone"):
        fusion.FusionConfig.parse("none,add_rms_norm")
    with pytest.raises(ArgumentError, match="expected a line such as"):
        fusion.FusionConfig.parse(None)  # type: ignore[arg-type]


def test_of_what_is_asked_of_a_plan_and_a_report() -> None:
    plan = fusion.plan(SPECS, CPU)
    report = fusion.Pipeline(plan).report
    for ask in (plan.expected, plan.fallback, plan.refused, plan.not_applicable, plan.concerns, report.of):
        assert ask("mla_dual_rms_norm") is not None
        with pytest.raises(
            UnknownFusionError, match="no fusion is called 'mla_dual_rms'; did you mean 'mla_dual_rms_norm'"
        ):
            ask("mla_dual_rms")
    assert plan.expected(None) == plan.expected()


@pytest.mark.parametrize("name", [None, 7, b"gfx950", ["sm90"], "sm" + 5000 * "9", "gfx" + 10**6 * "9"], ids=type)
def test_of_a_target_by_name(name: Any) -> None:
    with pytest.raises(UnknownTargetError) as caught:
        fusion.Target.named(name)
    assert str(caught.value).startswith("no target is called ") and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fusion.Target(arch=950, vendor="amd"), "Target.arch: expected a text, got 950"),
        (lambda: fusion.Target(arch="gfx950", vendor=None), "Target.vendor: expected a text, got None"),
        (lambda: fusion.Target(arch="gfx950", vendor="amd", fp8=8), "Target.fp8: expected a text, got 8"),
        (
            lambda: fusion.Target(arch="gfx950", vendor="amd", fp8="e4m3"),
            "Target.fp8: expected None or one of e4m3fn, e4m3fnuz, e5m2, e5m2fnuz, got 'e4m3'; did you mean 'e4m3fn'",
        ),
        (
            lambda: fusion.Engine(name="mine", refuses=3),
            "Engine.refuses: expected a mapping from fusions or roles to reasons",
        ),
        (lambda: fusion.Engine(name="mine", does=3), "Engine.does: expected a mapping"),
        (lambda: fusion.Engine(name="mine", refuses={1: "x"}), "Engine.refuses: expected texts, got 'x' for 1"),
        (lambda: fusion.Engine(name="mine", does={"x": 1}), "Engine.does: expected texts, got 1 for 'x'"),
        (lambda: fusion.Engine(name="mine", keeps={"x": 1}), "Engine.keeps: expected texts, got 1 for 'x'"),
        (lambda: fusion.Pipeline(SPECS), r"plan: expected what fusion.plan\(...\) gives, got \["),
        (
            lambda: metadata.plan_heads(mla_spec(), "gfx942"),
            r"target: expected a Target \(Target.named\('gfx950'\) .* got 'gfx942'",
        ),
        (
            lambda: metadata.plan_metadata(mla_spec(), "gfx942", batch=2),
            r"target: expected a Target \(Target.named\('gfx950'\) .* got 'gfx942'",
        ),
        (lambda: metadata.plan_heads(SPECS, CPU), r"spec: expected the spec of an MLA layer, got \["),
    ],
)
def test_of_targets_engines_and_what_takes_them(call: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        call()
    assert fusion.Target(arch="gfx950", vendor="amd", fp8=None).aiter is None


def test_of_an_engine_by_name() -> None:
    for name in (None, 7, "x" * 10**6):
        with pytest.raises(UnknownFusionEngineError) as caught:
            fusion.Engine.named(name)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 500
