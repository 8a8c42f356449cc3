"""A measurement in the catalog turns a fusion on where it holds, and nowhere else: in plans, in vLLM, in the docs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pytest
from helpers import ROOT

from layerfuse.adapters import ActivationQuant
from layerfuse.engines.vllm.releases import engine_of
from layerfuse.fusion import FUSIONS, Engine, FusionConfig, FusionError, Plan, Target, plan
from layerfuse.fusion.chain import Faster
from layerfuse.registry import model

ADD, GROUP = "add_rms_norm", "add_rms_norm_group_quant"
FIGURE = "1.06 times faster per decode step (made up)"
SM90 = Target.named("sm90")
BLOCK = FusionConfig(quant=ActivationQuant.parse("group128"))

Measured = Callable[..., None]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Put a measurement of a fusion into the catalog; `alone`: without what the catalog says of it otherwise."""

    def enter(name: str, alone: bool = False, **conditions: Any) -> None:
        entry = Faster(**{"engine": "vllm", "archs": ("sm90",), "figure": FIGURE, **conditions})
        fusions = dict(FUSIONS.items())
        known = fusions[name]
        already, off = ((), {}) if alone else (known.faster_in, known.off_in)
        fusions[name] = attrs.evolve(known, faster_in=(*already, entry), off_in=off)
        monkeypatch.setattr(FUSIONS, "_fusions", fusions)

    return enter


def in_vllm(target: Target = SM90, tp: int = 1, config: FusionConfig | None = None, engine: str = "vllm") -> Plan:
    return plan(model("deepseek-v3").specs(tp=tp), target, config, engine)


def reasons(decisions: Iterable[Any]) -> set[str]:
    return {decision.reason for decision in decisions}


def test_it_is_on_where_it_was_measured_and_the_plan_gives_the_figure(measured: Measured) -> None:
    assert not in_vllm(Target.named("sm75")).expected(ADD)
    measured(ADD, alone=True)
    assert len(in_vllm().expected(ADD)) == 122
    assert all(reason.endswith(f"on sm90; measured {FIGURE}") for reason in reasons(in_vllm().expected(ADD)))


def test_it_is_off_on_other_architectures_and_in_other_engines(measured: Measured) -> None:
    measured(GROUP, alone=True)
    assert in_vllm(config=BLOCK).expected(GROUP)
    for other in (in_vllm(Target.named("sm100"), config=BLOCK), in_vllm(Target.named("gfx950"), config=BLOCK)):
        assert not other.expected(GROUP)
        assert reasons(other.refused(GROUP)) == {
            f"{GROUP} is off in vllm unless switched on: it was measured faster on sm90"
        }
    assert not in_vllm(config=BLOCK, engine="sglang").expected(GROUP)


def test_the_reason_for_being_off_elsewhere_is_the_catalogs_own_where_it_has_one(measured: Measured) -> None:
    measured(ADD)
    (reason,) = reasons(in_vllm(Target.named("sm100")).refused(ADD))
    assert reason.endswith(FUSIONS[ADD].off_in["vllm"])


def test_a_condition_on_the_quantisation_holds_at_such_sites_only(measured: Measured) -> None:
    measured("mla_dual_rms_norm", alone=True, quant="group")
    assert not in_vllm().expected("mla_dual_rms_norm")
    assert not in_vllm(config=FusionConfig(quant=ActivationQuant.parse("per_token"))).expected("mla_dual_rms_norm")
    block = attrs.evolve(BLOCK, switches={"mla_dual_rms_norm_group_quant": False})  # the longer chain is on there
    assert len(in_vllm(config=block).expected("mla_dual_rms_norm")) == 61


def test_a_condition_on_the_ranks_holds_from_there_on(measured: Measured) -> None:
    measured(ADD, alone=True, ranks=2)
    assert not in_vllm(tp=1).expected(ADD)
    assert len(in_vllm(tp=2).expected(ADD)) == len(in_vllm(tp=4).expected(ADD)) == 122


