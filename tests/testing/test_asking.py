"""What `inspect` learns from transformers' own code, of models that no entry declares: published defaults of its configs."""

import sys

import attrs
import pytest

from layerfuse import registry
from layerfuse.adapters import GQASpec, ResidualSpec
from layerfuse.registry import files
from layerfuse.registry.inspect import inspect
from layerfuse.testing import full_model
from layerfuse.testing.asking import ask_code
from layerfuse.testing.run import run_contract

transformers = pytest.importorskip("transformers")


def undeclared():
    """Built-in layer classes and no model: what is asked here must not be known from an entry."""
    own = registry.Registry()
    for adapter in registry.adapters().values():
        if adapter.name in ("deepseek_v3", "kimi_linear", "kimi_k2", "qwen3_next", "gpt_oss"):
            own.register_adapter(adapter)
    return own


def asked(config, **changes):
    own = undeclared()
    values = getattr(transformers, config)(**changes).to_dict()
    return ask_code(inspect(values, registry=own, name="mine"), own), own


@pytest.mark.parametrize(
    ("config", "epsilons"),
    [
        ("MiniCPM3Config", {"latent_norm_eps": 1e-6}),
        ("DeepseekV3Config", {"latent_norm_eps": 1e-6}),
        ("HYV4Config", {"latent_norm_eps": 1e-6}),
        ("OlmoHybridConfig", {"output_norm_eps": 1e-5}),
        ("YoutuConfig", {}),
    ],
)
def test_the_epsilons_of_the_code_are_found(config, epsilons):
    changes = {"rms_norm_eps": 1e-5} if config == "DeepseekV3Config" else {}  # as Moonlight has it
    entry = asked(config, **changes)[0].entry
    found = (
        {
            name: value
            for name, value in attrs.asdict(entry.engines["transformers"]).items()
            if name.endswith("eps") and value is not None
        }
        if entry.engines
        else {}
    )
    assert found == epsilons


PROPOSED = [
    *("MiniCPM3Config", "YoutuConfig", "Mistral4Config", "OlmoHybridConfig", "Gemma3TextConfig", "AXK1Config"),
    *("Olmo2Config", "Olmo3Config", "Gemma2Config", "Qwen3NextConfig", "Qwen3MoeConfig", "GraniteConfig"),
]


@pytest.mark.parametrize("config", PROPOSED)
def test_what_is_proposed_keeps_the_contract(config):
    found, own = asked(config, num_hidden_layers=4)
    own.register_models(files.parse(found.toml()), "inspect")
    results = run_contract("mine", registry=own, full=False)
    assert {result.outcome for result in results if result.scenario not in ("C11", "C14")} == {"passed"}, results


def test_sinks_that_no_config_says_are_found():
    found, _ = asked("GraniteSWAConfig")
    assert {kind.has_sinks for kind in found.entry.layers.values()} == {True}
    assert not any("has_sinks" in note for note in found.notes)
    assert {kind.has_sinks for kind in asked("LlamaConfig")[0].entry.layers.values()} == {False}


def streams_of(entry):
    return {
        (len(spec.input_norms), spec.input_norm and spec.input_norm.weight_offset, spec.added_as_given)
        for _, spec in entry.specs()
        if isinstance(spec, ResidualSpec)
    }


@pytest.mark.parametrize(
    ("config", "streams"),
    [
        ("LlamaConfig", {(1, 0.0, True)}),
        ("Gemma3TextConfig", {(1, 1.0, False)}),  # four norms, two of which read the stream
        ("Qwen3NextConfig", {(1, 1.0, True)}),
        ("Olmo2Config", {(0, None, False)}),
        ("OlmoHybridConfig", {(0, None, False), (1, 0.0, True)}),
        ("GraniteConfig", {(1, 0.0, False)}),  # a factor on what the blocks give
        ("AXK1Config", {(1, 0.0, False)}),  # a norm at the end of each mixture
    ],
)
def test_where_the_norms_stand_is_seen_in_the_code(config, streams):
    found, _ = asked(config)
    assert streams_of(found.entry) == streams
    assert not any("where the norms stand" in note or "norm_weight_offset" in note for note in found.notes)


