"""How published checkpoints are quantised: what entries declare, what a config says, what plans make of it."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from helpers import fresh_model

from layerfuse import registry
from layerfuse.adapters import ActivationQuant, GatedMLPSpec, MLASpec, ResidualSpec
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.registry.files import structure, unstructure
from layerfuse.registry.inspect import ConfigError, inspect
from layerfuse.registry.published import LINEARS, QuantKind
from layerfuse.registry.quant_methods import METHODS, UNREAD

GROUP = ActivationQuant(group_size=128)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(weights: dict[str, Any], reads: Any = None, ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": reads}}
    return {"quant_method": "compressed-tensors", "format": "any", "config_groups": groups, "ignore": list(ignore)}


def found(said: Any, model: str = "deepseek-v3") -> tuple[dict[str, QuantKind], list[str]]:
    """What `inspect` reads of a config of this model with such a `quantization_config`, and the notes on it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[registry.model(model).model_type]().to_dict()
    answer = inspect({**config, "quantization_config": said}, registry=registry.default)
    return answer.entry.quant, [note for note in answer.notes if "quantization_config" in note]


# ---- entries


def test_a_published_checkpoint_reads_as_transformers_builds_it() -> None:
    """Each norm and product of DeepSeek-V3 in fp8 blocks, on the real layers."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers import FineGrainedFP8Config

    kept = ["lm_head", "mlp.experts"]
    model = finegrained.replace_with_fp8_linear(fresh_model("deepseek-v3"), kept, FineGrainedFP8Config(), True)
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


@pytest.mark.parametrize(
    ("said", "linears", "weight", "block", "activation"),
    [
        (FP8, list(LINEARS), "float8_e4m3fn", [128, 128], "group128"),
        ({**FP8, "scale_fmt": "ue8m0"}, list(LINEARS), "float8_e4m3fn", [128, 128], "group128,ue8m0"),
        (
            {**FP8, "modules_to_not_convert": ["gate", "lm_head"]},
            list(LINEARS),
            "float8_e4m3fn",
            [128, 128],
            "group128",
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, list(LINEARS), "float8_e4m3fn", None, "static"),
        (
            {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "shared_experts",
                    "mlp.gate_proj",
                    "mlp.up_proj",
                    "mlp.down_proj",
                ],
            },
            ["experts"],
            "float4_e2m1fn",
            [1, 32],
            "none",
        ),
        (
            compressed(INT4, None, ("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*")),
            ["experts"],
            "int4",
            [1, 32],
            "none",
        ),
        (
            compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, TOKEN, ("re:.*self_attn.*",)),
            ["mlps", "shared_experts", "experts"],
            "float8_e4m3fn",
            None,
            "per_token",
        ),
    ],
)
def test_a_quantization_config_is_read(said: Any, linears: list[str], weight: str, block: Any, activation: str) -> None:
    quant, notes = found(said)
    (kind,) = quant.values()
    assert (kind.linears, kind.weight, kind.block, kind.activation, notes) == (linears, weight, block, activation, [])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"quant_method": "modelopt"}, "its quant_algo is None"),
        ({"quant_method": "other"}, "its quant_method is 'other': fp8, mxfp8,"),
        ({"quant_method": "aqlm"}, "'aqlm': weights that are numbers of entries in a codebook"),
        ({"quant_method": "gptq", "bits": 5}, "weights of 5 bits"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down.*": {}}},
            "dynamic quantises some linears otherwise",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "quantization_config is not read"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "quanto", "weights": "int4", "activations": "int8"}, "activations quantised as 'int8'"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "New"}}}, "torchao's 'New'"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type is 'int4_weight_only'"),
        ({"quant_method": "quark", "layer_quant_config": {"a": {}}}, "some linears are quantised otherwise"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int2"}}}, "weights ('int2'"),
        ({"quant_method": "hqq", "dynamic_config": {"a": {}}}, "some linears are quantised otherwise"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ({**FP8, "modules_to_not_convert": ["model.layers.3.self_attn"]}, "it leaves out some of the attention"),
        ({**FP8, "modules_to_not_convert": ["model.layers"] * 3_000}, "it leaves out 3000 names"),
        (compressed(INT4, None, ("re:(.*)*(.*)*x",)), "it leaves out what matches"),
        (compressed({**INT4, "num_bits": 3}), "weights of 3 bits"),
        (compressed(INT4, {**TOKEN, "num_bits": 4}), "activations quantised as"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "several groups of linears"),
    ],
)
def test_what_is_not_known_of_a_quantization_config_is_a_note(said: Any, why: str) -> None:
    quant, notes = found(said)
    assert quant == {}
    assert len(notes) == 1
    assert why in notes[0]


TWO_SIDES = "expected two whole numbers above 0, the output and input features that share a scale, as [128, 128], got"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("fp8", """expected a table, as {"quant_method": "fp8", ...}, got 'fp8'"""),
        ([1], """expected a table, as {"quant_method": "fp8", ...}, got [1]"""),
        ({"quant_method": ["fp8"]}, """quant_method: expected a text, as "fp8", got ['fp8']"""),
        ({"quant_method": 3}, """quant_method: expected a text, as "fp8", got 3"""),
        *[
            ({**FP8, "weight_block_size": odd}, f"weight_block_size: {TWO_SIDES} {odd!r}")
            for odd in ([128], [128, 128, 128], [0, 128], ["a", 128], [True, 128], "all", 128)
        ],
        (
            {**FP8, "modules_to_not_convert": 3},
            """modules_to_not_convert: expected a list of texts, as ["lm_head"], got 3""",
        ),
        (
            {**FP8, "ignored_layers": "lm_head"},
            """ignored_layers: expected a list of texts, as ["lm_head"], got 'lm_head'""",
        ),
        (
            compressed({**INT4, "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128]}),
            f"block_structure: {TWO_SIDES} [128]",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": ["all"]},
            "config_groups: got ['all'], which 'compressed-tensors' does not have there",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": 8}},
            "global_quant_config.weight: got 8, which 'quark' does not have there",
        ),
    ],
)
def test_a_value_that_its_method_cannot_have_is_refused_by_its_key(said: Any, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        found(said)
    assert raised.value.problems == (f"quantization_config: {why}: correct it in the config, or take it out",)


def test_a_norm_whose_result_is_scaled_is_read_by_no_quantising_linear() -> None:
    """Falcon-H1's attention and mixer multiply it by a factor each; its MLP reads the other norm as it is."""
    entry = attrs.evolve(registry.model("falcon-h1"), quant=found(FP8)[0])
    stream = next(spec for _, spec in entry.specs(published=True) if isinstance(spec, ResidualSpec))
    assert stream.input_norm is not None
    assert stream.post_attention_norm is not None
    assert (stream.input_norm.quant, stream.input_norm.unquantised) == (None, None)
    assert stream.post_attention_norm.quant == ActivationQuant(group_size=128)


