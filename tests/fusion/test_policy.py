"""A measurement turns a fusion on where it holds, and nowhere else: in plans, in vLLM, in the docs."""

from __future__ import annotations

import datetime
import json
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import ROOT

from layerfuse.adapters import ActivationQuant
from layerfuse.adapters.errors import ArgumentError
from layerfuse.engines.vllm.releases import engine_of
from layerfuse.fusion import FUSIONS, Engine, FusionConfig, Plan, Target, plan
from layerfuse.fusion.catalog import UnknownFusionError
from layerfuse.fusion.chain import Linear
from layerfuse.fusion.policy import SHIPPED, Measurement, Policy, PolicyError, read_policy, shipped
from layerfuse.registry import model

sys.path.append(str(ROOT / "bench" / "scripts"))

import policy_rows
from vllm_tokens import exceeds

ADD, GROUP, DUAL = "add_rms_norm", "add_rms_norm_group_quant", "mla_dual_rms_norm"
FIGURE = "1.06 times faster per decode step at batch 8 (a model, vLLM 0.1, a GPU)"
SLOWER = "with the fusion a decode step took as long (1.002 times faster per decode step at batch 8; a model, vLLM 0.1, a GPU)"
SM90 = Target.named("sm90")
BLOCK = FusionConfig(quant=ActivationQuant.parse("group128"))


def row(*fusions: str, **conditions: Any) -> Measurement:
    said: dict[str, Any] = {
        "engine": "vllm",
        "release": "0.1",
        "device": "a GPU",
        "arch": "sm90",
        "model": "a model",
        "decode": {"8": (1.06, 1.05, 1.07)},
        "date": datetime.date(2026, 1, 1),
        "commit": "",
        "file": "",
        "stage": "",
        "arm": "",
        **conditions,
    }
    return Measurement(fusions=fusions, **said)


def in_vllm(
    *rows: Measurement, target: Target = SM90, tp: int = 1, config: FusionConfig | None = None, engine: str = "vllm"
) -> Plan:
    return plan(model("deepseek-v3").specs(tp=tp), target, config, engine, Policy(measurement=rows))


def reasons(decisions: Iterable[Any]) -> set[str]:
    return {decision.reason for decision in decisions}


def test_it_is_on_where_it_was_measured_and_the_plan_gives_the_figure() -> None:
    made = in_vllm(row(ADD))
    assert len(made.expected(ADD)) == 122
    assert all(reason.endswith(f"on sm90; measured {FIGURE}") for reason in reasons(made.expected(ADD)))


def test_groups_of_other_columns_are_on_where_they_were_measured_alone() -> None:
    wide, narrow = (FusionConfig(quant=ActivationQuant.parse(f"group{columns}")) for columns in (128, 64))
    rows = row(GROUP), row(GROUP, group=64)
    for known, config, other in ((rows[:1], wide, narrow), (rows[1:], narrow, wide)):
        assert in_vllm(*known, config=config).expected(GROUP)
        assert not in_vllm(*known, config=other).expected(GROUP)
    assert in_vllm(*rows, config=wide).expected(GROUP) and in_vllm(*rows, config=narrow).expected(GROUP)
    (reason,) = reasons(in_vllm(*rows, config=FusionConfig(quant=ActivationQuant.parse("group32"))).refused(GROUP))
    assert reason.endswith(
        "of linears that quantise in groups it was benchmarked with those of 64 and 128 columns alone, and here they have 32"
    )
    plain = row(ADD, group=64)
    assert in_vllm(plain).expected(ADD) and in_vllm(plain, config=narrow).expected(ADD)
    assert not in_vllm(plain, config=wide).expected(ADD)


def test_without_a_measurement_nothing_is_on_in_an_engine() -> None:
    made = in_vllm(config=BLOCK)
    assert made.expected() == ()
    assert f"{ADD} is off in vllm unless switched on: it was not benchmarked in vllm" in reasons(made.refused(ADD))
    assert len(plan(model("deepseek-v3").specs(), SM90, None, "transformers", Policy()).expected(ADD)) == 122


