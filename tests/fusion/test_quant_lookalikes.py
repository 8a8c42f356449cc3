"""What only looks like the quantised fusion stays as it is bit for bit, and the report says why; the norms still fuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import FUSION, HIDDEN, FusedProjection, Q, mla_spec, torch_norm, trace
from quant_support import (
    CPU_FNUZ,
    CPU_FP8,
    FP8,
    MAX,
    Quantised,
    canonical_group,
    canonical_per_token,
    config,
    fusion_of,
    sglang_group,
    torchao_row,
    trace_quantised,
    vllm_group,
    vllm_per_token,
)  # fmt: skip
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from layerfuse.fusion import plan
from layerfuse.fusion.passes import MLADualRMSNormPerTokenQuantPass, Pipeline


class Wrapped(nn.Module):
    """Puts a module at a path that a spec can name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def assert_left(module: nn.Module, quant: str, reason: str, *, plain: bool = True, **kwargs: Any) -> None:
    x = kwargs.pop("x", None)
    x = torch.randn(5, HIDDEN) if x is None else x
    given: dict[str, Any] = {"specs": [("layer", mla_spec())], "by_weight": True, **kwargs}
    # The plain norm off: nothing at all changes.
    off = trace_quantised(Wrapped(module), x, quant, **{**given, "config": config(quant, switches={FUSION: False})})
    assert off.before == off.after or "layerfuse.quantise" in off.before[0]  # canonical ops are lowered
    (said,) = off.report.of(fusion_of(quant)).missed.values()
    assert said.endswith(reason) or reason in said, said
    assert "instead" not in said
    unfused = trace(Wrapped(module), x, specs=[], by_weight=True)
    for got, wanted in zip(off.output, unfused.output, strict=True):
        assert torch.equal(got.float().nan_to_num(), wanted.float().nan_to_num())
    # The plain norm on: it takes the pair, and both say so.
    traced = trace_quantised(Wrapped(module), x, quant, **given)
    verdict, fallback = traced.report.of(fusion_of(quant)), traced.report.of(FUSION)
    assert verdict.matched == ()
    assert not any("_quant(" in text for text in traced.after)
    assert traced.fused == len(fallback.instead) == plain
    (said,) = verdict.missed.values()
    assert said.endswith("; mla_dual_rms_norm was fused there instead") == plain
    assert fallback.expected == fallback.matched == ()
    assert fallback.complete and not verdict.complete


# ---- quantisations of another kind ---------------------------------------------------------------------------------


class Static(FusedProjection):
    """The scale is a parameter, measured beforehand."""

    def __init__(self, inverse: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.01]))
        self.inverse = inverse

    def forward(self, x: Tensor) -> Any:
        q, kv, _ = self.split(x)
        query = self.q_norm(q)
        scaled = query * self.scale.reciprocal() if self.inverse else query / self.scale
        return scaled.clamp(-MAX, MAX).to(FP8), self.kv_norm(kv)


@pytest.mark.parametrize("inverse", [True, False])
def test_a_static_scale(inverse: bool) -> None:
    assert_left(Static(inverse), "per_token", "is static: it does not come from the values")


def per_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().max().unsqueeze(-1).to(torch.float32) / MAX).clamp(min=1e-9)
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def per_channel(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(0, keepdim=True).float() / MAX
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8), scale


def across_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, 5 * Q)
    scale = rows.abs().amax(-1, keepdim=True).float() / MAX
    return (rows / scale).to(FP8).reshape(x.shape), scale


