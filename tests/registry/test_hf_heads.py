"""Heads that change from layer to layer, and layers that read what others made: as transformers' own layers have them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers import ROOT

from layerfuse import registry
from layerfuse.adapters import GatedMLPSpec, GQASpec
from layerfuse.cli.attention import Asked, attention_data
from layerfuse.registry import files
from layerfuse.registry.inspect import inspect
from layerfuse.registry.spec_json import from_json, to_json
from layerfuse.registry.weight_forms import forms

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "num_experts_per_tok": 2,
}
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def of_layers(config: Any) -> list[GQASpec]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return [spec for _, spec in registry.specs_in(model, of=GQASpec)]


def of_config(values: dict[str, Any]) -> list[GQASpec]:
    return [spec for _, spec in inspect(values, registry=registry.default).entry.specs() if isinstance(spec, GQASpec)]


def values_of(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


LAGUNA = {
    "head_dim": 64,
    "num_experts": 4,
    "shared_expert_intermediate_size": 128,
    "num_key_value_heads": 4,
    "layer_types": TYPES,
}


@pytest.mark.parametrize(
    ("heads", "kinds"),
    [
        ([8, 16, 16, 8], {"full", "sliding"}),
        ([8, 16, 4, 8], {"full", "sliding_16", "sliding_4"}),
        ([8] * 4, {"full", "sliding"}),
    ],
)
def test_laguna_lists_the_heads_of_each_layer(heads: list[int], kinds: set[str]) -> None:
    config = transformers.LagunaConfig(**SMALL, **LAGUNA, num_attention_heads_per_layer=heads)
    read = of_layers(config)
    assert of_config(values_of(config)) == read
    assert [spec.num_heads for spec in read] == heads
    assert {*inspect(values_of(config), registry=registry.default).entry.layers} == kinds


MIMO = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4}
PUBLISHED = json.loads((ROOT / "tests" / "cli" / "bases.json").read_text(encoding="utf-8"))["MIMO"]


def test_mimo_s_sliding_layers_have_heads_a_window_and_sinks_of_their_own() -> None:
    config = transformers.MiMoV2FlashConfig(**SMALL, **MIMO, layer_types=TYPES, sliding_window_size=128)
    read = of_layers(config)
    assert [(spec.num_kv_heads, spec.sliding_window, spec.has_sinks) for spec in read[:2]] == [
        (2, None, False),
        (4, 129, True),
    ]
    assert of_config(PUBLISHED) == read
    assert of_config({**values_of(config), "swa_num_key_value_heads": 4}) == read
    # Other sizes are taken as they are said, as vLLM and SGLang do.
    (_, sliding, *_) = of_config({**PUBLISHED, "swa_num_attention_heads": 8, "swa_head_dim": 32, "swa_v_head_dim": 16})
    assert (sliding.num_heads, sliding.head_dim, sliding.v_head_dim) == (8, 32, 16)


# ---- layers that read what others made

GEMMA_4: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": TYPES,
    "sliding_window": 16,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}


@pytest.mark.parametrize("name", ["Gemma4", "Gemma4Unified"])
@pytest.mark.parametrize(
    ("changes", "full", "shared"),
    [
        ({"num_kv_shared_layers": 2}, (4, 64, False), [False, False, True, True]),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 2}, (2, 64, True), [False] * 4),
    ],
)
def test_gemma_4_s_layers_differ_in_heads_and_in_whose_keys_they_read(
    name: str, changes: dict[str, Any], full: tuple[int, int, bool], shared: list[bool]
) -> None:
    text = getattr(transformers, f"{name}TextConfig")(**SMALL, **GEMMA_4, **changes)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(text)
    read = registry.specs_in(model, of=GQASpec)
    assert [(s.num_kv_heads, s.head_dim, s.values_are_keys) for _, s in read] == [full, *[(4, 32, False)] * 2, full]
    assert [spec.shares_kv for _, spec in read] == shared
    assert [spec.sliding_window for _, spec in read] == [None, 16, 16, None]
    for path, spec in read:
        assert (spec.num_heads, spec.softmax_scale, spec.hidden_size) == (8, 1.0, 512)
        children = model.get_submodule(path).named_children()
        linears = {child: tuple(it.weight.shape) for child, it in children if isinstance(it, torch.nn.Linear)}
        assert forms(spec)[0][0] == linears
    mlps = registry.specs_in(model, of=GatedMLPSpec)
    assert {(spec.intermediate_size, spec.activation) for _, spec in mlps} == {(512, "gelu_tanh")}


def test_an_entry_says_what_its_layers_read() -> None:
    entry = files.parse(
        """
        [models.mine]
        adapter = "decoders"
        source = "made up"
        num_hidden_layers = 3
        hidden_size = 512
        rms_norm_eps = 1e-6
        layers.full = { family = "gqa", num_heads = 8, num_kv_heads = 2, head_dim = 64, sliding_window = "off", has_sinks = false, at = [0], values_are_keys = true }
        layers.sliding = { family = "gqa", num_heads = 8, num_kv_heads = 4, head_dim = 32, sliding_window = 16, has_sinks = false, at = [1] }
        layers.shared = { family = "gqa", num_heads = 8, num_kv_heads = 4, head_dim = 32, sliding_window = 16, has_sinks = false, at = [2], shares_kv = true }
        """
    )["mine"]
    specs = entry.specs(tp=2)
    found = [spec for _, spec in specs if isinstance(spec, GQASpec)]
    assert [(s.num_local_kv_heads, s.head_dim, s.values_are_keys, s.shares_kv) for s in found] == [
        *((1, 64, True, False), (2, 32, False, False), (2, 32, False, True))
    ]
    assert from_json(json.loads(json.dumps(to_json(specs)))) == specs
    cached = {row["kind"]: row["bytes_per_token_and_layer"] for row in attention_data(specs, "sm90", Asked())["cache"]}
    assert [*cached.values()] == [2 * 2 * 64, 2 * 2 * 2 * 32, 0]