FP8_WEIGHT, FP4_WEIGHT = "float8_e4m3fn", "float4_e2m1fn"


@pytest.mark.parametrize(
    ("made", "values", "expected"),
    [
        ("GPTQConfig", {"bits": 4, "group_size": 64}, ("int4", "group", [1, 64], "none")),
        ("GPTQConfig", {"bits": 8, "group_size": -1}, ("int8", "channel", None, "none")),
        ("AwqConfig", {}, ("int4", "group", [1, 128], "none")),
        ("AutoRoundConfig", {}, ("int4", "group", [1, 128], "none")),
        ("BitsAndBytesConfig", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, ("nf4", "group", [1, 64], "none")),
        ("BitsAndBytesConfig", {"load_in_8bit": True}, ("int8", "channel", None, "llm_int8")),
        ("QuantoConfig", {"weights": "float8"}, (FP8_WEIGHT, "channel", None, "none")),
        ("QuantoConfig", {"weights": "int4"}, ("int4", "group", [1, 128], "none")),
        ("EetqConfig", {}, ("int8", "channel", None, "none")),
        ("FbgemmFp8Config", {}, (FP8_WEIGHT, "channel", None, "per_token")),
        ("FineGrainedFP8Config", {}, (FP8_WEIGHT, "block", [128, 128], "group128")),
        ("Mxfp4Config", {}, (FP4_WEIGHT, "mx", [1, 32], "none")),
        ("NVFP4Config", {}, (FP4_WEIGHT, "group", [1, 16], "nvfp4,swizzled")),
        ("MetalConfig", {}, ("int4", "group", [1, 64], "none")),
    ],
)
def test_what_the_classes_of_transformers_write_is_read(made: str, values: dict[str, Any], expected: Any) -> None:
    transformers = pytest.importorskip("transformers.utils.quantization_config")
    said = getattr(transformers, made)(**values).to_dict()
    ((_, kind),) = found(json.loads(json.dumps(said, default=str)))[0].items()
    assert (kind.weight, kind.scheme, kind.block, kind.activation) == expected
    assert kind.linears == list(LINEARS)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 0}},
                "skip_modules": ["lm_head"],
            },
            ("int4", "group", [64, 1], "none"),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
            (FP8_WEIGHT, "tensor", None, "static"),
        ),
        (
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
            (FP4_WEIGHT, "group", [1, 16], "nvfp4,swizzled"),
        ),
        (
            {
                "quant_method": "quark",
                "exclude": ["lm_head", "re:.*router.*"],
                "global_quant_config": {
                    "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False},
                    "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True},
                },
            },
            (FP4_WEIGHT, "mx", [1, 32], "mxfp4"),
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}},
            },
            ("int4", "group", [1, 32], "none"),
        ),
        (
            compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, {**TOKEN, "type": "int"}),
            ("int8", "channel", None, "int8"),
        ),
        (
            compressed(
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"},
            ),
            (FP4_WEIGHT, "group", [1, 16], "nvfp4,swizzled"),
        ),
    ],
)
def test_what_other_libraries_write_is_read(said: Any, expected: Any) -> None:
    ((_, kind),) = found(said)[0].items()
    assert (kind.weight, kind.scheme, kind.block, kind.activation) == expected


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


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("deepseek-v3", {"self_attn": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}),
        ("qwen3-8b", {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj")}),
        ("qwen3-8b", {"self_attn": ("qkv_proj", "o_proj")}),
        (
            "qwen3-next-80b-a3b",
            {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "linear_attn": ("in_proj_qkvz", "out_proj")},
        ),
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
    transformers = pytest.importorskip("transformers")
    config = {
        **transformers.CONFIG_MAPPING["deepseek_v3"]().to_dict(),
        "quantization_config": compressed(
            {"num_bits": 8, "type": "int", "strategy": "channel"}, {**TOKEN, "type": "int"}
        ),
    }
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
    transformers = pytest.importorskip("transformers")
    config = {
        **transformers.CONFIG_MAPPING["deepseek_v3"]().to_dict(),
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }
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

    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING["deepseek_v3"]().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path)).quant == {}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    assert set(find_model(str(tmp_path)).quant) == {"fp8"}