def bounded(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(max=3.0) / MAX
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / MAX * 2
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def of_the_root(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().sqrt() / MAX
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def smaller_range(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / 224.0
    return (x / scale).clamp(-224.0, 224.0).to(FP8), scale


def clamped_lower(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / MAX
    return (x / scale).clamp(-100.0, 100.0).to(FP8), scale


def high_floor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1.0) / MAX
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def not_magnitudes(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.amax(-1, keepdim=True).float() / MAX
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def no_scale(x: Tensor) -> tuple[Tensor, ...]:
    return (x.clamp(-MAX, MAX).to(FP8),)


def by_a_number(x: Tensor) -> tuple[Tensor, ...]:
    return ((x / 0.25).to(FP8),)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return (x / scale).round().to(torch.int8), scale


def of_something_else(x: Tensor) -> tuple[Tensor, Tensor]:
    return vllm_per_token(x * 2)


def scale_of_something_else(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x + 1).abs().amax(-1, keepdim=True).float() / MAX
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def keeps_the_largest(x: Tensor) -> tuple[Tensor, ...]:
    amax = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-10)
    return (x / (amax / MAX)).clamp(-MAX, MAX).to(FP8), amax


def keeps_the_quotient(x: Tensor) -> tuple[Tensor, ...]:
    quotient = x.float() / (x.abs().amax(-1, keepdim=True).float() / MAX)
    return quotient.to(FP8), quotient


def shares_with_another(x: Tensor) -> tuple[Tensor, ...]:
    values, scale = torchao_row(x)
    return values, scale, torch.ones(5, Q) / scale


def unquantised_too(x: Tensor) -> tuple[Tensor, ...]:
    return (*vllm_per_token(x), x)


def view_is_read(x: Tensor) -> tuple[Tensor, ...]:
    return (*vllm_group(x), x.view(-1, 128).sum())


def scale_for_half(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.view(-1, 2, Q // 2).abs().amax(-1).amax(-1, keepdim=True).float() / MAX
    return (x / scale).to(FP8), scale


def only_values(x: Tensor) -> tuple[Tensor, ...]:
    return canonical_per_token(x)[:1]


@pytest.mark.parametrize(
    ("quantise", "reason"),
    [
        (per_tensor, "takes one scale for the whole tensor"),
        (per_channel, "along dimensions [0], not along the last"),
        (across_rows, "takes the largest of 7680 values, which are no part of one row of 1536"),
        (bounded, "the scale is bounded above (clamp_max), and the fused op's is not"),
        (doubled, "multiplies the scale by 2; the largest torch.float8_e4m3fn is 448"),
        (of_the_root, "the scale comes from sqrt, which is no step of a known quantisation"),
        (smaller_range, "clamps to 224.0, and the format reaches 448"),
        (clamped_lower, "clamps to 100.0, and the format reaches 448"),
        (high_floor, "raises the largest magnitude of a row to 1, which concerns more than tiny rows"),
        (not_magnitudes, "is written in no known form (the largest along the last dimension, divided by"),
        (no_scale, "to fp8, which no scale was applied to"),
        (by_a_number, "static scale"),
        (to_int8, "nothing quantises the normed query"),
        (of_something_else, "which is not the normed query over a scale"),
        (scale_of_something_else, "and not from the values that are quantised"),
        (keeps_the_largest, "the intermediate clamp_min of the quantisation, which a fused op does not compute"),
        (keeps_the_quotient, "the intermediate div_1 of the quantisation"),
        (shares_with_another, "is shared: div_2 scales something else by it"),
        (unquantised_too, "output reads the normed query too, and needs it unquantised"),
        (view_is_read, "sum_1 reads the normed query too, and needs it unquantised"),
        (scale_for_half, "is written in no known form"),
        (only_values, "one of the two results of quantise_per_token is not read"),
        (lambda x: (x,), "nothing quantises the normed query mul_1 to fp8; its readers: output"),
    ],
)
def test_another_kind_of_quantisation(quantise: Any, reason: str) -> None:
    class Module(Quantised):
        def forward(self, x: Tensor) -> Any:
            q, kv, k_pe = self.split(x)
            return *self.quantise(self.q_norm(q)), self.kv_norm(kv), k_pe.exp()

    assert_left(Module(quantise), "per_token", reason)


def test_scales_in_low_precision() -> None:
    def low(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / MAX
        return (x / scale).to(FP8), scale

    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    assert_left(Quantised(low).bfloat16(), "per_token", "is torch.bfloat16, and the fused op's are torch.float32", x=x)


def test_float64() -> None:
    module, x = Quantised(torchao_row, torch_norm).double(), torch.randn(5, HIDDEN, dtype=torch.float64)
    assert_left(module, "per_token", "is torch.float64", x=x)


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


def test_two_quantisations_that_differ() -> None:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        return (*vllm_group(x), *vllm_group(x, 64))

    class Module(Quantised):
        def forward(self, x: Tensor) -> Any:
            q, kv, _ = self.split(x)
            return *self.quantise(self.q_norm(q)), self.kv_norm(kv)

    assert_left(Module(both), "group128", "the graph quantises groups of 64, the plan says 128")


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

    module = Wrapped(Weighted(vllm_per_token))
    specs = [("layer", mla_spec())]
    traced = trace_quantised(module, torch.randn(5, HIDDEN), "per_token", specs=specs, by_weight=True, grad=True)
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
        Wrapped(Breaks(vllm_per_token)),
        torch.randn(5, HIDDEN),
        "per_token",
        specs=[("layer", mla_spec())],
        by_weight=True,
    )
    verdict = traced.report.of(fusion_of("per_token"))
    assert "nothing quantises the normed query" in verdict.missed["layer"]
    assert verdict.missed["layer"].endswith("; mla_dual_rms_norm was fused there instead")
    assert traced.fused == 1


# ---- graphs that really write in place -----------------------------------------------------------------------------


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("the query", "nothing quantises the normed query"),
        ("the scale", "the scale comes from mul_, which is no step of a known quantisation"),
        ("elsewhere", "writes in place between the norm and its quantisation"),
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
    module = make_fx(function, tracing_mode="fake")(*inputs)
    each = MLADualRMSNormPerTokenQuantPass(plan([mla_spec()], CPU_FP8, config("per_token")))
    each(module.graph)
    module.graph.lint()
    module.recompile()
    assert str(module.graph).count("per_token_quant.default") == (reason is None)
    verdict = each.report.of(fusion_of("per_token"))
    assert verdict.complete == (reason is None)
    if reason is not None:
        assert reason in verdict.missed["layer 0"]
        for got, wanted in zip(module(*inputs), function(*inputs), strict=True):
            assert torch.equal(got.float(), wanted.float())


def test_only_what_is_declared_is_looked_for() -> None:
    traced = trace(Quantised(vllm_per_token), torch.randn(5, HIDDEN), specs=[mla_spec()])
    assert traced.fused == 1
    assert "_quant(" not in traced.after[0]
    assert len(Pipeline(plan([mla_spec()], CPU_FP8, config("per_token"))).passes) == 3
    assert len(Pipeline(plan([mla_spec()], CPU_FP8)).passes) == 2


def test_sglang_in_groups_that_no_plan_has() -> None:
    assert_left(
        Quantised(lambda x: sglang_group(x, 48)), "group128", "the graph quantises groups of 48, the plan says 128"
    )
