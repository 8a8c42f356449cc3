"""A quantisation that is not the plan's, or not safe to take in, stays as it is, and the report says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, Layer, Q, mla_spec, trace
from quant_support import (
    CPU_FNUZ,
    CPU_FP8,
    FP8,
    MAX,
    PLAIN,
    Quantised,
    assert_left,
    canonical_group,
    canonical_per_token,
    config,
    fusion_of,
    sglang_group,
    trace_quantised,
    vllm_group,
    vllm_per_token,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from layerfuse.fusion import plan
from layerfuse.fusion.rewrite import Pipeline

# ---- what the plan says and the graph does not ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantise", "quant", "reason"),
    [
        (vllm_group, "group64", "the graph quantises groups of 128, the plan says 64"),
        (vllm_group, "per_token", "the graph quantises groups of 128, the plan says one scale per token"),
        (vllm_per_token, "group128", "the graph quantises with one scale per token, the plan says 128"),
        (canonical_per_token, "group128", "the graph quantises with one scale per token, the plan says 128"),
        (vllm_group, "group128,ue8m0", "the graph's scales are not rounded, the plan's powers of two"),
        (
            lambda x: vllm_group(x, ue8m0=True),
            "group128",
            "the graph's scales are powers of two, the plan's not rounded",
        ),
        (vllm_group, "group128,column_major", "the graph has the scales row by row, the plan column by column"),
        (canonical_group, "group128,column_major", "the graph has the scales row by row, the plan column by column"),
        (
            lambda x: vllm_group(x, column_major=True),
            "group128",
            "the graph has the scales column by column, the plan row by row",
        ),
        (
            lambda x: canonical_group(x, column=True),
            "group128",
            "the graph has the scales column by column, the plan row by row",
        ),
    ],
)
def test_another_quantisation_than_planned(quantise: Any, quant: str, reason: str) -> None:
    assert_left(Quantised(quantise), quant, reason)


def test_another_format_than_the_targets() -> None:
    reason = "the graph quantises to torch.float8_e4m3fn, and cpu takes e4m3fnuz"
    assert_left(Quantised(vllm_per_token), "per_token", reason, target=CPU_FNUZ)


def test_columns_of_rows_in_two_dimensions() -> None:
    # Each batch column by column is not the whole column by column.
    module = Quantised(lambda x: vllm_group(x, column_major=True))
    assert_left(module, "group128,column_major", "neither row by row nor column by column", x=torch.randn(2, 3, HIDDEN))


# ---- norms that are no pair, as for the plain fusion ---------------------------------------------------------------


@pytest.mark.parametrize("kv_epsilon", [1e-5, 1e-6 + 1e-7])
def test_an_epsilon_off(kv_epsilon: float) -> None:
    assert_left(Quantised(vllm_per_token, kv_epsilon=kv_epsilon), "per_token", "has epsilon", plain=False)


def test_saved_for_the_backward_pass() -> None:
    class Weighted(Quantised):
        def forward(self, x: Tensor) -> Any:
            values, scales, *rest = super().forward(x)
            return (values.float() * scales, *rest)

    module = Layer(Weighted(vllm_per_token))
    specs = [("layer", mla_spec())]
    traced = trace_quantised(module, torch.randn(5, HIDDEN), "per_token", specs=specs, grad=True)
    assert traced.fused == 0
    assert traced.report.of(fusion_of("per_token")).missed


class Breaks(Quantised):
    """The quantisation is in the next graph."""

    def forward(self, x: Tensor) -> Any:
        q, kv, k_pe = self.split(x)
        query, keys = self.q_norm(q), self.kv_norm(kv)
        torch._dynamo.graph_break()
        return *self.quantise(query), keys, k_pe.exp()


def test_a_graph_break_in_between() -> None:
    traced = trace_quantised(
        Layer(Breaks(vllm_per_token)),
        torch.randn(5, HIDDEN),
        "per_token",
        specs=[("layer", mla_spec())],
    )
    verdict = traced.report.of(fusion_of("per_token"))
    assert "nothing quantises the result" in verdict.missed["layer:latents"]
    assert verdict.missed["layer:latents"].endswith("; mla_dual_rms_norm was fused there instead")
    assert traced.fused == 1


# ---- graphs that really write in place -----------------------------------------------------------------------------


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("the query", "nothing quantises the result"),
        ("the scale", "the scale comes from mul_, which is no step of a known quantisation"),
        ("elsewhere", "add_ writes in place between mul_1 and convert_element_type_1"),
        ("after", None),
    ],
)
def test_writes_in_place(place: str, reason: str | None) -> None:
    def function(x: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Any:
        x = x + 0
        q, kv, k_pe = x.split([Q, 512, 64], -1)
        keys = _norm(kv, kv_weight)
        query = _norm(q, q_weight)
        if place == "the query":
            query.mul_(2)
        scale = torch.ops.prims.convert_element_type(query, torch.float32).abs().amax(-1, keepdim=True) / MAX
        if place == "the scale":
            scale.mul_(2)
        if place == "elsewhere":
            k_pe.add_(1)
        values = torch.ops.prims.convert_element_type(query / scale, FP8)
        if place == "after":
            k_pe.mul_(2)
        return values, scale, keys, k_pe

    inputs = (torch.randn(3, Q + 512 + 64), torch.rand(Q), torch.rand(512))
    for plain in (False, True):
        module = make_fx(function, tracing_mode="fake")(*inputs)
        given = config("per_token", switches={} if plain else {PLAIN: False})
        pipeline = Pipeline(plan([mla_spec()], CPU_FP8, given))
        pipeline(module.graph)
        module.graph.lint()
        module.recompile()
        assert str(module.graph).count("per_token_quant.default") == (reason is None)
        assert str(module.graph).count("mla_dual_rms_norm.default") == (plain and reason is not None)
        verdict = pipeline.report.of(fusion_of("per_token"))
        assert verdict.complete == (reason is None)
        for got, wanted in zip(module(*inputs), function(*inputs), strict=True):
            if reason is None or plain:
                torch.testing.assert_close(got.float(), wanted.float(), rtol=2**-3, atol=2**-9)
            else:
                assert torch.equal(got.float(), wanted.float())
        if reason is not None:
            assert reason in verdict.missed["layer 0:latents"]


def test_only_what_is_declared_is_looked_for() -> None:
    traced = trace(Quantised(vllm_per_token), torch.randn(5, HIDDEN), specs=[mla_spec()])
    assert traced.fused == 1
    assert "_quant(" not in traced.after[0]
    declared, undeclared = plan([mla_spec()], CPU_FP8, config("per_token")), plan([mla_spec()], CPU_FP8)
    assert [d.fusion for d in declared.expected()] == [fusion_of("per_token")]
    assert [d.fusion for d in declared.fallback()] == [d.fusion for d in undeclared.expected()] == [PLAIN]
    assert undeclared.fallback() == ()


def test_sglang_in_groups_that_no_plan_has() -> None:
    assert_left(
        Quantised(lambda x: sglang_group(x, 48)), "group128", "the graph quantises groups of 48, the plan says 128"
    )
