"""What the norms of the stand-ins compute, where they write it, and what they refuse: all but quantisation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import StandInMisuse
from torch import Tensor

EPS = 1e-5
QK = "aiter.ops.fused_qk_norm_rope_cache_quant"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(x: Tensor, weight: Tensor, epsilon: float = EPS, offset: float = 0.0) -> Tensor:
    """In float64, by the formula."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * (weight.double() + offset)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=1e-4)


# ---- q and k together


def qk() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    both = random(6, 96)
    return both[:, :64], random(64, seed=1), both[:, 64:], random(32, seed=2)


def test_the_dual_norm_under_both_its_names(aiter_of: Callable[..., Any]) -> None:
    q, q_weight, k, k_weight = qk()
    for found in aiter_of("v0.1.12").fused_qk_rmsnorm(q, q_weight, EPS, k, k_weight, 1e-3):
        assert found.is_contiguous()
    old = aiter_of("v0.1.13.post1").fused_qk_rmsnorm(q, q_weight, EPS, k, k_weight, 1e-3)
    close(old[0], exact(q, q_weight))
    close(old[1], exact(k, k_weight, 1e-3))
    aiter_of("v0.1.14-rc0")
    new = importlib.import_module(QK)._fused_qk_rmsnorm
    q_out, into = torch.zeros(6, 64).bfloat16(), torch.zeros(6, 128).bfloat16()
    results = new(q_out, q, q_weight, EPS, into[:, :32], k, k_weight, 1e-3)
    assert results[0] is q_out and results[1].data_ptr() == into.data_ptr()
    assert torch.equal(q_out, old[0]) and torch.equal(into[:, :32], old[1]) and not into[:, 32:].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(5, 32).bfloat16()}, StandInMisuse, "only q's are counted"),
        ({"q": torch.zeros(6, 2, 64).bfloat16()}, RuntimeError, "2D"),
        ({"q": torch.zeros(64, 6).bfloat16().t()}, StandInMisuse, "last stride 6"),
        ({"q_weight": torch.zeros(48).bfloat16()}, StandInMisuse, "past its end"),
        ({"q_weight": torch.zeros(64)}, RuntimeError, "one dtype"),
        (
            {"q": torch.zeros(6, 8194).bfloat16(), "q_weight": torch.zeros(8194).bfloat16()},
            RuntimeError,
            "not support n",
        ),
        ({"q_out": torch.zeros(6, 64)}, StandInMisuse, "q_out is torch.float32"),
        ({"q_out": torch.zeros(6, 63).bfloat16()}, StandInMisuse, "q_out has shape"),
        ({"q_out": 1e-5}, TypeError, "must be Tensor"),
        ({"q_eps": torch.zeros(1)}, TypeError, "must be float"),
    ],
)
def test_what_the_dual_norm_refuses(
    aiter_of: Callable[..., Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    aiter_of("v0.1.20")
    q, q_weight, k, k_weight = qk()
    given = {"q_out": None, "q": q, "q_weight": q_weight, "q_eps": EPS}
    given |= {"k_out": None, "k": k, "k_weight": k_weight, "k_eps": EPS, **change}
    with pytest.raises(error, match=message):
        importlib.import_module(QK)._fused_qk_rmsnorm(**given)


def test_no_rows_are_no_launch(aiter_of: Callable[..., Any]) -> None:
    package = aiter_of("v0.1.13")
    empty = torch.zeros(0, 8).bfloat16(), random(8)
    with pytest.raises(StandInMisuse, match="no rows"):
        package.fused_qk_rmsnorm(*empty, EPS, *empty, EPS)
    with pytest.raises(StandInMisuse, match="no rows"):
        package.rmsnorm2d_fwd(*empty, EPS)


# ---- the family of rmsnorm


RELEASES = ["v0.1.5", "v0.1.10.post2", "v0.1.16.post6", "v0.1.17", "v0.1.17-longctx", "v0.1.20.post1"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_norms_that_allocate(aiter_of: Callable[..., Any], release: str) -> None:
    package, x, weight = aiter_of(release), random(4, 3, 16), random(16, seed=1)
    for function in (package.rms_norm, package.rmsnorm2d_fwd):
        close(function(x[:, 0], weight, EPS), exact(x[:, 0], weight))
    close(package.rms_norm(x, weight, EPS), exact(x, weight))
    if release in ("v0.1.10.post2", "v0.1.16.post6", "v0.1.17"):
        with pytest.raises(StandInMisuse, match=r"size\(1\)"):
            package.rmsnorm2d_fwd(x, weight, EPS)


@pytest.mark.parametrize("release", RELEASES)
def test_the_norm_with_a_residual(aiter_of: Callable[..., Any], release: str) -> None:
    package, x, residual, weight = aiter_of(release), random(4, 16), random(4, 16, seed=3), random(16, seed=1)
    out, summed = torch.zeros_like(x), torch.zeros_like(x)
    package.rmsnorm2d_fwd_with_add(out, x, residual, summed, weight, EPS)
    total = x.double() + residual.double()
    assert torch.equal(summed, total.bfloat16())
    close(out, exact(total, weight))
    package.rmsnorm2d_fwd_with_add(x, x, residual, residual, weight, epsilon=EPS)
    assert torch.equal(x, out) and torch.equal(residual, summed)


@pytest.mark.parametrize("release", ["v0.1.10.post1", "v0.1.10.post2", "v0.1.10.post3"])
def test_one_release_went_back_to_ck_for_the_residual(aiter_of: Callable[..., Any], release: str) -> None:
    """v0.1.10.post2 adds with CK alone, which takes three dimensions; its neighbours take dim 1 for the width."""
    package, x, weight = aiter_of(release), random(4, 3, 16), random(16)
    arguments = torch.zeros_like(x), x, x, torch.zeros_like(x), weight, EPS
    if release == "v0.1.10.post2":
        package.rmsnorm2d_fwd_with_add(*arguments)
        close(arguments[0], exact(x.double() * 2, weight))
    else:
        with pytest.raises(StandInMisuse, match=r"size\(1\)"):
            package.rmsnorm2d_fwd_with_add(*arguments)


@pytest.mark.parametrize("release", ["v0.1.16.post6", "v0.1.17-rc0", "v0.1.20"])
def test_the_seventh_position_changed_its_meaning(aiter_of: Callable[..., Any], release: str) -> None:
    package, x, weight = aiter_of(release), random(4, 16), random(16)
    arguments = torch.zeros_like(x), x, x, torch.zeros_like(x), weight, EPS
    old = release == "v0.1.16.post6"
    package.rmsnorm2d_fwd_with_add(*arguments, 0 if old else False)
    with pytest.raises(StandInMisuse, match="another release"):
        package.rmsnorm2d_fwd_with_add(*arguments, False if old else 0)


def test_gemma_adds_one_to_the_weight_unless_ck_drops_it(aiter_of: Callable[..., Any]) -> None:
    x, weight = random(4, 16), random(16, seed=1)
    out = torch.zeros_like(x)
    aiter_of("v0.1.20").rmsnorm(out, x, weight, EPS, gemma_norm=True)
    close(out, exact(x, weight, offset=1.0))
    wide, long = torch.zeros(2, 8200).bfloat16(), torch.zeros(8200).bfloat16()
    with pytest.raises(StandInMisuse, match="silently dropped"):
        aiter_of("v0.1.17").rmsnorm2d_fwd_with_add(wide, wide, wide, wide, long, EPS, gemma_norm=True)


def test_what_is_wider_than_the_kernel(aiter_of: Callable[..., Any]) -> None:
    wide, long = torch.ones(2, 8200).bfloat16(), torch.ones(8200).bfloat16()
    with pytest.raises(RuntimeError, match="not support n"):
        aiter_of("v0.1.16").rmsnorm(torch.zeros_like(wide), wide, long, EPS)
    with pytest.raises(TypeError, match="positional"):
        aiter_of("v0.1.10.post1").rmsnorm2d_fwd(wide, long, EPS)
    close(aiter_of("v0.1.19").rmsnorm2d_fwd(wide, long, EPS), exact(wide, long))


@pytest.mark.parametrize(
    ("release", "x", "weight", "error", "message"),
    [
        ("v0.1.20", torch.zeros(2, 2, 8).bfloat16(), torch.zeros(8).bfloat16(), StandInMisuse, "3 dimensions"),
        ("v0.1.20", torch.zeros(2, 8), torch.zeros(8), RuntimeError, "input type"),
        ("v0.1.20", torch.zeros(2, 8).bfloat16(), torch.zeros(8), StandInMisuse, "read as"),
        ("v0.1.20", torch.zeros(2, 8).bfloat16(), torch.zeros(4).bfloat16(), StandInMisuse, "past its end"),
        ("v0.1.16", torch.zeros(8, 2).bfloat16().t(), torch.zeros(8).bfloat16(), StandInMisuse, "last stride"),
    ],
)
def test_what_the_hip_kernel_refuses(
    aiter_of: Callable[..., Any], release: str, x: Tensor, weight: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        aiter_of(release).rmsnorm(torch.zeros_like(x), x, weight, EPS)


def test_the_opus_kernel_takes_float32_and_checks_by_assertions(aiter_of: Callable[..., Any]) -> None:
    package, x, weight = aiter_of("v0.1.20"), torch.randn(2, 8), torch.rand(8)
    close(package.rms_norm(x, weight, EPS), exact(x, weight))
    with pytest.raises(AssertionError, match="weight dtype"):
        package.rms_norm(x, weight.bfloat16(), EPS)


def test_the_opus_kernel_reads_rows_by_one_stride(aiter_of: Callable[..., Any]) -> None:
    package, weight, residual = aiter_of("v0.1.20"), torch.rand(8), torch.randn(2, 3, 8)
    split, turned = torch.randn(2, 3, 16)[..., :8], torch.randn(3, 2, 8).transpose(0, 1)
    out, summed = torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)
    package.rmsnorm2d_fwd_with_add(out, split, residual, summed, weight, EPS)
    close(out, exact(split.double() + residual.double(), weight))
    with pytest.raises(StandInMisuse, match="evenly apart"):
        package.rmsnorm2d_fwd_with_add(out, turned, residual, summed, weight, EPS)
    with pytest.raises(AssertionError, match="bad out"):
        package.rms_norm(turned, weight, EPS)


# ---- Triton


@pytest.mark.parametrize("release", ["v0.1.6.post2", "v0.1.20"])
def test_the_padded_norm(aiter_of: Callable[..., Any], release: str) -> None:
    aiter_of(release)
    function = importlib.import_module("aiter.ops.triton.fused_add_rmsnorm_pad").fused_add_rmsnorm_pad
    x, residual, weight = random(3, 12), random(3, 12, seed=1), random(12, seed=2)
    alone = function(x, weight, EPS)
    assert isinstance(alone, Tensor)
    close(alone, exact(x, weight))
    out, summed = function(x, weight, EPS, residual.float(), 8)
    assert out.shape == (3, 16) and not out[:, 12:].any() and summed.dtype == torch.float32
    close(out[:, :12], exact(x.double() + residual.double(), weight))
    with pytest.raises(AssertionError, match="Shape error"):
        function(x, weight, EPS, residual[:2])


@pytest.mark.parametrize("release", ["v0.1.5", "v0.1.10"])
def test_tritons_own_norm_knows_three_parameters(aiter_of: Callable[..., Any], release: str) -> None:
    aiter_of(release)
    function = importlib.import_module("aiter.ops.triton.rmsnorm").rms_norm
    x, weight = random(3, 12), random(12, seed=2)
    close(function(x, weight, EPS), exact(x, weight))
    with pytest.raises(TypeError):
        function(x, weight, EPS, 0)
