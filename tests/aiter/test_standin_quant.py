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
GROUPS = "aiter.ops.fused_qk_rmsnorm_group_quant"


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


@pytest.mark.parametrize("release", ["v0.1.12", "v0.1.13", "v0.1.20"])
def test_q_is_quantised_in_groups_and_k_is_not(aiter_of: Callable[..., Any], release: str) -> None:
    package, given = aiter_of(release), qk_arguments()
    assert package.fused_qk_rmsnorm_group_quant(**given) is None
    expected = exact(given["q"], given["q_weight"])
    close(given["q_out_quantized"], given["q_out_scale"], expected, 32)
    torch.testing.assert_close(given["q_out_unquantized"].double(), expected, rtol=8e-3, atol=1e-4)
    expected = exact(given["k"], given["k_weight"])
    torch.testing.assert_close(given["k_out"].double(), expected, rtol=8e-3, atol=1e-4)


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


def test_the_residual_is_rounded_but_its_norm_is_not(aiter_of: Callable[..., Any]) -> None:
    given = {**qk_arguments(), "q_residual": random(5, 128, seed=7), "q_res_out": torch.zeros(5, 128).bfloat16()}
    aiter_of("v0.1.20").fused_qk_rmsnorm_group_quant(**given, gemma_norm=True)
    total = given["q"].double() + given["q_residual"].double()
    assert torch.equal(given["q_res_out"], total.bfloat16())
    close(given["q_out_quantized"], given["q_out_scale"], exact(total, given["q_weight"], 1.0), 32)


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


def test_the_first_release_takes_no_views(aiter_of: Callable[..., Any]) -> None:
    given = {**qk_arguments(), "q": random(5, 200)[:, :128]}
    first = aiter_of("v0.1.12").fused_qk_rmsnorm_group_quant
    with pytest.raises(RuntimeError, match="must be contiguous"):
        first(**given)
    strided = {**qk_arguments(), "q_out_scale": torch.zeros(4, 5).t(), "transpose_scale": True}
    with pytest.raises(RuntimeError, match="q_out_scale must be contiguous"):
        first(**strided)
    second = aiter_of("v0.1.12.post1").fused_qk_rmsnorm_group_quant
    second(**given)
    second(**strided)


def test_one_scale_per_token(aiter_of: Callable[..., Any]) -> None:
    package, given = aiter_of("v0.1.14-rc0"), qk_arguments(group=128)
    del given["group_size"]
    package.fused_qk_rmsnorm_per_token_quant(**given)
    close(given["q_out_quantized"], given["q_out_scale"], exact(given["q"], given["q_weight"]), 128)
    with pytest.raises(ValueError, match=r"\[m, 1\]"):
        package.fused_qk_rmsnorm_per_token_quant(**{**given, "q_out_scale": torch.zeros(5)})


def test_the_dispatcher(aiter_of: Callable[..., Any]) -> None:
    package, given, direct = aiter_of("v0.1.20"), qk_arguments(), qk_arguments()
    kinds = package.QuantType
    package.fused_qk_rmsnorm(**given, quant_type=kinds.per_1x32)
    package.fused_qk_rmsnorm_group_quant(**direct)
    assert torch.equal(given["q_out_scale"], direct["q_out_scale"])
    with pytest.raises(NotImplementedError):
        package.fused_qk_rmsnorm(**given, quant_type=kinds.per_Tensor)
    q, k = given["q"], given["k"]
    plain = {"q": q, "q_weight": given["q_weight"], "k": k, "k_weight": given["k_weight"], "k_epsilon": EPS}
    plain |= {"q_epsilon": EPS, "q_out_quantized": torch.zeros_like(q), "k_out": torch.zeros_like(k)}
    assert package.fused_qk_rmsnorm(**plain) is None
    assert torch.equal(plain["q_out_quantized"], given["q_out_unquantized"])
    with pytest.raises(StandInMisuse, match="silently ignored"):
        package.fused_qk_rmsnorm(**plain, gemma_norm=True)
    with pytest.raises(StandInMisuse, match="would be lost"):
        package.fused_qk_rmsnorm(**{**plain, "q_out_quantized": None})


