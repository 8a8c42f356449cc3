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


def test_the_dual_norm(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.16.post3")
    function, (q, q_weight, k, k_weight) = importlib.import_module(QK)._fused_qk_rmsnorm, qk()
    q_out, into = torch.zeros(6, 64).bfloat16(), torch.zeros(6, 128).bfloat16()
    results = function(q_out, q, q_weight, EPS, into[:, :32], k, k_weight, 1e-3)
    assert results[0] is q_out and results[1].data_ptr() == into.data_ptr()
    close(q_out, exact(q, q_weight))
    close(into[:, :32], exact(k, k_weight, 1e-3))
    assert not into[:, 32:].any()
    with pytest.raises(StandInMisuse, match="no rows"):
        function(None, q[:0], q_weight, EPS, None, k[:0], k_weight, EPS)


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


# ---- the family of rmsnorm


def added(package: Any, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    package.rmsnorm2d_fwd_with_add(out, x, torch.zeros_like(out), torch.zeros_like(out), weight, EPS, **options)
    return out


def test_gemma_adds_one_to_the_weight_unless_ck_drops_it(aiter_of: Callable[..., Any]) -> None:
    x, weight = random(4, 16), random(16, seed=1)
    close(added(aiter_of("v0.1.20"), x, weight, gemma_norm=True), exact(x, weight, offset=1.0))
    with pytest.raises(StandInMisuse, match="silently dropped"):
        added(aiter_of("v0.1.17"), random(2, 8200), random(8200), gemma_norm=True)


@pytest.mark.parametrize(
    ("release", "x", "weight", "error", "message"),
    [
        ("v0.1.17", torch.zeros(2, 2, 8).bfloat16(), torch.zeros(8).bfloat16(), StandInMisuse, "3 dimensions"),
        ("v0.1.17", torch.zeros(2, 8), torch.zeros(8), RuntimeError, "input type"),
        ("v0.1.20", torch.zeros(2, 8).bfloat16(), torch.zeros(8), StandInMisuse, "read as"),
        ("v0.1.20", torch.zeros(2, 8).bfloat16(), torch.zeros(4).bfloat16(), StandInMisuse, "past its end"),
        ("v0.1.16.post3", torch.zeros(8, 2).bfloat16().t(), torch.zeros(8).bfloat16(), StandInMisuse, "last stride"),
        ("v0.1.20", torch.zeros(2, 8), torch.zeros(8).bfloat16(), AssertionError, "weight dtype"),
    ],
)
def test_what_the_kernels_refuse(
    aiter_of: Callable[..., Any], release: str, x: Tensor, weight: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        added(aiter_of(release), x, weight)


@pytest.mark.parametrize("release", ["v0.1.16.post6", "v0.1.17-rc0", "v0.1.20"])
def test_the_seventh_position_changed_its_meaning(aiter_of: Callable[..., Any], release: str) -> None:
    package, x, weight = aiter_of(release), random(4, 16), random(16)
    arguments = torch.zeros_like(x), x, x, torch.zeros_like(x), weight, EPS
    old = release == "v0.1.16.post6"
    package.rmsnorm2d_fwd_with_add(*arguments, 0 if old else False)
    with pytest.raises(StandInMisuse, match="another release"):
        package.rmsnorm2d_fwd_with_add(*arguments, False if old else 0)


def test_the_opus_kernel_reads_rows_by_one_stride(aiter_of: Callable[..., Any]) -> None:
    package, weight, residual = aiter_of("v0.1.20"), torch.rand(8), torch.randn(2, 3, 8)
    split, turned = torch.randn(2, 3, 16)[..., :8], torch.randn(3, 2, 8).transpose(0, 1)
    out, summed = torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)
    package.rmsnorm2d_fwd_with_add(out, split, residual, summed, weight, EPS)
    close(out, exact(split.double() + residual.double(), weight))
    with pytest.raises(StandInMisuse, match="evenly apart"):
        package.rmsnorm2d_fwd_with_add(out, turned, residual, summed, weight, EPS)


# ---- Triton
