"""Real models of transformers, small but with their true MLA split dims: what was planned is what was fused.

The specs are given by hand here, so that these tests stand on the fusion floor alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import FUSION, KV, ROPE, TOLERANCE, Q, V, gqa_spec, mla_spec, trace, with_modules

transformers = pytest.importorskip("transformers")

MLA_DIMS = {"q_lora_rank": Q, "kv_lora_rank": KV, "qk_nope_head_dim": 128, "qk_rope_head_dim": ROPE, "v_head_dim": V}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def deepseek(layers: int = 2, **changes: Any) -> Any:
    """DeepSeek-V3; Kimi-K2 is the same class with other counts of heads and experts."""
    config = transformers.DeepseekV3Config(
        **{**SMALL, **MLA_DIMS, "num_hidden_layers": layers, "first_k_dense_replace": layers, **changes}
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def paths(model: Any, count: int, *, named: bool = False, **changes: Any) -> list[tuple[str, Any]]:
    """Specs with the paths of their layers; `named`: the norms say which modules they are, too."""
    specs = [mla_spec(i, **changes) for i in range(count)]
    if named:
        specs = [with_modules(spec, "q_a_layernorm", "kv_a_layernorm") for spec in specs]
    return [(f"model.layers.{i}.self_attn", spec) for i, spec in enumerate(specs)]


def tokens(count: int = 6) -> torch.Tensor:
    return torch.arange(count)[None]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)], ids=str
)
def test_deepseek_v3(dtype: torch.dtype) -> None:
    model = deepseek().to(dtype)
    traced = trace(model, tokens(), specs=paths(model, 2, named=dtype != torch.float32), kwargs={"use_cache": False})
    assert traced.fused == 2
    verdict = traced.report.of(FUSION)
    assert (
        verdict.matched == verdict.expected == ("model.layers.0.self_attn:latents", "model.layers.1.self_attn:latents")
    )
    with torch.no_grad():
        eager = model(tokens(), use_cache=False).logits
    torch.testing.assert_close(traced.output.logits, eager, **TOLERANCE[dtype])


@pytest.mark.parametrize("named", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_without_weights_to_go_by(named: bool) -> None:
    # As in a slot of another compiler: only nn_module_stack ties sites to layers.
    model = deepseek(2)
    traced = trace(model, tokens(), specs=paths(model, 2, named=named), by_weight=False, kwargs={"use_cache": False})
    assert {use.how for use in traced.report.records[0].uses} == {"module path"}
    assert traced.fused == 2
    assert traced.report.of(FUSION).complete


def test_kimi_k2_with_experts() -> None:
    # Kimi-K2: more experts, half the heads; the first layer is dense, the others are not.
    model = deepseek(
        3, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16, n_shared_experts=1, attention_bias=False,
    )  # fmt: skip
    traced = trace(model, tokens(), specs=paths(model, 3), kwargs={"use_cache": False})
    assert traced.fused == 3
    assert traced.report.of(FUSION).complete, str(traced.report)
    with torch.no_grad():
        eager = model(tokens(), use_cache=False).logits
    torch.testing.assert_close(traced.output.logits, eager, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("named", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_one_epsilon_missing(named: bool) -> None:
    # transformers norms the latents with 1e-6 whatever the config says; a spec that believed the config is caught.
    model = deepseek(2, rms_norm_eps=1e-5)
    specs = [paths(model, 1, named=named)[0], paths(model, 2, named=named, epsilon=1e-5)[1]]
    traced = trace(model, tokens(), specs=specs, kwargs={"use_cache": False})
    assert traced.fused == 1
    verdict = traced.report.of(FUSION)
    assert verdict.matched == ("model.layers.0.self_attn:latents",)
    assert "the query norm mul_" in verdict.missed["model.layers.1.self_attn:latents"]
    assert "has epsilon 1e-06; the spec says 1e-05" in verdict.missed["model.layers.1.self_attn:latents"]


def test_kimi_linear_has_no_query_latent() -> None:
    config = transformers.AutoConfig.for_model(
        "kimi_linear",
        **{**SMALL, **MLA_DIMS, "q_lora_rank": None},
        num_hidden_layers=1,
        pad_token_id=0,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        first_k_dense_replace=2,
        linear_attn_config={
            "full_attn_layers": [1],
            "kda_layers": [],
            "head_dim": 16,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    mla = [name for name, module in model.named_modules() if type(module).__name__ == "KimiLinearMLAAttention"] or [
        name for name, module in model.named_modules() if "kv_a_layernorm" in dict(module.named_children())
    ]
    assert len(mla) >= 1
    specs = [(name, mla_spec(1, q_lora_rank=None)) for name in mla]
    traced = trace(model, tokens(), specs=specs, kwargs={"use_cache": False})
    verdict = traced.report.of(FUSION)
    assert traced.fused == 0
    assert verdict.expected == ()
    assert verdict.refused == {}
    assert len(verdict.not_applicable) == len(mla)
    assert all("q_lora_rank is None" in reason for reason in verdict.not_applicable.values())
    assert traced.before == traced.after


def test_gpt_oss_has_no_latents() -> None:
    config = transformers.GptOssConfig(
        **{**SMALL, "num_attention_heads": 4},
        num_hidden_layers=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        head_dim=16,
    )
    model = transformers.GptOssForCausalLM(config).eval()
    specs = [(f"model.layers.{i}.self_attn", gqa_spec(i)) for i in range(2)]
    traced = trace(model, tokens(), specs=specs, kwargs={"use_cache": False})
    verdict = traced.report.of(FUSION)
    assert traced.fused == 0
    assert verdict.expected == ()
    # Its layers have no latents: no site, and no decision.
    assert traced.report.plan.decisions == ()
    assert verdict.not_applicable == verdict.refused == {}
    assert traced.report.missed() == {}
    assert traced.before == traced.after