# ---- the family of rmsnorm


@pytest.mark.parametrize(("release", "arch"), [("v0.1.5", "gfx942"), ("v0.1.16", "gfx950"), ("v0.1.20", "gfx942")])
def test_dynamic_quantisation_per_token(aiter_of: Callable[..., Any], release: str, arch: str) -> None:
    package, x, weight = aiter_of(release, arch=arch), random(4, 64), random(64, seed=1)
    dtype, largest = (FNUZ, 240.0) if arch == "gfx942" else (E4M3FN, 448.0)
    out, scale = torch.zeros(4, 64, dtype=dtype), torch.zeros(4, 1)
    package.rmsnorm2d_fwd_with_dynamicquant(out, x, scale, weight, EPS)
    close(out, scale, exact(x, weight), 64, largest)
    wrong = torch.zeros(4, 64, dtype=E4M3FN if dtype == FNUZ else FNUZ)
    with pytest.raises((AssertionError, RuntimeError), match=r"Unsupported dtype|not support output type"):
        package.rmsnorm2d_fwd_with_dynamicquant(wrong, x, scale, weight, EPS)


def test_group_scales_in_either_order(aiter_of: Callable[..., Any]) -> None:
    package, x, weight, residual = aiter_of("v0.1.20"), random(4, 256), random(256, seed=1), random(4, 256, seed=2)
    out, rows, columns = torch.zeros(4, 256, dtype=E4M3FN), torch.zeros(4, 4), torch.zeros(4, 4)
    summed = torch.zeros_like(x)
    package.add_rmsnorm_quant(out, x, residual, summed, rows, weight, EPS, group_size=64)
    package.add_rmsnorm_quant(out, x, residual, summed, columns, weight, EPS, 64, True)
    close(out, rows, exact(x.double() + residual.double(), weight), 64)
    assert torch.equal(columns.view(-1), rows.t().reshape(-1))


