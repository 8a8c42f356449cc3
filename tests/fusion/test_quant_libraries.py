"""Real models of transformers, quantised by libraries as their users do: what is read off the model is what is fused.

torchao and compressed-tensors are not requirements of the tests; where they are missing, theirs are skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quant_support import CPU_FP8
from torch import nn

from layerfuse import fusion, registry
from layerfuse.adapters import describe_linear_quant
from layerfuse.engines.transformers import engine_of
from layerfuse.fusion import FusionConfig
from layerfuse.fusion.catalog.few_token_linear import ROWS
from layerfuse.testing import small_model

transformers = pytest.importorskip("transformers")
FP8 = torch.float8_e4m3fn
LEVEL_2 = FusionConfig(level=2)


def deepseek(layers: int = 2) -> Any:
    """DeepSeek-V3 without experts."""
    model = small_model(registry.model("deepseek-v3"), layers=layers, hidden_size=128, heads=2, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [each for name, each in model.named_modules() if isinstance(each, nn.Linear) and "lm_head" not in name]


def compiled(model: Any) -> Any:
    return fusion.compile(model, target=CPU_FP8, config=LEVEL_2)


def assert_answers_alike(model: Any, fused: Any) -> None:
    ids = torch.arange(6)[None]
    with torch.no_grad():
        got, wanted = (each(input_ids=ids, use_cache=False).logits.float() for each in (fused, model))
    assert (got - wanted).norm() <= 0.06 * wanted.norm()


def sites(model: Any, count: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{i}:{role}" for i in range(count) for role in ("input", "post_attention"))


@pytest.mark.usefixtures("_op_by_op")
def test_torchao_per_row() -> None:
    """Queries, keys and values quantise one norm each for itself, which becomes one result."""
    pytest.importorskip("torchao")
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        Float8Tensor,
        QuantizeTensorToFloat8Kwargs,
    )

    model = deepseek()
    options = {"mm_config": Float8MMConfig(use_fast_accum=True)}
    for linear in linears(model):
        # quantize_ asks for a GPU before it does the same.
        activations = QuantizeTensorToFloat8Kwargs(FP8, PerRow(), **options)
        weight = Float8Tensor.from_hp(linear.weight.data, FP8, PerRow(), act_quant_kwargs=activations, **options)
        linear.weight = nn.Parameter(weight, requires_grad=False)
    fused = compiled(model)
    assert_answers_alike(model, fused)
    verdict = fused.report.of("add_rms_norm_per_token_quant")
    first, *others = sites(model, 2)
    assert verdict.matched == verdict.expected == tuple(others), str(fused.report)
    assert fused.report.of("rms_norm_per_token_quant").matched == (first,)
    latents = tuple(f"model.layers.{i}.self_attn:latents" for i in range(2))
    assert fused.report.of("mla_dual_rms_norm_per_token_quant").matched == latents, str(fused.report)
    # Its products are torch's own: by name, and all but those of absorbed projections are sites.
    config = FusionConfig(level=2, switches={ROWS: True}, strict=True)
    fused = fusion.compile(model, engine=engine_of(model), target=CPU_FP8, config=config)
    assert_answers_alike(model, fused)
    assert fused.report.of(ROWS).last_call == len(linears(model)) - 2, str(fused.report)
    assert not any(record.others for record in fused.report.records)


@pytest.mark.usefixtures("_op_by_op")
def test_compressed_tensors_static() -> None:
    """Its forward asks a tensor for its value, so that each linear's quantisation is in a graph of its own."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = deepseek(1)
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(**float8, strategy="channel"),
        input_activations=quantization.QuantizationArgs(**float8, strategy="tensor"),
    )
    config = quantization.QuantizationConfig(
        config_groups={"all": group}, quantization_status="frozen", ignore=["lm_head"]
    )
    quantization.apply_quantization_config(model, config)
    for name, parameter in model.named_parameters():
        if "scale" in name:
            parameter.data.fill_(0.02)
    assert str(describe_linear_quant(linears(model)[0])) == "a static scale"
    fused = compiled(model)
    assert_answers_alike(model, fused)
    verdict = fused.report.of("add_rms_norm_static_quant")
    assert verdict.expected == ("model.layers.0:post_attention",)
    assert verdict.matched == () and "nothing quantises the result" in verdict.missed[verdict.expected[0]]