def test_gemmas_norm_before_the_mlp_is_the_one_that_reads_the_stream():
    words = asked("Gemma3TextConfig")[0].entry.layer_classes["transformers:Gemma3DecoderLayer"]
    assert [norm["module"] for norm in words["post_attention_norms"]] == ["pre_feedforward_layernorm"]


@pytest.mark.parametrize("config", ["HYV4Config", "CohereConfig"])
def test_a_stream_that_no_spec_describes_is_left_to_the_reader(config):
    """HYV4 mixes four streams in front of each norm; Cohere's attention and MLP read one norm."""
    values = {"rms_norm_eps": 1e-5} if config == "CohereConfig" else {}
    found, _ = asked(config, **values)
    name = config.removesuffix("Config")
    assert f"transformers:{name}DecoderLayer" not in found.entry.layer_classes
    said = (
        f"transformers:{name}DecoderLayer could not be read: its forward does something else with the residual stream"
    )
    assert sum(said in note for note in found.notes) == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("LlamaConfig", "its MLPs are gated, with silu: declare their widths under mlps"),
        ("GptOssConfig", "no gated MLP of a known form was found"),
        ("Phi3Config", "transformers:Phi3MLP could not be read: its parts have other names"),
    ],
)
def test_what_is_known_of_the_mlps_is_said(config, said):
    found, _ = asked(config)
    assert sum(said in note for note in found.notes) == 1
    assert not any("whether an MLP is gated" in note for note in found.notes)


def test_what_the_code_says_otherwise_is_noted():
    own = undeclared()
    found = inspect(transformers.LlamaConfig().to_dict(), registry=own, name="mine")
    wrong = attrs.evolve(found.entry, layers={"full": attrs.evolve(found.entry.layers["full"], softmax_scale=0.5)})
    notes = ask_code(attrs.evolve(found, entry=wrong), own).notes
    assert any("transformers' code contradicts the entry: softmax_scale: declared 0.5, read 0.088" in n for n in notes)


def test_what_cannot_be_asked_is_said(monkeypatch):
    found = inspect(transformers.LlamaConfig().to_dict(), registry=undeclared(), name="mine")
    unknown = attrs.evolve(found, entry=attrs.evolve(found.entry, model_type="of-nobody"))
    assert "was not asked: transformers 5.23.0 builds no language model" in ask_code(unknown, undeclared()).notes[-1]
    monkeypatch.setitem(sys.modules, "transformers", None)
    notes = ask_code(found, undeclared()).notes
    assert notes[:-1] == found.notes
    assert "which may have epsilons and sinks of its own, was not asked: transformers is not installed" in notes[-1]


def test_a_declared_model_is_not_asked_again():
    found = inspect(transformers.DeepseekV3Config(**V3).to_dict(), registry=registry.default)
    assert found.same_as
    assert ask_code(found, registry.default) is found


GEMMA = {
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
}


@pytest.mark.parametrize(
    ("config", "changes", "name"),
    [
        ("OlmoHybridConfig", {}, "olmo-hybrid-7b"),
        ("MiniCPM3Config", {}, "minicpm3-4b"),
        ("Gemma3TextConfig", GEMMA, "gemma-3-1b"),
        ("YoutuConfig", {}, "youtu-llm-2b"),
    ],
)
def test_what_the_code_of_a_declared_architecture_does_is_known_without_asking(config, changes, name):
    """Where its norms stand, what it does before it adds, and epsilons of its own."""
    values = getattr(transformers, config)(**changes).to_dict()
    assert inspect(values, registry=registry.default).same_as == (name,)
    other = inspect({**values, "intermediate_size": 2048}, registry=registry.default)
    assert other.same_as == ()
    assert streams_of(other.entry) == streams_of(registry.model(name))


V3 = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}}


def test_the_entry_and_the_layers_of_the_real_model_agree():
    found, own = asked("GraniteSWAConfig")
    own.register_models(files.parse(found.toml()), "inspect")
    read = [spec for _, spec in own.specs_in(full_model(own.model("mine"))) if isinstance(spec, GQASpec)]
    assert read == [spec for _, spec in own.model("mine").specs(engine="transformers") if isinstance(spec, GQASpec)]