@pytest.mark.parametrize("width", [4224, 5120, 6144])
def test_the_hole_between_4096_and_6144(aiter_of: Callable[..., Any], width: int) -> None:
    package, x = aiter_of("v0.1.20"), random(2, width)
    out, scale = torch.zeros(2, width, dtype=E4M3FN), torch.zeros(2, width // 128)
    with pytest.raises(RuntimeError, match="group_size not support"):
        package.rmsnorm_quant(out, x, scale, random(width), EPS, 128)
    package.rmsnorm_quant(out, x, torch.zeros(2), random(width), EPS)


def test_the_ck_kernel_takes_no_groups(aiter_of: Callable[..., Any]) -> None:
    package, x = aiter_of("v0.1.16"), random(2, 64)
    out, scale = torch.zeros(2, 64, dtype=E4M3FN), torch.zeros(2, 1)
    with pytest.raises(AssertionError, match="CK takes neither"):
        package.rmsnorm2d_fwd_with_dynamicquant(out, x, scale, random(64), EPS, 1, 64)


# ---- Triton


@pytest.mark.parametrize("release", ["v0.1.6.post2", "v0.1.10", "v0.1.20"])
def test_tritons_group_quantisation(aiter_of: Callable[..., Any], release: str) -> None:
    aiter_of(release)
    function = importlib.import_module("aiter.ops.triton.fused_fp8_quant").fused_rms_fp8_group_quant
    x, weight, residual = random(5, 96), random(96, seed=1), random(5, 96, seed=2)
    (values, scales), unquantised, second, summed = function(x, weight, EPS, group_size=32)
    close(values, scales, exact(x, weight), 32)
    assert (unquantised, second, summed) == (None, None, None)
    (_, columns), unquantised, second, summed = function(
        x,
        weight,
        EPS,
        x[:, :64],
        weight[:64],
        EPS,
        32,
        res1=residual,
        output_unquantized_inp1=True,
        transpose_scale=True,
    )
    total = x.double() + residual.double()
    assert columns.is_contiguous() and columns.shape == (5, 3)
    torch.testing.assert_close(columns.view(3, 5).t().double(), scales_of(exact(total, weight), 32), rtol=1e-5, atol=0)
    torch.testing.assert_close(unquantised.double(), exact(total, weight), rtol=8e-3, atol=1e-4)
    torch.testing.assert_close(second.double(), exact(x[:, :64], weight[:64]), rtol=8e-3, atol=1e-4)
    assert torch.equal(summed, total.bfloat16())


def test_strided_scales_came_late(aiter_of: Callable[..., Any]) -> None:
    x, weight = random(5, 64), random(64, seed=1)
    aiter_of("v0.1.19.post1")
    function = importlib.import_module("aiter.ops.triton.quant").fused_rms_fp8_group_quant
    (_, scales), *_ = function(x, weight, EPS, group_size=32, transpose_scale=True, is_x_scale_strided=True)
    assert scales.stride() == (1, 5)
    torch.testing.assert_close(scales.double(), scales_of(exact(x, weight), 32), rtol=1e-5, atol=0)
    aiter_of("v0.1.19")
    with pytest.raises(TypeError, match="is_x_scale_strided"):
        importlib.import_module("aiter.ops.triton.quant").fused_rms_fp8_group_quant(
            x, weight, EPS, is_x_scale_strided=True
        )


def test_tritons_static_quantisation(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    function = importlib.import_module("aiter.ops.triton.quant").fused_rms_fp8_per_tensor_static_quant
    x, weight, scale = random(5, 64), random(64, seed=1), torch.tensor(0.02)
    values, *rest = function(x, weight, EPS, scale)
    torch.testing.assert_close(values.double() * 0.02, exact(x, weight), rtol=0.07, atol=0.01)
    assert rest == [None, None, None]
    with pytest.raises(StandInMisuse, match="chosen by inp2 alone"):
        function(x, weight, EPS, scale, x[:, :32], weight[:32], EPS)


def test_the_activation_with_quantisation(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20", arch="gfx942")
    function = importlib.import_module("aiter.ops.triton.activation").act_mul_and_fp8_group_quant
    x = random(3, 128)
    values, scales = function(x, "silu", 32)
    assert values.dtype == FNUZ
    close(values, scales, torch.nn.functional.silu(x[:, :64].double()) * x[:, 64:].double(), 32, 240.0)


# ---- gated


def gated(x: Tensor, z: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    gate = z.double().sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(z.double())
    return exact(x, weight) * gate


@pytest.mark.parametrize(("arch", "largest"), [("gfx942", 224.0), ("gfx950", 448.0)])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_tritons_gated_norm(aiter_of: Callable[..., Any], arch: str, largest: float, activation: str) -> None:
    aiter_of("v0.1.13-rc2", arch=arch)
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


@pytest.mark.parametrize("release", ["v0.1.12.post1", "v0.1.20"])
def test_the_gated_norm_of_heads(aiter_of: Callable[..., Any], release: str) -> None:
    aiter_of(release)
    function = importlib.import_module("aiter.ops.gated_rmsnorm_fp8_group_quant").gated_rmsnorm_fp8_group_quant
    x, z, weight = random(5, 3, 128), random(5, 3, 128, seed=1), random(128, seed=2)
    out, scale, columns = torch.zeros(5, 384, dtype=E4M3FN), torch.zeros(5, 3), torch.zeros(3, 5)
    function(out, scale, x, z, weight, EPS, 128)
    close(out, scale, gated(x, z, weight).flatten(1), 128)
    function(out, columns, x, z, weight, EPS, 128, True)
    assert torch.equal(columns.t(), scale)
    views = random(5, 6, 128)[:, :3], z
    if release == "v0.1.20":
        function(out, scale, *views, weight, EPS, 128)
        with pytest.raises(AssertionError, match="Unsupported dtype"):
            function(torch.zeros(5, 384, dtype=FNUZ), scale, x, z, weight, EPS, 128)
    else:
        with pytest.raises(StandInMisuse, match="reads no stride"):
            function(out, scale, *views, weight, EPS, 128)
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
