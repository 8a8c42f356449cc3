"""What the quantising norms of the stand-ins compute, how their scales lie, and what they refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import StandInMisuse
from torch import Tensor

EPS = 1e-5
E4M3FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    """In float64, by the formula."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + offset)


def scales_of(values: Tensor, group: int, largest: float = 448.0) -> Tensor:
    return values.unflatten(-1, (-1, group)).abs().amax(-1).clamp(min=1e-10) / largest


def close(quantised: Tensor, scales: Tensor, expected: Tensor, group: int, largest: float = 448.0) -> None:
    """Scales to float32, and values to the spacing of fp8."""
    torch.testing.assert_close(scales.double(), scales_of(expected, group, largest), rtol=1e-5, atol=0)
    back = quantised.double().unflatten(-1, (-1, group)) * scales.double().unsqueeze(-1)
    torch.testing.assert_close(back.flatten(-2), expected, rtol=0.07, atol=float(scales.max()))


def qk_arguments(rows: int = 5, group: int = 32, width: int = 128, dtype: torch.dtype = E4M3FN) -> dict[str, Any]:
    q, k = random(rows, width), random(rows, 48, seed=1)
    return {
        "q_out_quantized": torch.zeros(rows, width, dtype=dtype),
        "q_out_scale": torch.zeros(rows, width // group),
        "q": q,
        "q_weight": random(width, seed=2),
        "q_epsilon": EPS,
        "q_out_unquantized": torch.zeros_like(q),
        "k_out": torch.zeros_like(k),
        "k": k,
        "k_weight": random(48, seed=3),
        "group_size": group,
    }


def test_transposed_scales_lie_in_columns(aiter_of: Callable[..., Any]) -> None:
    """In a contiguous tensor the bytes are column-major, and indexing it is wrong; strides of (1, m) index right."""
    package, plain, packed, strided = aiter_of("v0.1.20"), qk_arguments(), qk_arguments(), qk_arguments()
    strided["q_out_scale"] = torch.zeros(4, 5).t()
    package.fused_qk_rmsnorm_group_quant(**plain)
    package.fused_qk_rmsnorm_group_quant(**packed, transpose_scale=True)
    package.fused_qk_rmsnorm_group_quant(**strided, transpose_scale=True)
    right = plain["q_out_scale"]
    assert torch.equal(strided["q_out_scale"], right)
    assert not torch.equal(packed["q_out_scale"], right)
    assert torch.equal(packed["q_out_scale"].view(4, 5).t(), right)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"group_size": 16, "q_out_scale": torch.zeros(5, 8)}, RuntimeError, "group_size not support"),
        ({"group_size": 0}, ValueError, "group_size > 0"),
        ({"q_out_quantized": None}, ValueError, "must be provided"),
        ({"q_out_quantized": torch.zeros(5, 128, dtype=FNUZ)}, ValueError, "output quant only"),
        ({"q_out_scale": torch.zeros(5, 3)}, RuntimeError, "q_out_scale must be"),
        ({"q_out_scale": None, "q_out_unquantized": None}, ValueError, "without scales"),
        ({"k_out": None}, RuntimeError, "k_out is required"),
        ({"k": random(4, 48)}, RuntimeError, "same leading dim"),
        ({"q": random(128, 5).t()}, RuntimeError, "stride"),
        ({"q_residual": random(5, 128)}, RuntimeError, "q_res_out is required"),
        ({"q_weight": random(64)}, RuntimeError, "as many elements"),
        ({"gemma_norm": 128}, StandInMisuse, "another release"),
    ],
)
def test_what_the_group_form_refuses(
    aiter_of: Callable[..., Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        aiter_of("v0.1.20").fused_qk_rmsnorm_group_quant(**{**qk_arguments(), **change})


def test_one_scale_per_token(aiter_of: Callable[..., Any]) -> None:
    package, given = aiter_of("v0.1.16.post3"), qk_arguments(group=128)
    del given["group_size"]
    with pytest.raises(ValueError, match=r"\[m, 1\]"):
        package.fused_qk_rmsnorm_per_token_quant(**{**given, "q_out_scale": torch.zeros(5)})


# ---- the family of rmsnorm


@pytest.mark.parametrize("width", [4224, 5120, 6144])
def test_the_hole_between_4096_and_6144(aiter_of: Callable[..., Any], width: int) -> None:
    package, x = aiter_of("v0.1.20"), random(2, width)
    out, scale = torch.zeros(2, width, dtype=E4M3FN), torch.zeros(2, width // 128)
    with pytest.raises(RuntimeError, match="group_size not support"):
        package.rmsnorm_quant(out, x, scale, random(width), EPS, 128)
    package.rmsnorm_quant(out, x, torch.zeros(2), random(width), EPS)


# ---- Triton


def test_tritons_static_quantisation(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    function = importlib.import_module("aiter.ops.triton.quant").fused_rms_fp8_per_tensor_static_quant
    x, weight, scale = random(5, 64), random(64, seed=1), torch.tensor(0.02)
    values, *rest = function(x, weight, EPS, scale)
    torch.testing.assert_close(values.double() * 0.02, exact(x, weight), rtol=0.07, atol=0.01)
    assert rest == [None, None, None]
    with pytest.raises(StandInMisuse, match="chosen by inp2 alone"):
        function(x, weight, EPS, scale, x[:, :32], weight[:32], EPS)


# ---- gated


def gated(x: Tensor, z: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    gate = z.double().sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(z.double())
    return exact(x, weight) * gate


@pytest.mark.parametrize(("arch", "largest"), [("gfx942", 224.0), ("gfx950", 448.0)])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_tritons_gated_norm(aiter_of: Callable[..., Any], arch: str, largest: float, activation: str) -> None:
    aiter_of("v0.1.16.post3", arch=arch)
    function = importlib.import_module("aiter.ops.triton.quant").fused_rms_gated_fp8_group_quant
    x, z, weight = random(6, 64), random(6, 64, seed=1), random(64, seed=2)
    values, scales = function(x, weight, None, z, EPS, activation=activation)
    assert scales.shape == (6,)
    close(values, scales.view(6, 1), gated(x, z, weight, activation), 64, largest)
    values, scales = function(x, weight, None, z, EPS, activation=activation, group_size=32)
    close(values, scales, gated(x, z, weight, activation), 32, largest)
    with pytest.raises(StandInMisuse, match="no gate at all"):
        function(x, weight, None, z, EPS, activation="relu")
    with pytest.raises(AssertionError, match="contiguous"):
        function(x.t(), weight, None, z.t(), EPS)


def test_the_gated_norm_of_heads(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    function = importlib.import_module("aiter.ops.gated_rmsnorm_fp8_group_quant").gated_rmsnorm_fp8_group_quant
    x, z, weight = random(5, 3, 128), random(5, 3, 128, seed=1), random(128, seed=2)
    out, scale, columns = torch.zeros(5, 384, dtype=E4M3FN), torch.zeros(5, 3), torch.zeros(3, 5)
    function(out, scale, x, z, weight, EPS, 128)
    close(out, scale, gated(x, z, weight).flatten(1), 128)
    function(out, columns, x, z, weight, EPS, 128, True)
    assert torch.equal(columns.t(), scale)
    views = random(5, 6, 128)[:, :3], z
    function(out, scale, *views, weight, EPS, 128)
    with pytest.raises(AssertionError, match="Unsupported dtype"):
        function(torch.zeros(5, 384, dtype=FNUZ), scale, x, z, weight, EPS, 128)
    with pytest.raises(RuntimeError, match="ONLY group_size=128"):
        function(out, scale, x, z, weight, EPS, 64)


def test_the_gated_norm_of_tokens(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.18")
    function = importlib.import_module("aiter.ops.gated_rmsnorm_fp8_per_token_quant").gated_rmsnorm_fp8_per_token_quant
    x, z, weight = random(5, 3, 128), random(5, 3, 128, seed=1), random(128, seed=2)
    out, scale = torch.zeros(5, 384, dtype=E4M3FN), torch.zeros(5)
    function(out, scale, x, z, weight, EPS)
    close(out, scale.view(5, 1), gated(x, z, weight).flatten(1), 384)
    with pytest.raises(RuntimeError, match="elements"):
        function(out, torch.zeros(4), x, z, weight, EPS)
