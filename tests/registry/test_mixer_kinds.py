"""Entries of hybrid models: what they declare is what the real layers say, and what cannot be true is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch

from layerfuse import fusion, registry
from layerfuse.registry import CatalogError, files, schema, spec_json
from layerfuse.registry.inspect import ConfigError, inspect
from layerfuse.testing.compare import attention_first, differences
from layerfuse.testing.models import published_model, why_not

transformers = pytest.importorskip("transformers")

HEAD = '[models.mine]\nadapter = "hybrids"\nsource = "made for the test"\nhidden_size = 64\nrms_norm_eps = 1e-5\n'
SSM = 'family = "mamba2", num_heads = 8, head_dim = 16, ssm_state_size = 32, num_groups = 2, conv_kernel_size = 4'
GQA = 'family = "gqa", num_heads = 4, num_kv_heads = 2, head_dim = 16, sliding_window = "off", has_sinks = false'
MLP = "mlps.dense = { intermediate_size = 96, activation = 'silu' }\n"
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "head_dim": 16,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_d_conv": 4,
}  # fmt: skip
GATED = 'output_norm = "gate_before_norm"'

ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BambaForCausalLM": (
        f"num_hidden_layers = 3\nlayers.ssm = {{ {SSM}, {GATED}, at = 'rest' }}\nlayers.full = {{ {GQA}, at = [1] }}\n{MLP}",
        {**HEADS, **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    ),
    "FalconH1ForCausalLM": (
        f"num_hidden_layers = 2\nadded_as_given = false\nlayers.full = {{ {GQA} }}\n"
        f"layers.ssm = {{ {SSM}, output_norm = 'none', beside_attention = true }}\n"
        "mlps.dense = { intermediate_size = 96, activation = 'silu', gate_multiplier = 0.5, down_multiplier = 3.0 }\n",
        {**HEADS, **MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_rms_norm": False, "mlp_multipliers": [0.5, 3.0]},
    ),
    "NemotronHForCausalLM": (
        f"num_hidden_layers = 4\nlayers.ssm = {{ {SSM}, {GATED}, stream_norms = 'one', at = [0] }}\n"
        f"layers.full = {{ {GQA}, stream_norms = 'one', at = [2] }}\n"
        "layers.mlp = { family = 'mlp', intermediate_size = 96, activation = 'relu2', gated = false, at = [1] }\n"
        "layers.moe = { family = 'mlp', intermediate_size = 48, activation = 'relu2', gated = false, shared_experts = true, at = [3] }\n",
        {**HEADS, "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2,
         "conv_kernel": 4, "layers_block_type": ["mamba", "mlp", "attention", "moe"], "n_routed_experts": 4,
         "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "num_experts_per_tok": 2},
    ),
    "Mamba2ForCausalLM": (
        f"num_hidden_layers = 2\nlayers.ssm = {{ {SSM}, {GATED}, stream_norms = 'one' }}\n",
        {"num_hidden_layers": 2, "num_heads": 8, "state_size": 32, "n_groups": 2},
    ),
    "MambaForCausalLM": (
        "num_hidden_layers = 2\nlayers.ssm = { family = 'other', mixer = 'mamba', stream_norms = 'one' }\n",
        {"num_hidden_layers": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_declared_is_what_the_real_layers_say(name: str) -> None:
    text, config = ENTRIES[name]
    entry = files.parse(HEAD + text)["mine"]
    assert files.structure(files.unstructure({"mine": entry}), "again")["mine"] == entry
    jsonschema.Draft202012Validator(schema.schema()).validate(files.unstructure({"mine": entry}))
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class(**{**SMALL, **config}))
    declared, found = attention_first(entry.specs()), attention_first(registry.specs_in(model))
    assert len(declared) == len(found)
    for (path, spec), (_, real) in zip(declared, found, strict=True):
        assert [*differences(spec, real)] == [], path
    # A plan of it, and its JSON, which other ranks have too.
    for tp in (1, 2):
        specs = entry.specs(tp)
        assert spec_json.from_json(json.loads(json.dumps(spec_json.to_json(specs)))) == specs
        plan = fusion.plan(specs, fusion.Target.named("gfx950"))
        assert "add_rms_norm" in str(plan)


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


MORE: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {
        **HEADS, **MAMBA, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "attention_multiplier": 0.3,
    },
    "FalconMambaForCausalLM": {"num_hidden_layers": 2},
    "JambaForCausalLM": {**HEADS, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "Lfm2ForCausalLM": {**HEADS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-3},
    "RecurrentGemmaForCausalLM": {
        **HEADS, "num_hidden_layers": 4, "block_types": ["recurrent", "attention"], "attention_window_size": 7, "lru_width": 64,
    },
}  # fmt: skip


def config_of(name: str) -> Any:
    own = ENTRIES[name][1] if name in ENTRIES else MORE[name]
    return getattr(transformers, name).config_class(**{**SMALL, **own})


def said_by(name: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(config_of(name).to_json_string(use_diff=False))
    return said


@pytest.mark.parametrize("name", [*ENTRIES, *MORE])
def test_inspect_writes_what_the_real_layers_say(name: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, name)(config_of(name))
    entry = inspect(said_by(name), registry=registry.default).entry
    assert entry.adapter == "hybrids"
    assert files.structure(files.unstructure({"mine": entry}), "again")["mine"].specs() == entry.specs()
    declared, found = attention_first(entry.specs()), attention_first(registry.specs_in(model))
    if (
        not entry.mlps
    ):  # no config says whether one is gated: where no declared model tells, none is written, but as a layer of its own
        found = [pair for pair in found if type(pair[1]).__name__ != "GatedMLPSpec"]
    assert len(declared) == len(found)
    for (path, spec), (_, real) in zip(declared, found, strict=True):
        assert [*differences(spec, real)] == [], path


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


def test_a_model_that_cannot_be_built_from_the_entry_says_so() -> None:
    entry = inspect(said_by("JambaForCausalLM"), registry=registry.default).entry
    assert "no config with layers of the family other is written here" in str(why_not(entry))
    with torch.device("meta"):
        assert registry.specs_in(published_model(entry, said_by("JambaForCausalLM")))