def test_it_is_off_on_other_architectures_and_in_other_engines() -> None:
    assert in_vllm(row(GROUP), config=BLOCK).expected(GROUP)
    for other in ("sm100", "gfx950"):
        made = in_vllm(row(GROUP), target=Target.named(other), config=BLOCK)
        assert not made.expected(GROUP)
        assert reasons(made.refused(GROUP)) == {
            f"{GROUP} is off in vllm unless switched on: it was measured faster on sm90"
        }
    assert not in_vllm(row(GROUP), config=BLOCK, engine="sglang").expected(GROUP)


@pytest.mark.parametrize(
    ("decode", "faster"),
    [
        ({"1": (1.01, 0.995, 1.02)}, True),
        ({"1": (1.0099, 1.0, 1.02)}, False),
        ({"1": (1.2, 1.1, 1.3), "64": (1.0, 0.9949, 1.02)}, False),
    ],
    ids=["both bounds", "gains too little", "slower in a cell"],
)  # fmt: skip
def test_one_cell_is_faster_and_none_is_slower(decode: dict[str, Any], faster: bool) -> None:
    assert row(ADD, decode=decode).faster is faster
    assert bool(in_vllm(row(ADD, decode=decode)).expected(ADD)) is faster


def test_what_gained_nothing_says_so() -> None:
    nothing = row(ADD, decode={"8": (1.002, 1.001, 1.003)}, why="the compiler does it")
    (reason,) = {reason for reason in reasons(in_vllm(nothing).refused(ADD)) if "unless" in reason}
    assert reason == f"{ADD} is off in vllm unless switched on: the compiler does it: {SLOWER}"
    (reason,) = reasons(in_vllm(row(ADD, decode={"8": (0.9, 0.8, 1.0)})).refused(ADD))
    assert "with the fusion a decode step took longer in one cell at least (0.900 times faster" in reason


def test_what_is_faster_and_costs_something_else_is_off_and_says_both() -> None:
    costly = row(ADD, but="prompts take longer")
    assert not costly.faster
    assert f"{ADD} is off in vllm unless switched on: prompts take longer: {FIGURE}" in reasons(
        in_vllm(costly).refused(ADD)
    )


def test_a_condition_on_the_quantisation_holds_at_such_sites_only() -> None:
    name = "mla_dual_rms_norm"
    dual = row(name, quant="group")
    assert not in_vllm(dual).expected(name)
    assert not in_vllm(dual, config=FusionConfig(quant=ActivationQuant.parse("per_token"))).expected(name)
    assert len(in_vllm(dual, config=BLOCK).expected(name)) == 61


def test_a_condition_on_the_ranks_holds_from_there_on() -> None:
    assert not in_vllm(row(ADD, ranks=2), tp=1).expected(ADD)
    assert len(in_vllm(row(ADD, ranks=2), tp=2).expected(ADD)) == 122
    assert len(in_vllm(row(ADD, ranks=2), tp=4).expected(ADD)) == 122


def test_a_measurement_without_what_the_engine_does_itself_holds_where_the_engine_does_not() -> None:
    """Fused all-reduces were measured in a vLLM without FlashInfer, which takes them where it is installed."""
    policy = Policy(measurement=(row(ADD, f"all_reduce_{ADD}", unless=f"all_reduce_{ADD}"),))
    alone = Engine(name="vllm")
    fusing = Engine(name="vllm", does={f"all_reduce_{ADD}": "vLLM does it: a pass"})
    specs = model("deepseek-v3").specs(tp=2)
    for name in (ADD, f"all_reduce_{ADD}"):
        assert plan(specs, SM90, None, alone, policy).decisions != plan(specs, SM90, None, fusing, policy).decisions
        assert not plan(specs, SM90, None, fusing, policy).expected(name)
    assert plan(specs, SM90, None, alone, policy).expected(f"all_reduce_{ADD}")
    (reason,) = reasons(plan(specs, SM90, None, fusing, policy).refused(ADD))
    assert reason.endswith(
        f": vLLM does all_reduce_{ADD} itself here; it was measured faster on sm90, where vLLM does not do all_reduce_{ADD} itself"
    )
    assert reasons(plan(specs, SM90, None, fusing, policy).not_applicable(f"all_reduce_{ADD}")) >= {
        "vLLM does it: a pass"
    }


