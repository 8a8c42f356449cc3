"""What only looks like the quantised fusion, or is not the plan's, stays as it is, and the report says why; the norms still fuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, Q, mla_spec, torch_norm, trace
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
    torchao_row,
    trace_quantised,
    vllm_group,
    vllm_per_token,
)  # fmt: skip
from torch import Tensor

from layerfuse.fusion import plan

# ---- quantisations of another kind ---------------------------------------------------------------------------------


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


def scale_for_half(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.view(-1, 2, Q // 2).abs().amax(-1).amax(-1, keepdim=True).float() / MAX
    return (x / scale).to(FP8), scale


def only_values(x: Tensor) -> tuple[Tensor, ...]:
    return canonical_per_token(x)[:1]


def each_by_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs() / MAX
    return (x / scale).to(FP8), scale


def nearest_power(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(torch.round(torch.log2(x.abs().amax(-1, keepdim=True) / MAX)))
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def rooted_power(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(torch.ceil(x.abs().amax(-1, keepdim=True) / MAX))
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


def spread(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.view(-1, 12, 128).abs().amax(-1) / MAX
    return (x / scale.repeat_interleave(128, -1)).to(FP8), scale


def other_quotient(x: Tensor) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(-1, keepdim=True)
    return (x * (MAX / amax)).to(FP8), amax / 240.0


def no_inverse(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / MAX
    return (x * scale).to(FP8), scale


def by_itself(x: Tensor) -> tuple[Tensor, ...]:
    return ((x * x).to(FP8),)


def scale_bounded_by_a_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.maximum(x.abs().amax(-1, keepdim=True), x[:1, :1]) / MAX
    return (x / scale).clamp(-MAX, MAX).to(FP8), scale


KINDS: list[tuple[Any, str]] = [
    (each_by_itself, "is magnitudes, divided by the largest value of the format: there is none for each row"),
    (nearest_power, "the scale comes from exp2, which is no step of a known quantisation"),
    (rooted_power, "the scale comes from exp2, which is no step of a known quantisation"),
    (spread, "the scale comes from "),
    (other_quotient, "0 quotients by the format's largest value should be one, the scale"),
    (no_inverse, "the values are multiplied by div, which is no inverse of a scale"),
    (by_itself, "which is not the result over a scale"),
    (scale_bounded_by_a_tensor, "the scale comes from maximum, which is no step of a known quantisation"),
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
    (to_int8, "nothing quantises the result"),
    (of_something_else, "which is not the result over a scale"),
    (scale_of_something_else, "and not from the values that are quantised"),
    (keeps_the_largest, "the intermediate clamp_min of the quantisation, which a fused op does not compute"),
    (keeps_the_quotient, "the intermediate div_1 of the quantisation"),
    (shares_with_another, "is shared: div_2 scales something else by it"),
    (scale_for_half, "is written in no known form"),
    (only_values, "one of the two results of quantise_per_token is not read"),
    (lambda x: (x,), "nothing quantises the result mul_1; its readers: output"),
]


@pytest.mark.parametrize(("quantise", "reason"), KINDS)
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

PER_TOKEN_SCALES = "the graph quantises with one scale per token, the plan says 128"
ROW_BY_ROW = "the graph has the scales row by row, the plan column by column"
COLUMN_BY_COLUMN = "the graph has the scales column by column, the plan row by row"


@pytest.mark.parametrize(
    ("quantise", "quant", "reason"),
    [
        (vllm_group, "group64", "the graph quantises groups of 128, the plan says 64"),
        (vllm_group, "per_token", "the graph quantises groups of 128, the plan says one scale per token"),
        (vllm_per_token, "group128", PER_TOKEN_SCALES),
        (canonical_per_token, "group128", PER_TOKEN_SCALES),
        (lambda x: sglang_group(x, 48), "group128", "the graph quantises groups of 48, the plan says 128"),
        (vllm_group, "group128,ue8m0", "the graph's scales are not rounded, the plan's powers of two"),
        (lambda x: vllm_group(x, ue8m0=True), "group128", "the graph's scales are powers of two, the plan's not rounded"),
        (vllm_group, "group128,column_major", ROW_BY_ROW),
        (canonical_group, "group128,column_major", ROW_BY_ROW),
        (lambda x: vllm_group(x, column_major=True), "group128", COLUMN_BY_COLUMN),
        (lambda x: canonical_group(x, column=True), "group128", COLUMN_BY_COLUMN),
    ],
)  # fmt: skip
def test_another_quantisation_than_planned(quantise: Any, quant: str, reason: str) -> None:
    assert_left(Quantised(quantise), quant, reason)


def test_another_format_than_the_targets() -> None:
    reason = "the graph quantises to torch.float8_e4m3fn, and cpu takes e4m3fnuz"
    assert_left(Quantised(vllm_per_token), "per_token", reason, target=CPU_FNUZ)


def test_columns_of_rows_in_two_dimensions() -> None:
    # Each batch column by column is not the whole column by column.
    module = Quantised(lambda x: vllm_group(x, column_major=True))
    assert_left(module, "group128,column_major", "neither row by row nor column by column", x=torch.randn(2, 3, HIDDEN))


@pytest.mark.parametrize("quantise", [vllm_group, canonical_group])
def test_where_the_norm_is_off_too_nothing_changes_but_canonical_ops(quantise: Any) -> None:
    module, x = Quantised(quantise), torch.randn(5, HIDDEN)
    off = trace_quantised(module, x, "per_token", config=config("per_token", switches={PLAIN: False}))
    (said,) = off.report.of(fusion_of("per_token")).missed.values()
    assert "the graph quantises groups of 128" in said and "instead" not in said
    assert (off.before == off.after) == ("layerfuse.quantise" not in off.before[0])
    for got, wanted in zip(off.output, trace(module, x, specs=[]).output, strict=True):
        assert torch.equal(got.float(), wanted.float())


def test_only_what_is_declared_is_looked_for() -> None:
    traced = trace(Quantised(vllm_per_token), torch.randn(5, HIDDEN), specs=[mla_spec()])
    assert traced.fused == 1
    assert "_quant(" not in traced.after[0]
    declared, undeclared = plan([mla_spec()], CPU_FP8, config("per_token")), plan([mla_spec()], CPU_FP8)
    assert [d.fusion for d in declared.expected()] == [fusion_of("per_token")]
    assert [d.fusion for d in declared.fallback()] == [d.fusion for d in undeclared.expected()] == [PLAIN]
    assert undeclared.fallback() == ()
