"""Entries of hybrid models: what they declare is what the real layers say, and what cannot be true is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from layerfuse import fusion, registry
from layerfuse.registry import CatalogError, files, schema, spec_json
from layerfuse.registry.catalog import MOST_LAYERS
from layerfuse.registry.inspect import ConfigError, inspect
from layerfuse.registry.toml import written
from layerfuse.testing.compare import attention_first, differences
from layerfuse.testing.models import published_model, why_not

transformers = pytest.importorskip("transformers")

HEAD = '[models.mine]\nadapter = "hybrids"\nsource = "made for the test"\nhidden_size = 64\nrms_norm_eps = 1e-5\n'
SSM = 'family = "mamba2", num_heads = 8, head_dim = 16, ssm_state_size = 32, num_groups = 2, conv_kernel_size = 4'
MLP = "mlps.dense = { intermediate_size = 96, activation = 'silu' }\n"
GATED = 'output_norm = "gate_before_norm"'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"layers.ssm = {{ {SSM}, {GATED} }}\nlayers.more = {{ {SSM}, {GATED}, beside_attention = true, at = [1] }}\n",
         "layers.more.beside_attention: layer 1 is of the kind ssm, which is no attention"),
        (f"layers.ssm = {{ {SSM}, {GATED}, beside_attention = true }}\n", "layers: no kind claims layer 0 and 1 more"),
        (f"layers.ssm = {{ {SSM}, {GATED}, stream_norms = 'one' }}\n{MLP}",
         "mlps.dense.at: layer 0 is of the kind ssm, which is one block without an MLP"),
        (f"layers.ssm = {{ {SSM.replace('num_groups = 2', 'num_groups = 3')}, {GATED} }}\n",
         "num_heads: 8 is no multiple of num_groups 3"),
        (f"layers.ssm = {{ {SSM.replace('num_groups = 2', 'num_groups = 0')}, {GATED} }}\n",
         "layers.ssm.num_groups: expected at least 1, got 0"),
        (f"layers.ssm = {{ {SSM}, output_norm = 'rms' }}\n", "expected 'gate_before_norm' or 'norm_before_gate' or 'none', got 'rms'"),
        ("layers.ssm = { family = 'other' }\n", "required key 'mixer' is missing"),
        (f"layers.ssm = {{ {SSM}, {GATED}, stream_norms = 'two' }}\n", "stream_norms"),
    ],
)  # fmt: skip
def test_what_cannot_be_true_is_refused(text: str, says: str) -> None:
    with pytest.raises(CatalogError) as caught:
        files.parse(f"{HEAD}num_hidden_layers = 2\n{text}")
    assert says in str(caught.value)


CONFIGS = json.loads((Path(__file__).parent / "mixers.json").read_text(encoding="utf-8"))
"""Tiny ones, by the class of transformers that they are of."""


def config_of(name: str) -> Any:
    return getattr(transformers, name).config_class(**CONFIGS[name])


def said_by(name: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(config_of(name).to_json_string(use_diff=False))
    return said


@pytest.mark.parametrize("name", CONFIGS)
def test_inspect_writes_what_the_real_layers_say(name: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, name)(config_of(name))
    entry = inspect(said_by(name), registry=registry.default).entry
    assert entry.adapter == "hybrids"
    document = files.unstructure({"mine": entry})
    jsonschema.Draft202012Validator(schema.schema()).validate(document)
    assert files.structure(document, "again")["mine"] == files.parse(written(document))["mine"]
    assert files.parse(written(document))["mine"].specs() == entry.specs()
    declared, found = attention_first(entry.specs()), attention_first(registry.specs_in(model))
    if (
        not entry.mlps
    ):  # no config says whether one is gated: where no declared model tells, none is written, but as a layer of its own
        found = [pair for pair in found if type(pair[1]).__name__ != "GatedMLPSpec"]
    assert len(declared) == len(found)
    for (path, spec), (_, real) in zip(declared, found, strict=True):
        assert [*differences(spec, real)] == [], path
    # A plan of it, and its JSON, which other ranks have too.
    for tp in (1, 2):
        specs = entry.specs(tp)
        assert spec_json.from_json(json.loads(json.dumps(spec_json.to_json(specs)))) == specs
        assert "add_rms_norm" in str(fusion.plan(specs, fusion.Target.named("gfx950")))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("BambaForCausalLM", {"mamba_n_heads": None}, "mamba_n_heads is null"),
        ("BambaForCausalLM", {"mamba_expand": 3}, "mamba_n_heads 8 of 16 are 128 wide, and the mixer is 192 wide"),
        ("BambaForCausalLM", {"layer_types": ["mamba", "rwkv", "mamba"]}, "layer_types: 'rwkv' is a kind of layer that no spec describes"),
        ("NemotronHForCausalLM", {"layers_block_type": ["mamba"], "num_hidden_layers": 4},
         "layers_block_type: expected the kinds of 4 layers"),
        ("NemotronHForCausalLM", {"mlp_hidden_act": "tanh"}, "mlp_hidden_act: expected relu2, relu, silu or gelu, got 'tanh'"),
        ("RecurrentGemmaForCausalLM", {"block_types": []}, "block_types: expected the kinds of layers, got []"),
        ("JambaForCausalLM", {"model_type": "new"}, "which are not read of this model type"),
        ("Mamba2ForCausalLM", {"hc_mult": 4}, "hc_mult = 4: a residual stream that is mixed"),
        ("Mamba2ForCausalLM", {"num_hidden_layers": 10**6}, "num_hidden_layers: expected 1 to 1000, got 1000000"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_say_it_is_refused_by_the_key(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inspect({**said_by(name), **changes}, registry=registry.default)
    assert says in str(caught.value)


def test_as_many_layers_as_are_allowed_are_read() -> None:
    config = {**said_by("Mamba2ForCausalLM"), "num_hidden_layers": MOST_LAYERS}
    assert inspect(config, registry=registry.default).entry.num_hidden_layers == MOST_LAYERS


def test_a_model_that_cannot_be_built_from_the_entry_says_so() -> None:
    entry = inspect(said_by("JambaForCausalLM"), registry=registry.default).entry
    assert "no config with layers of the family other is written here" in str(why_not(entry))
    with torch.device("meta"):
        assert registry.specs_in(published_model(entry, said_by("JambaForCausalLM")))
