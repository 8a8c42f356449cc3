"""Entries of hybrid models: what they declare is what the real layers say, and what cannot be true is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch

from layerfuse import fusion, registry
from layerfuse.registry import CatalogError, files, schema, spec_json
from layerfuse.testing.compare import attention_first, differences

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
        f"layers.ssm = {{ {SSM}, output_norm = 'none', beside_attention = true }}\n",
        {**HEADS, **MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_rms_norm": False},
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
