"""Quantisations that a graph holds as one op of an engine, by the schemas that vLLM registers them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_ops import op
from fusion_support import KV, ROPE, Q, mla_spec
from quant_support import CPU_FNUZ, CPU_FP8, FP8, PLAIN, config, fusion_of
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from layerfuse.fusion import Target, plan
from layerfuse.fusion.rewrite import Pipeline


def _stand_in(schema: str, group: Callable[..., int | None]) -> None:
    """vLLM is not installed here; where it is, its own op is used."""

    def run(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        size = group(*args)
        dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), FP8)
        groups = 1 if size is None else x.shape[-1] // size
        return torch.empty_like(x, dtype=dtype), torch.empty((*x.shape[:-1], groups), device=x.device)

    op(f"{schema} -> (Tensor, Tensor)", fake=None)(run)


_stand_in("vllm::rocm_aiter_per_token_quant(Tensor x, ScalarType quant_dtype, Tensor? scale=None)", lambda *_: None)
_stand_in("vllm::rocm_aiter_group_fp8_quant(Tensor x, int group_size)", lambda size: size)
_stand_in(
    "vllm_ir::dynamic_quant_fp8(Tensor x, bool per_token, ScalarType fp8_dtype, Tensor? scale_ub=None, "
    "int? num_token_padding=None)",
    lambda *_: None,
)
_stand_in(
    "vllm_ir::dynamic_group_quant_fp8(Tensor x, int[] group_shape, bool column_major, bool use_ue8m0, ScalarType fp8_dtype, "
    "int scale_alignment=1)",
    lambda shape, *_: shape[-1],
)
VLLM, IR = torch.ops.vllm, torch.ops.vllm_ir


def run(quantise: Callable[..., Any], quant: str, target: Target = CPU_FP8) -> tuple[str, Pipeline]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.layerfuse.rms_norm(x, weight, 1e-6, 0.0)

    def function(x: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Any:
        q, kv, _ = x.split([Q, KV, ROPE], -1)
        return *quantise(norm(q, q_weight)), norm(kv, kv_weight)

    module = make_fx(function, tracing_mode="fake")(torch.randn(3, Q + KV + ROPE), torch.rand(Q), torch.rand(KV))
    pipeline = Pipeline(plan([mla_spec()], target, config(quant)))
    pipeline(module.graph)
    module.graph.lint()
    return str(module.graph), pipeline


FORMS = {
    "AITER, per token": (lambda x: VLLM.rocm_aiter_per_token_quant(x, FP8), "per_token"),
    "AITER, per token, no scale given": (lambda x: VLLM.rocm_aiter_per_token_quant(x, FP8, None), "per_token"),
    "AITER, groups": (lambda x: VLLM.rocm_aiter_group_fp8_quant(x, 128), "group128"),
    "vLLM IR, per token": (lambda x: IR.dynamic_quant_fp8(x, True, FP8), "per_token"),
    "vLLM IR, groups": (lambda x: IR.dynamic_group_quant_fp8(x, [1, 128], False, False, FP8), "group128"),
    "vLLM IR, powers of two": (lambda x: IR.dynamic_group_quant_fp8(x, [1, 64], False, True, FP8), "group64,ue8m0"),
    "each group as a row": (lambda x: tuple(y.view(3, -1) for y in VLLM.rocm_aiter_per_token_quant(x.view(-1, 128), FP8)), "group128"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_fused(form: str) -> None:
    quantise, quant = FORMS[form]
    text, pipeline = run(quantise, quant)
    assert text.count(f"layerfuse.{fusion_of(quant)}.default") == 1
    assert "rms_norm.default" not in text and "vllm" not in text
    assert pipeline.report.of(fusion_of(quant)).complete


@pytest.mark.parametrize(
    ("quantise", "quant", "reason"),
    [
        (lambda x: VLLM.rocm_aiter_per_token_quant(x, FP8, x[:, :1]), "per_token", "its scale is given, not taken from the values"),
        (lambda x: IR.dynamic_quant_fp8(x, False, FP8), "per_token", "it has one scale for the whole tensor"),
        (lambda x: IR.dynamic_quant_fp8(x, True, FP8, x[:1, 0]), "per_token", "it bounds its scale or pads its rows"),
        (lambda x: IR.dynamic_quant_fp8(x, True, FP8, None, 17), "per_token", "it bounds its scale or pads its rows"),
        (lambda x: IR.dynamic_group_quant_fp8(x, [1, 128], False, False, FP8, 4), "group128", "its groups span rows, or its scales are padded"),
        (lambda x: IR.dynamic_group_quant_fp8(x, [128, 128], False, False, FP8), "group128", "its groups span rows, or its scales are padded"),
        (lambda x: VLLM.rocm_aiter_group_fp8_quant(x, 64), "group128", "the graph quantises groups of 64"),
        (lambda x: (*VLLM.rocm_aiter_group_fp8_quant(x, 64), x), "group128", "the graph quantises groups of 64"),
    ],
)  # fmt: skip
def test_not_fused(quantise: Callable[..., Any], quant: str, reason: str) -> None:
    text, pipeline = run(quantise, quant)
    assert "layerfuse.mla_dual_rms_norm.default" in text and fusion_of(quant) not in text
    (said,) = pipeline.report.of(fusion_of(quant)).missed.values()
    assert reason in said
    assert said.endswith(f"{PLAIN} was fused there instead")


@pytest.mark.parametrize(("op", "count"), [("vllm", 1), ("vllm_ir", 0)])
def test_vllm_keeps_below_the_largest_of_e4m3fnuz(op: str, count: int) -> None:
    fnuz = torch.float8_e4m3fnuz
    quantise = (
        (lambda x: VLLM.rocm_aiter_per_token_quant(x, fnuz))
        if op == "vllm"
        else (lambda x: IR.dynamic_quant_fp8(x, True, fnuz))
    )
    text, pipeline = run(quantise, "per_token", CPU_FNUZ)
    assert text.count("mla_dual_rms_norm_per_token_quant.default") == count
    if not count:
        assert "reaches 224, and the fused op 240" in str(pipeline.report)
