"""Names that do not exist and words that contradict each other are refused where they are given (other types: `test_wrong_calls`)."""

from __future__ import annotations

import re

import pytest
import torch
from fusion_support import mla_spec

from layerfuse import fusion
from layerfuse.fusion.backends import BackendError
from layerfuse.fusion.catalog import UnknownFusionError
from layerfuse.fusion.config import FusionConfigError

CPU = fusion.Target.named("cpu")
SPECS = [("layers.0", mla_spec())]


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


def test_words_that_stand_alone() -> None:
    for line in ("+all", "-all", "add_rms_norm,+all"):
        with pytest.raises(FusionConfigError, match=r"'all' takes no sign, got '[+-]all'$"):
            fusion.FusionConfig.parse(line)
    with pytest.raises(FusionConfigError, match="'none' stands alone"):
        fusion.FusionConfig.parse("none,add_rms_norm")
    what_to_do = "no line says all but some: write '-mla_decode' for what is on by default without it, or name, without signs, each"
    with pytest.raises(FusionConfigError, match=what_to_do):
        fusion.FusionConfig.parse("all,-mla_decode")
    with pytest.raises(TypeError, match="expected a line such as"):
        fusion.FusionConfig.parse(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line", ["+add_rms_norm -mla_decode", "+ add_rms_norm\t,- mla_decode", " +add_rms_norm  -mla_decode,"]
)
def test_names_that_no_comma_separates(line: str) -> None:
    with pytest.raises(FusionConfigError) as raised:
        fusion.FusionConfig.parse(line)
    good = "+add_rms_norm,-mla_decode"
    assert str(raised.value) == f"FusionConfig.parse: names are separated by commas: write '{good}'"
    assert dict(fusion.FusionConfig.parse(good).switches) == {"add_rms_norm": True, "mla_decode": False}


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
