"""How published checkpoints are quantised: what entries declare, what a config says, what plans make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import fp8_model

from layerfuse import registry
from layerfuse.adapters import ActivationQuant, GatedMLPSpec, MLASpec, ResidualSpec
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.registry.files import structure, unstructure
from layerfuse.registry.inspect import ConfigError, inspect
from layerfuse.registry.published import QuantKind
from layerfuse.registry.quant_methods import METHODS, UNREAD

GROUP = ActivationQuant(group_size=128)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def config_of(model: str = "deepseek-v3", **said: Any) -> dict[str, Any]:
    """One of this model's, with such a `quantization_config`."""
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = transformers.CONFIG_MAPPING[registry.model(model).model_type]().to_dict()
    return {**config, "quantization_config": said} if said else config


def found(said: Any, model: str = "deepseek-v3") -> tuple[dict[str, QuantKind], list[str]]:
    """What `inspect` reads of a config of this model with such a `quantization_config`, and the notes on it."""
    answer = inspect({**config_of(model), "quantization_config": said}, registry=registry.default)
    return answer.entry.quant, [note for note in answer.notes if "quantization_config" in note]


# ---- entries


def test_a_published_checkpoint_reads_as_transformers_builds_it() -> None:
    """Each norm and product of DeepSeek-V3 in fp8 blocks, on the real layers."""
    model = fp8_model("deepseek-v3")
    entry = registry.model("deepseek-v3")
    assert entry.specs(published=True) == entry.specs()

    def quants(specs: Any) -> list[tuple[str, int | None, Any]]:
        parts = [
            *(
                (type(s).__name__, s.layer_index, n.quant)
                for _, s in specs
                if isinstance(s, ResidualSpec)
                for n in (s.input_norm, s.post_attention_norm)
            ),
            *((type(s).__name__, s.layer_index, s.q_norm.quant) for _, s in specs if isinstance(s, MLASpec)),
            *((type(s).__name__, s.layer_index, s.quant) for _, s in specs if isinstance(s, GatedMLPSpec)),
        ]
        return sorted(parts, key=str)

    declared = quants(entry.specs(published=True))
    assert declared == quants(registry.specs_in(model))
    assert {quant for *_, quant in declared} == {GROUP}
    assert {quant for *_, quant in quants(entry.specs())} == {None}


def test_linears_that_no_table_names_are_not_quantised() -> None:
    entry = registry.model("kimi-k2.5")
    specs = [spec for _, spec in entry.specs(published=True) if isinstance(spec, GatedMLPSpec)]
    assert {spec.quant for spec in specs} == {None}
    assert {spec.unquantised for spec in specs} == {"they are not quantised in the published checkpoint"}
    found = plan(entry.specs(tp=8, published=True), Target.named("sm90"))
    reasons = {decision.reason for decision in found.decisions if "not known to quantise" in decision.reason}
    assert reasons == set()


def test_how_entries_are_quantised() -> None:
    entries = registry.models().values()
    said = {(entry.name, str(kind)) for entry in entries for kind in entry.quant.values()}
    fp8, mx = "all linears in float8_e4m3fn, blocks of 128 x 128", "experts in float4_e2m1fn, MX groups of 1 x 32"
    dense, routed = (fp8.replace("all linears", f"attention, {others}") for others in ("mlps", "experts"))
    assert said == {
        *((name, f"{fp8}; activations group128") for name in ("deepseek-v3", "deepseek-r1", "kimi-k2-instruct")),
        *((name, f"{fp8}; activations group128") for name in ("glm-5-fp8", "glm-5.2-fp8")),
        *((name, f"{dense}; activations group128") for name in ("qwen3-8b-fp8", "qwen3-32b-fp8")),
        *((name, f"{routed}; activations group128") for name in ("qwen3-30b-a3b-fp8", "qwen3-235b-a22b-fp8")),
        *((name, f"{routed}; activations group128") for name in ("minimax-m2.5", "minimax-m2.7")),
        *((name, f"{fp8}; activations group128,ue8m0") for name in ("deepseek-v3.1", "deepseek-v3.2")),
        *((name, f"{mx}; activations as they are") for name in ("gpt-oss-20b", "gpt-oss-120b", "kimi-k3")),
        ("kimi-k2.5", "experts in int4, groups of 1 x 32; activations as they are"),
    }
    assert all(kind.source for entry in registry.models().values() for kind in entry.quant.values())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"linears": []}, "quant.fp8.linears: expected at least one"),
        (
            {"activation": "group7"},
            "quant.fp8.activation: ActivationQuant.group_size: expected None or one of 32, 64, 128, got 7",
        ),
        ({"block": None}, "quant.fp8.block: a weight of the scheme block has one, got None"),
        ({"block": [128]}, "quant.fp8.block: expected output and input features, each at least 1, got (128,)"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], problem: str) -> None:
    entry = registry.model("deepseek-v3")
    wrong = attrs.evolve(entry.quant["fp8"], **changes)
    document = unstructure({entry.name: attrs.evolve(entry, quant={"fp8": wrong})})
    with pytest.raises(registry.CatalogError) as caught:
        structure(document, "models.toml")
    assert caught.value.problems[0].startswith(problem)


