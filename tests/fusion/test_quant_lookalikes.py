"""What only looks like the quantised fusion stays as it is bit for bit, and the report says why; the norms still fuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, Q, torch_norm
from quant_support import (
    FP8,
    MAX,
    Quantised,
    assert_left,
    canonical_per_token,
    torchao_row,
    vllm_per_token,
)
from torch import Tensor

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


@pytest.mark.parametrize(
    ("quantise", "reason"),
    [
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