def test_what_was_measured_is_on_whatever_its_level_unless_a_level_is_asked_for() -> None:
    """The quantisation is the checkpoint's own, and vLLM fuses it by default too."""
    assert FUSIONS[GROUP].level == 2
    assert in_vllm(row(GROUP), config=BLOCK).expected(GROUP)
    asked = attrs.evolve(BLOCK, level=1)
    assert reasons(in_vllm(row(GROUP), config=asked).refused(GROUP)) == {
        f"{GROUP} needs optimisation level 2, and FusionConfig sets level 1"
    }
    off = attrs.evolve(BLOCK, switches={GROUP: False})
    assert reasons(in_vllm(row(GROUP), config=off).refused(GROUP)) == {f"{GROUP} is switched off by FusionConfig"}


def test_what_was_measured_faster_is_taken_from_what_the_engine_does_itself() -> None:
    engine = engine_of(["DeepseekV3ForCausalLM"], target=SM90)
    specs = [each for each in model("deepseek-v3").specs() if "shared_experts" not in each[0]]
    name = "silu_mul_group_quant"
    (reason,) = reasons(
        plan(specs, SM90, BLOCK, engine, Policy(measurement=(row(name, arch="sm100"),))).not_applicable(name)
    )
    assert reason.startswith("vLLM does it: its pass ActivationQuantFusionPass")
    made = plan(specs, SM90, BLOCK, engine, Policy(measurement=(row(name),)))
    assert made.expected(name) and not made.not_applicable(name)


def test_a_measurement_holds_where_the_model_was_compiled_as_it_is_here() -> None:
    specs = model("deepseek-v3").specs()
    compiled = engine_of(["DeepseekV3ForCausalLM"], target=SM90)
    eager = engine_of(["DeepseekV3ForCausalLM"], target=SM90, enforce_eager=True)
    name = "mla_dual_rms_norm"
    captured = attrs.evolve(eager, captures=True)
    for here, there, holds in ((compiled, captured, True), (captured, compiled, False)):
        policy = Policy(measurement=(row(name, compiled=holds),))
        assert plan(specs, SM90, None, here, policy).expected(name)
        assert not plan(specs, SM90, None, there, policy).expected(name)


def test_what_was_measured_in_cuda_graphs_is_off_where_an_engine_captures_none() -> None:
    specs, name = model("deepseek-v3").specs(), "mla_dual_rms_norm"
    eager = engine_of(["DeepseekV3ForCausalLM"], target=SM90, enforce_eager=True)
    policy = Policy(measurement=(row(name, compiled=False),))
    made = plan(specs, SM90, None, eager, policy)
    assert not made.expected(name)
    (why,) = reasons(each for each in made.decisions if each.fusion == name)
    assert why.endswith("it was measured in CUDA graphs, and vLLM captures none here")


def test_a_plan_quotes_what_layers_of_a_kind_gained() -> None:
    engine = engine_of(["DeepseekV3ForCausalLM"], target=SM90)
    name = "mla_dual_rms_norm"
    policy = Policy(
        measurement=tuple(row(name, model=kind, mixtures=kind == "mixtures") for kind in ("dense", "mixtures"))
    )
    made = plan(model("deepseek-v3").specs(), SM90, None, engine, policy)
    quoted = [each.reason for each in made.expected(name)]
    assert ["(dense, " in reason for reason in quoted] == [True] * 3 + [False] * 58
    assert ["(mixtures, " in reason for reason in quoted] == [False] * 3 + [True] * 58


