"""DeepSeek-V3 of transformers, its query up-projection quantised: what was planned is what was fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import in_turn
from quant_support import CPU_FP8, FORMS, PLAIN, config, dequantise, fusion_of, trace_quantised, vllm_group
from test_real_models import deepseek, paths, tokens
from torch import nn

from layerfuse import fusion


class QuantisedLinear(nn.Module):
    """Quantises its input as an engine does, and multiplies what it stands for."""

    def __init__(self, linear: nn.Linear, quantise: Any) -> None:
        super().__init__()
        self.weight = linear.weight
        self.quantise = quantise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = self.quantise(x)
        return nn.functional.linear(dequantise(values, scales).to(x.dtype), self.weight)


def quantised(quantise: Any, layers: int) -> Any:
    model = deepseek(layers)
    for layer in model.model.layers:
        layer.self_attn.q_b_proj = QuantisedLinear(layer.self_attn.q_b_proj, quantise)
    return model


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# What tells forms apart is tests/fusion/test_quant_forms.py's.
MORE = [
    pytest.param(form, dtype, marks=pytest.mark.thorough)
    for form in ("sglang, groups", "deepgemm, ue8m0")
    for dtype in DTYPES
]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*in_turn(["vllm, per token", "vllm, groups", "canonical, groups"], DTYPES), *MORE],
    ids=str,
)
def test_deepseek_v3(form: str, dtype: torch.dtype) -> None:
    quantise, quant = FORMS[form]
    model = quantised(quantise, 1).to(dtype)
    traced = trace_quantised(model, tokens(), quant, specs=paths(model, 1), kwargs={"use_cache": False})
    verdict = traced.report.of(fusion_of(quant))
    assert verdict.matched == verdict.expected == ("model.layers.0.self_attn:latents",)
    assert traced.fused == sum(text.count(f"layerfuse.{fusion_of(quant)}(") for text in traced.after) == 1
    assert traced.report.of(PLAIN).fallback == ()
    with torch.no_grad():
        got, wanted = traced.output.logits.float(), model(tokens(), use_cache=False).logits.float()
    # Both quantise the query, which the unfused one may have rounded once more: a step of e4m3 apart where they differ.
    assert (got - wanted).abs().max() <= 2e-2 * wanted.abs().max()


def test_one_layer_that_is_not_quantised_falls_back() -> None:
    model = quantised(vllm_group, 3)
    attention = model.model.layers[1].self_attn
    plain = nn.Linear(attention.q_b_proj.weight.shape[1], attention.q_b_proj.weight.shape[0], bias=False)
    plain.weight = attention.q_b_proj.weight
    attention.q_b_proj = plain
    traced = trace_quantised(model, tokens(), "group128", specs=paths(model, 3), kwargs={"use_cache": False})
    verdict = traced.report.of(fusion_of("group128"))
    assert verdict.matched == ("model.layers.0.self_attn:latents", "model.layers.2.self_attn:latents")
    assert "nothing quantises the result" in verdict.missed["model.layers.1.self_attn:latents"]
    assert verdict.missed["model.layers.1.self_attn:latents"].endswith("mla_dual_rms_norm was fused there instead")
    assert traced.report.of(PLAIN).fallback == ("model.layers.1.self_attn:latents",)
    assert traced.fused == 3


@pytest.mark.usefixtures("_op_by_op")
def test_dynamic_shapes_and_strict() -> None:
    model = quantised(vllm_group, 1)
    compiled = fusion.compile(
        model, specs=paths(model, 1), target=CPU_FP8, config=config("group128"), strict=True, dynamic=True
    )
    with torch.no_grad():
        got, wanted = compiled(tokens(), use_cache=False).logits, model(tokens(), use_cache=False).logits
    assert compiled.report.of(fusion_of("group128")).matched == ("model.layers.0.self_attn:latents",)
    assert (got - wanted).abs().max() <= 2e-2 * wanted.abs().max()