def test_linears_belong_to_one_table() -> None:
    entry = registry.model("deepseek-v3")
    twice = attrs.evolve(entry, quant={**entry.quant, "more": entry.quant["fp8"]})
    with pytest.raises(registry.CatalogError, match=r"quant.more.linears: 'attention' already belongs to fp8"):
        structure(unstructure({entry.name: twice}), "models.toml")
    assert structure(unstructure({entry.name: entry}), "models.toml")[entry.name] == entry


# ---- configs

CONFIGS = (Path(__file__).parent / "quantization_configs.txt").read_text(encoding="utf-8").split("\n\n")
"""Each what a config has as its `quantization_config`, or a class of transformers that writes it; then how that is read (=), the note on
what is not known (?), or why it is refused (!)."""


@pytest.mark.parametrize("case", CONFIGS)
def test_a_quantization_config_is_read_or_said_why_not(case: str) -> None:
    config, says = case.strip().split("\n")
    name, _, values = config.partition(" ") if config[0].isalpha() else ("", "", config)
    said = json.loads(values or "{}")
    if name:
        made = getattr(pytest.importorskip("transformers.utils.quantization_config"), name)(**said)
        said = json.loads(json.dumps(made.to_dict(), default=str))
    if says.startswith("! "):
        with pytest.raises(ConfigError) as raised:
            found(said)
        assert raised.value.problems == (f"quantization_config: {says[2:]}: correct it in the config, or take it out",)
        return
    quant, notes = found(said)
    assert [f"= {kind}" for kind in quant.values()] == ([says] if says.startswith("= ") else [])
    assert len(notes) == (says[0] == "?") and all(says[2:] in note for note in notes)


def test_very_many_names_are_a_note() -> None:
    quant, (note,) = found({**FP8, "modules_to_not_convert": ["model.layers"] * 3_000})
    assert quant == {} and "it leaves out 3000 names" in note


def test_a_norm_whose_result_is_scaled_is_read_by_no_quantising_linear() -> None:
    """Falcon-H1's attention and mixer multiply it by a factor each; its MLP reads the other norm as it is."""
    entry = attrs.evolve(registry.model("falcon-h1"), quant=found(FP8)[0])
    stream = next(spec for _, spec in entry.specs(published=True) if isinstance(spec, ResidualSpec))
    assert stream.input_norm is not None
    assert stream.post_attention_norm is not None
    assert (stream.input_norm.quant, stream.input_norm.unquantised) == (None, None)
    assert stream.post_attention_norm.quant == ActivationQuant(group_size=128)


def test_every_method_of_transformers_is_read_or_said_why_not() -> None:
    transformers = pytest.importorskip("transformers.utils.quantization_config")
    known = {method.value for method in transformers.QuantizationMethod}
    assert known == {*METHODS, *UNREAD} - {"modelopt"}
    assert not set(METHODS) & set(UNREAD)