def test_what_layers_of_another_kind_gained_is_said_as_such() -> None:
    engine = engine_of(["DeepseekV3ForCausalLM"], target=SM90)
    mixtures = row(ADD, model="mixtures", mixtures=True)
    dense = row(ADD, "gated_rms_norm", model="dense, with delta nets", mixtures=False)
    specs = model("llama-3.3-70b").specs()
    for measured, quoted in (
        (
            (mixtures, dense),
            "measured on another model: 1.06",
        ),  # a dense row, whose gated norms the model has no site for
        ((mixtures,), "measured on other layers: 1.06"),
        ((mixtures, row(ADD, model="dense", mixtures=False)), "measured 1.06"),
        ((row(ADD, model="dense"),), "measured 1.06"),
    ):
        made = plan(specs, SM90, None, engine, Policy(measurement=measured))
        (reason,) = {each.reason for each in made.expected(ADD)}
        assert f"{quoted} times faster" in reason
        assert ("(mixtures" in reason) == (measured == (mixtures,))


def test_of_a_site_that_quantises_nothing_the_figure_is_of_a_model_that_quantises_as_this_one() -> None:
    """Nothing quantises in front of a decode step's ops; Kimi-K2.5's linears are of 16 bits, and DeepSeek-V3's of fp8."""
    engine = engine_of(["DeepseekV3ForCausalLM"], target=SM90)
    for name, config in (("deepseek-v3", BLOCK), ("kimi-k2.5", None)):
        made = plan(model(name).specs(tp=8), SM90, config, engine)
        (reason,) = {each.reason for each in made.expected("mla_decode") if ", mixtures" in each.reason}
        assert f"({'DeepSeek-V3 in fp8' if config else 'Kimi-K2.5'}, a rank of eight, mixtures" in reason


def test_what_was_measured_with_another_release_is_taken_and_said() -> None:
    specs = model("deepseek-v3").specs()

    def planned(release: str | None, *rows: Measurement, engine: str = "vllm") -> Plan:
        return plan(specs, SM90, BLOCK, Engine(name=engine, release=release), Policy(measurement=rows))

    for release, others in (
        (None, False),
        ("0.1.4", False),
        ("0.1", False),
        ("0.10", True),
        ("of an unknown version", True),
    ):
        made = planned(release, row(ADD), row(GROUP, release="0.1.2+cu130"))
        assert made.expected(ADD) or made.fallback(ADD)
        said = made.measured_with_another_release()
        assert said == (
            f"the figures here were measured with vLLM 0.1, 0.1.2+cu130; this is {release}" if others else None
        )
    made = planned("0.2.0", row(ADD), row(GROUP, release="0.2.3"))
    assert made.measured_with_another_release() == f"the figures of {ADD} were measured with vLLM 0.1; this is 0.2.0"
    # What is a fallback only has a figure that is quoted nowhere.
    made = planned("0.2", row(DUAL), row(f"{DUAL}_group_quant", release="0.2"))
    assert made.fallback(DUAL) and not made.expected(DUAL)
    assert made.measured_with_another_release() is None
    # SGLang counts its releases by the third number.
    for release, said in (
        ("0.5.23", None),
        ("0.5.23.post1", None),
        ("0.5.24", "the figures here were measured with SGLang 0.5.23; this is 0.5.24"),
    ):
        made = planned(release, row(GROUP, engine="sglang", release="0.5.23"), engine="sglang")
        assert made.expected(GROUP) and made.measured_with_another_release() == said
    assert planned("0.2").measured_with_another_release() is None, "nothing is quoted"


def test_of_several_measurements_one_of_the_release_is_quoted() -> None:
    rows = [row(ADD, release=release, model=release) for release in ("0.1", "0.2", "0.3")]
    for release, quoted in (("0.3.1", "0.3"), ("0.2", "0.2"), ("0.4", "0.1"), (None, "0.1")):
        made = plan(
            model("deepseek-v3").specs(),
            SM90,
            None,
            Engine(name="vllm", release=release),
            Policy(measurement=tuple(rows)),
        )
        assert all(f"({quoted}, vLLM {quoted}, a GPU)" in reason for reason in reasons(made.expected(ADD)))


