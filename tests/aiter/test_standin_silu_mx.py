"""The stand-ins of the gated activations and of the MX norms do what AITER's sources do, held to arithmetic in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import StandInMisuse
from torch import Tensor

E4M3FN, EPS = torch.float8_e4m3fn, 1e-5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def silu_mul(x: Tensor, limit: float = float("inf")) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-gate)) * up


def exact(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(values: Tensor, scales: Tensor, expected: Tensor, group: int) -> None:
    amax = expected.unflatten(-1, (-1, group)).abs().amax(-1)
    torch.testing.assert_close(scales.double(), amax / 448, rtol=1e-5, atol=0)
    back = values.double().unflatten(-1, (-1, group)) * scales.double().unsqueeze(-1)
    torch.testing.assert_close(back.flatten(-2), expected, rtol=0.07, atol=float(scales.max()))


def of(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("width", "group", "error", "message"),
    [
        (5120, 128, StandInMisuse, "other columns are reduced"),
        (8448, 128, RuntimeError, "d > 8192"),
        (192, 128, RuntimeError, "divisible"),
        (192, 96, RuntimeError, "power of 2"),
        (1024, 1024, StandInMisuse, "other columns are reduced"),
    ],
)
def test_what_the_activation_of_hip_cannot_do(
    aiter_of: Callable[..., Any], width: int, group: int, error: type[Exception], message: str
) -> None:
    package = aiter_of("v0.1.20")
    out, scale = torch.zeros(2, width, dtype=E4M3FN), torch.zeros(2, width // group)
    with pytest.raises(error, match=message):
        package.silu_and_mul_quant(out, random(2, 2 * width), scale, group)


def test_the_activation_of_hip_reads_no_stride(aiter_of: Callable[..., Any]) -> None:
    out, scale = torch.zeros(4, 128, dtype=E4M3FN), torch.zeros(4, 1)
    with pytest.raises(StandInMisuse, match="reads no stride"):
        aiter_of("v0.1.20").silu_and_mul_quant(out, random(4, 300)[:, :256], scale, 128)


def test_the_activation_that_cuts(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    function, x = of("aiter.ops.triton.fusions.fused_clamp_act_mul:fused_clamp_act_mul"), random(5, 768)
    with pytest.raises(AssertionError, match="128"):
        function(x[:, :400], dtype_quant=E4M3FN)
    values, scales = function(x, dtype_quant=E4M3FN, quant_block_size=512)
    assert scales.shape == (5, 1)
    close(values, scales, silu_mul(x), 384)


def test_a_short_group_counts_what_was_never_loaded(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    with pytest.raises(StandInMisuse, match="not loaded"):
        of("aiter.ops.triton.activation:act_mul_and_fp8_group_quant")(random(2, 384), "silu", 128)


def test_bytes_for_scales_came_late(aiter_of: Callable[..., Any]) -> None:
    x, weight = random(4, 64), random(64, seed=1)
    out, scale = torch.zeros(4, 64, dtype=E4M3FN), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(StandInMisuse, match="float32 is written"):
        aiter_of("v0.1.17").rmsnorm_quant(out, x, scale, weight, EPS, 32)
    aiter_of("v0.1.18").rmsnorm_quant(out, x, scale, weight, EPS, 32)
    expected, power = exact(x, weight), torch.exp2(scale.double() - 127)
    largest = expected.unflatten(-1, (-1, 32)).abs().amax(-1) / power
    assert largest.max() <= 448
    assert largest.min() > 224
    back = out.double().unflatten(-1, (-1, 32)) * power.unsqueeze(-1)
    torch.testing.assert_close(back.flatten(-2), expected, rtol=0.07, atol=float(power.max()) / 500)


def test_mxfp8_doubles_the_scale_of_what_is_exactly_the_largest(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    function = of("aiter.ops.triton.quant.fused_mxfp8_quant:fused_rms_mxfp8_quant")
    x = torch.full((1, 32), 448.0).bfloat16()
    values, scale = function(x, x[0], 0.0)  # a norm of ones, times 448
    assert (scale.item(), values.float().unique().item()) == (128, 224.0)
    _, scale = function(x, (x[0] - 2).contiguous(), 0.0)
    assert scale.item() == 127
    with pytest.raises(AssertionError, match="2D"):
        function(x[0], x[0], 0.0)