def test_what_is_left_out_is_read_of_every_method() -> None:
    attention = "re:.*self_attn.*"
    for key in (
        "modules_to_not_convert",
        "ignore",
        "exclude_modules",
        "exclude",
        "skip_modules",
        "llm_int8_skip_modules",
    ):
        quant, notes = found({"quant_method": "eetq", key: [attention]})
        assert [kind.linears for kind in quant.values()] == [["mlps", "shared_experts", "experts"]], (key, notes)


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("deepseek-v3", {"self_attn": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}),
        ("qwen3-8b", {"self_attn": QKVO}),
        ("qwen3-8b", {"self_attn": ("qkv_proj", "o_proj")}),
        ("qwen3-next-80b-a3b", {"self_attn": QKVO, "linear_attn": ("in_proj_qkvz", "out_proj")}),
    ],
)
def test_the_attention_is_unquantised_where_each_of_its_linears_is_left_out(
    model: str, kept: dict[str, tuple[str, ...]]
) -> None:
    """By the names that the layers have; one of them alone is a refusal, and so is one layer that has them all."""
    names = [f"{part}.{name}" for part, several in kept.items() for name in several]

    def left_out(names: list[str], layers: int = 200) -> Any:
        paths = [f"model.layers.{layer}.{name}" for layer in range(layers) for name in names]
        return found({**FP8, "modules_to_not_convert": paths}, model)

    quant, notes = left_out(names)
    assert notes == []
    assert all("attention" not in kind.linears for kind in quant.values()) and quant
    for some in (*([name] for name in names), names[1:]):
        quant, notes = left_out(some)
        assert (quant, len(notes)) == ({}, 1) and "it leaves out some of the attention" in notes[0], some
    assert left_out(names, layers=1)[0] == {}
    if len(kept) > 1:  # delta nets alone, or all layers but them
        assert all(left_out([f"{part}.{name}" for name in several])[0] == {} for part, several in kept.items())


def test_gates_that_are_left_out_leave_delta_nets_quantised() -> None:
    """As in Qwen3-Next's own checkpoint in fp8."""
    quant, notes = found(
        {**FP8, "modules_to_not_convert": ["linear_attn.in_proj_ba", "mlp.gate"]}, "qwen3-next-80b-a3b"
    )
    assert notes == [] and "attention" in quant["fp8"].linears


def test_linears_that_quantise_as_no_fusion_does_say_so() -> None:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    }
    config = config_of(quant_method="compressed-tensors", config_groups={"group_0": group})
    entry = inspect(config, registry=registry.default).entry
    specs = [spec for _, spec in entry.specs(published=True) if isinstance(spec, ResidualSpec)]
    norms = [norm for spec in specs for norm in (*spec.input_norms, *spec.post_attention_norms)]
    assert {norm.quant for norm in norms} == {ActivationQuant(fixed="int8")}
    decisions = plan(specs, Target.named("sm90"), FusionConfig(level=2)).not_applicable("rms_norm_per_token_quant")
    assert any(each.reason.startswith("the linears that read the input site quantise with int8") for each in decisions)
    mixtures = [spec.experts for spec in specs if spec.experts is not None]
    assert {str(mixture.activation).partition(",")[0] for mixture in mixtures} == {"int8"}


@pytest.mark.parametrize(("target", "says"), [("b200", None), ("h100", "sm90 has no NVFP4")])
def test_a_checkpoint_in_nvfp4_is_planned_where_that_is(target: str, says: str | None) -> None:
    config = config_of(quant_method="modelopt", quant_algo="NVFP4")
    specs = inspect(config, registry=registry.default).entry.specs(published=True)
    planned = plan(specs, Target.named(target), FusionConfig(level=2))
    name = "add_rms_norm_nvfp4_quant"
    assert bool(planned.expected(name)) == (says is None)
    assert {says in decision.reason for decision in planned.refused(name)} == ({True} if says else set())
    assert {spec.experts.activation for _, spec in specs if isinstance(spec, ResidualSpec) and spec.experts} == {
        ActivationQuant(fixed="nvfp4", swizzled=True)
    }


def test_a_quantised_copy_of_a_declared_model_is_planned_as_it_says(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from layerfuse.cli.models import find_model

    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    assert find_model(str(tmp_path)).quant == {}
    (tmp_path / "config.json").write_text(json.dumps(config_of(**FP8)))
    assert set(find_model(str(tmp_path)).quant) == {"fp8"}