def test_a_policy_is_one() -> None:
    with pytest.raises(ArgumentError, match=r"policy: got 'here'; fusion\.policy\.read_policy"):
        plan((), SM90, policy="here")  # type: ignore[arg-type]
    with pytest.raises(UnknownFusionError, match="no fusion is called 'add_rms_nrm'; did you mean 'add_rms_norm'"):
        plan((), SM90, policy=Policy(measurement=(row("add_rms_nrm"),)))
    with pytest.raises(ValueError, match="engine: expected one of transformers, vllm, sglang, atom, got 'vlm'"):
        row(ADD, engine="vlm")


# ---- the file


def test_a_model_is_called_by_one_name_and_as_readmes_table_calls_it() -> None:
    named: dict[str, set[str]] = {}
    for each in shipped().measurement:
        named.setdefault(each.stage.partition(", ")[0], set()).add(each.model)
    assert not [names for names in named.values() if len(names) > 1]
    on = [each for each in shipped().measurement if each.engine == "vllm" and each.faster and each.release == "0.33.0"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(on) > 5 and not [each.model for each in on if f"| {each.model.split(', ')[0]}, " not in readme]


@pytest.mark.parametrize("measured", shipped().measurement, ids=lambda each: f"{each.stage}-{each.arm}")
def test_every_row_is_what_its_results_file_says(measured: Measurement) -> None:
    assert {batch: [*cell] for batch, cell in measured.decode.items()} == policy_rows.cells(
        measured.file, measured.stage, measured.arm, measured.against or measured.engine
    )
    assert all(name in FUSIONS for name in (*measured.fusions, *filter(None, [measured.unless])))


VLLM, SGLANG = "vllm_engine_torch_2_14-nvidia-h100.json", "sglang_engine-nvidia-h100.json"
DENSE, MIXTURE = "deepseek-v3-rank8-dense", "deepseek-v3-rank8-mixture"

COMPARED_IN = {
    (VLLM, "qwen3-32b-fp8-rank4"): "qwen3-32b-fp8-rank4, batch 1 and 8 again",
    (SGLANG, MIXTURE): f"{MIXTURE}, quantised as SGLang does, other engines started beside it",
}
"""Stages that were timed alone -> the stage of the same file, and the same arms, whose log probabilities were compared."""

NOT_COMPARED = {
    ("vllm_engine_torch_2_14-nvidia-h200.json", DENSE),
    (VLLM, f"{DENSE}, DeepGEMM"),
}
"""Stages of rows that are on, whose log probabilities nobody compared (docs/vllm-measured.md says so)."""

WAYS_OF = {
    (VLLM, f"{DENSE}-fp8-cache"): (VLLM, f"{DENSE}, earlier order of launches"),
    ("sglang_engine-nvidia-h200.json", DENSE): (SGLANG, DENSE),
}
"""Stages without an engine of another way of the engine's own -> where it ran: the same layers, with a cache in bfloat16 or on another GPU (docs/vllm-measured.md and docs/sglang.md say so)."""


def _too_far(file: str, stage: str, arm: str) -> list[str] | None:
    """By which the log probabilities of an arm are further from the engine's than its own ways are; None: they were not compared.

    The engine's own ways are those of every stage of the file with the same layers: a later run of a stage may have had fewer of them.
    """
    stages = _stages(file)
    found = stages[stage]
    given = found["arms"][arm]
    if not given.get("exceeds"):
        return given.get("exceeds")
    same = ("shape", "tp", "variables", "context", "layers", "first")
    alike = [each for each in stages.values() if all(each.get(key) == found.get(key) for key in same)]
    # The same texts, or distances of other tokens would be compared.
    own = _ways(found)["other batches"]
    ways = [each for each in map(_ways, alike) if each.get("other batches") == own]
    if (file, stage) in WAYS_OF:
        file, stage = WAYS_OF[file, stage]
        ways.append(_ways(_stages(file)[stage]))
    return exceeds(
        given["log probabilities"], {f"{name} {i}": way for i, all_ in enumerate(ways) for name, way in all_.items()}
    )


def _stages(file: str) -> Any:
    return json.loads((policy_rows.RESULTS / file).read_text())["stages"]


def _ways(stage: Any) -> Any:
    return stage["arms"][stage.get("first", "vllm")].get("ways", {})


ON = [each for each in shipped().measurement if each.faster]


@pytest.mark.parametrize("measured", ON, ids=lambda each: f"{each.file}-{each.stage}-{each.arm}")
def test_what_is_on_keeps_log_probabilities_within_the_rule(measured: Measurement) -> None:
    stage = COMPARED_IN.get((measured.file, measured.stage), measured.stage)
    too_far = _too_far(measured.file, stage, measured.arm)
    if (measured.file, measured.stage) in NOT_COMPARED:
        assert too_far is None, "it was compared: take it off the list"
    else:
        assert too_far == []


def test_what_was_not_compared_is_on_and_said() -> None:
    assert {(each.file, each.stage) for each in ON} >= NOT_COMPARED
    said = (ROOT / "docs" / "vllm-measured.md").read_text(encoding="utf-8").partition("\n## On torch 2.14\n")[2]
    assert "log probabilities were not compared" in said.partition("\n## ")[0]


def test_a_row_whose_log_probabilities_exceed_the_rule_is_seen() -> None:
    """By SGLang's mixtures as they were timed: their linears quantised otherwise than SGLang's then."""
    assert _too_far(SGLANG, MIXTURE, "fused")


def test_a_row_is_written_from_the_results_file_with_what_speaks_against_it(capsys: pytest.CaptureFixture[str]) -> None:
    measured = next(each for each in shipped().measurement if each.engine == "sglang" and each.mixtures)
    policy_rows.main(measured.stage, measured.arm, measured.file)
    said = capsys.readouterr().out
    (found,) = tomllib.loads(said)["measurement"]
    expected = {key: getattr(measured, key) for key in found}
    assert found == {**expected, "decode": {batch: [*cell] for batch, cell in measured.decode.items()}} | {
        "fusions": found["fusions"]
    }
    assert {*found["fusions"]} == {*measured.fusions, "silu_mul_group_quant"}  # which has no site there
    assert {"engine", "device", "date", "commit", "file", "stage", "arm"} <= found.keys()
    assert "\n# log probabilities: prompt: mean 0.15599 is above 0.00556\n" in said


def test_what_a_fusion_needs_of_a_model_is_in_its_name() -> None:
    """A start with nothing to do asks the names of the measurements, and not the catalog."""
    for name, fusion in FUSIONS.items():
        of_linears = any(isinstance(step, Linear) and step.schemes for step in fusion.chain)
        assert name.endswith("_quant") == (fusion.format is not None or of_linears)
        assert name.startswith("gated_") == (fusion.roles == ("output",))
        assert name.startswith("mla_") == (fusion.roles in (("latents",), ("decode",)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('engine = "vllm"', "engine = 3"), "expected a text, got 3 @ $.measurement[0].engine"),
        (("model =", "modle ="), "extra fields found (modle) @ $.measurement[0]"),
        (("[1.0667, 1.0658, 1.0675]", "[1.07]"), "expected a batch, then the ratio and its interval"),
        (("[1.0667, 1.0658, 1.0675]", "[1.07, 1.08, 1.09]"), "expected a batch, then the ratio and its interval"),
        (("date = 2026-11-23", 'date = "today"'), "expected a date, as 2026-11-23, got 'today'"),
        (("[[measurement]]", "[[measurement"), "is not TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(SHIPPED.read_text().replace(*change, 1))
    with pytest.raises(PolicyError) as error:
        read_policy(path)
    assert says in str(error.value) and str(error.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"none.toml: cannot be read: No such file"):
        read_policy(tmp_path / "none.toml")
