"""Gemma 3's decoder layer has four norms, two of which read the residual stream: those are fused, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import trace
from torch import nn

from layerfuse import registry
from layerfuse.adapters import Adapter, Facts, FinalNormSpec, ResidualSpec, const, norm

transformers = pytest.importorskip("transformers")

WORDS = {
    "hidden_size": "hidden_size",
    "layer_index": "layer_idx",
    "tp_weight": "self_attn.o_proj.in_features",
    "input_norms": norm("input_layernorm", weight_offset=const(1.0)),
    "post_attention_norms": norm("pre_feedforward_layernorm", weight_offset=const(1.0)),
}


def gemma() -> Any:
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM(config).eval()
    for module in model.modules():
        if type(module).__name__ == "Gemma3RMSNorm":
            nn.init.uniform_(module.weight, -0.5, 0.5)
    return model


def own(**words: Any) -> registry.Registry:
    made = registry.Registry()
    facts = Facts(ResidualSpec, {**WORDS, **words})
    made.register_adapter(Adapter("gemma", {"transformers:Gemma3DecoderLayer": facts}))
    return made


def test_the_norms_that_read_the_stream_are_fused_with_the_adds_before_them() -> None:
    model, given = gemma(), torch.arange(6)[None]
    specs = own().specs_in(model)
    assert not any(isinstance(spec, FinalNormSpec) for _, spec in specs)
    traced = trace(model, given, specs=specs, kwargs={"use_cache": False})
    verdict = traced.report.of("add_rms_norm")
    assert (
        verdict.matched
        == verdict.expected
        == (
            "model.layers.0:post_attention",
            "model.layers.1:input",
            "model.layers.1:post_attention",
        )
    ), str(traced.report)
    with torch.no_grad():
        eager = model(given, use_cache=False).logits
    torch.testing.assert_close(traced.output.logits, eager, atol=1e-4, rtol=1e-4)


def test_the_norm_of_what_the_attention_gives_is_no_norm_of_the_stream() -> None:
    """Declared by its name, it is found, and refused: no add stands before it."""
    model, given = gemma(), torch.arange(6)[None]
    specs = own(post_attention_norms=norm("post_attention_layernorm", weight_offset=const(1.0))).specs_in(model)
    traced = trace(model, given, specs=specs, kwargs={"use_cache": False})
    verdict = traced.report.of("add_rms_norm")
    assert verdict.matched == ("model.layers.1:input",)
    assert set(verdict.missed) == {"model.layers.0:post_attention", "model.layers.1:post_attention"}
    with torch.no_grad():
        eager = model(given, use_cache=False).logits
    torch.testing.assert_close(traced.output.logits, eager, atol=1e-4, rtol=1e-4)
