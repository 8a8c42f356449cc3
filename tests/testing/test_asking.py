"""What `inspect` learns from transformers' own code, of models that no entry declares: published defaults of its configs."""

import sys

import attrs
import pytest

from layerfuse import registry
from layerfuse.adapters import GQASpec
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
    values = {**getattr(transformers, config)().to_dict(), **changes}
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


@pytest.mark.parametrize("config", ["MiniCPM3Config", "Mistral4Config", "Qwen3MoeConfig", "GraniteConfig"])
def test_what_is_proposed_keeps_the_contract(config):
    found, own = asked(config, num_hidden_layers=3)
    own.register_models(files.parse(found.toml()), "inspect")
    results = run_contract("mine", registry=own, full=False)
    assert {result.outcome for result in results if result.scenario not in ("C11", "C14")} == {"passed"}, results


def test_sinks_that_no_config_says_are_found():
    found, _ = asked("GraniteSWAConfig")
    assert {kind.has_sinks for kind in found.entry.layers.values()} == {True}
    assert not any("has_sinks" in note for note in found.notes)
    assert {kind.has_sinks for kind in asked("LlamaConfig")[0].entry.layers.values()} == {False}


def test_a_decoder_layer_with_other_norms_is_left_to_the_reader():
    found, _ = asked("Gemma3TextConfig")
    assert "transformers:Gemma3Attention" in found.entry.layer_classes
    assert "transformers:Gemma3DecoderLayer" not in found.entry.layer_classes
    assert sum("transformers:Gemma3DecoderLayer could not be read" in note for note in found.notes) == 1


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


V3 = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}}


def test_the_entry_and_the_layers_of_the_real_model_agree():
    found, own = asked("GraniteSWAConfig")
    own.register_models(files.parse(found.toml()), "inspect")
    read = [spec for _, spec in own.specs_in(full_model(own.model("mine"))) if isinstance(spec, GQASpec)]
    assert read == [spec for _, spec in own.model("mine").specs(engine="transformers") if isinstance(spec, GQASpec)]