def test_a_measurement_without_what_the_engine_does_itself_holds_where_the_engine_does_not(measured: Measured) -> None:
    """Fused all-reduces were measured in a vLLM without FlashInfer, which takes them where it is installed."""
    measured("add_rms_norm", alone=True, unless="all_reduce_add_rms_norm")
    alone = Engine(name="vllm")
    fusing = Engine(name="vllm", does={"all_reduce_add_rms_norm": "vLLM does it: a pass"})
    specs = model("deepseek-v3").specs(tp=2)
    for name in ("add_rms_norm", "all_reduce_add_rms_norm"):
        assert plan(specs, SM90, None, alone).expected(name) and not plan(specs, SM90, None, fusing).expected(name)
    (reason,) = reasons(plan(specs, SM90, None, fusing).refused("add_rms_norm"))
    assert reason.endswith("it was measured faster on sm90, where vllm does not do all_reduce_add_rms_norm itself")
    assert reasons(plan(specs, SM90, None, fusing).not_applicable("all_reduce_add_rms_norm")) >= {
        "vLLM does it: a pass"
    }


def test_what_was_measured_is_on_whatever_its_level_unless_a_level_is_asked_for(measured: Measured) -> None:
    """The quantisation is the checkpoint's own, and vLLM fuses it by default too."""
    measured(GROUP)
    assert FUSIONS[GROUP].level == 2
    assert in_vllm(config=BLOCK).expected(GROUP)
    asked = attrs.evolve(BLOCK, level=1)
    assert reasons(in_vllm(config=asked).refused(GROUP)) == {
        f"{GROUP} needs optimisation level 2, and FusionConfig sets level 1"
    }
    off = attrs.evolve(BLOCK, switches={GROUP: False})
    assert reasons(in_vllm(config=off).refused(GROUP)) == {f"{GROUP} is switched off by FusionConfig"}


def test_what_was_measured_faster_is_taken_from_what_the_engine_does_itself(measured: Measured) -> None:
    engine = engine_of(["DeepseekV3ForCausalLM"], target=SM90)
    specs = model("deepseek-v3").specs()
    name = "silu_mul_group_quant"
    measured(name, alone=True, archs=("sm100",))
    (reason,) = reasons(plan(specs, SM90, BLOCK, engine).not_applicable(name))
    assert reason.startswith("vLLM does it: its pass ActivationQuantFusionPass")
    measured(name)
    assert not plan(specs, SM90, BLOCK, engine).not_applicable(name)
    assert plan(specs, SM90, BLOCK, engine).expected(name)


def test_a_measurement_holds_where_the_model_was_compiled_as_it_is_here(measured: Measured) -> None:
    specs = model("deepseek-v3").specs()
    compiled = engine_of(["DeepseekV3ForCausalLM"], target=SM90)
    eager = engine_of(["DeepseekV3ForCausalLM"], target=SM90, enforce_eager=True)
    name = "mla_dual_rms_norm"
    measured(name, alone=True)
    assert plan(specs, SM90, None, compiled).expected(name)
    assert not plan(specs, SM90, None, eager).expected(name)
    measured(name, compiled=False, figure="1.2 times faster in eager mode (made up)")
    (reason,) = reasons(plan(specs, SM90, None, eager).expected(name))
    assert reason.endswith("measured 1.2 times faster in eager mode (made up)")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"archs": "sm90"}, r"Faster.archs: expected .* as \('sm90',\), got 'sm90'"),
        ({"archs": ()}, "Faster.archs: expected"),
        ({"figure": " "}, "Faster.figure: expected the measurement in words"),
    ],
)
def test_a_measurement_says_where_and_how_much(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(FusionError, match=says):
        Faster(**{"engine": "vllm", "archs": ("sm90",), "figure": FIGURE, **fields})
    with pytest.raises(FusionError, match="faster_in: expected measurements"):
        attrs.evolve(FUSIONS[ADD], faster_in=("vllm",))


def test_the_table_of_the_docs_follows(measured: Measured) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert not any(FIGURE in line for line in generate.vllm_table())
    measured(GROUP, ranks=2, quant="group")
    row = f"| `{GROUP}` | yes: sm90, where activations are quantised group, from 2 ranks on | {FIGURE} |"
    assert row in list(generate.vllm_table())
