"""The stand-ins' fused all-reduces over one rank: what they return in which release, and what they refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import RELEASES, StandInMisuse, between
from torch import Tensor

EPS = 1e-5
WIDTH = 512
MODULE = "aiter.dist.device_communicators.custom_all_reduce"
FUSED = [release for release in RELEASES if between(release, "v0.1.6.post2", None)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X, RESIDUAL, WEIGHT = random(4, WIDTH), random(4, WIDTH, seed=1), random(WIDTH, seed=2)
TOTAL = X.double() + RESIDUAL.double()


def exact(x: Tensor, offset: float = 0.0, epsilon: float = EPS) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + epsilon).sqrt() * (WEIGHT.double() + offset)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=1e-4)


def communicator() -> Any:
    return importlib.import_module(MODULE).CustomAllreduce(None, "cpu")


@pytest.mark.parametrize("release", FUSED)
def test_the_order_of_the_results_and_whether_there_is_a_residual(aiter_of: Callable[..., Any], release: str) -> None:
    """Up to v0.1.7.post2 the sum comes first, although v0.1.7.post3 has the very signature of v0.1.7.post2."""
    aiter_of(release)
    epsilon = 0.0 if between(release, None, "v0.1.11.post1") else EPS
    alone, sum_first = between(release, None, "v0.1.7.post1"), between(release, None, "v0.1.7.post2")
    residual = () if alone else (RESIDUAL,)
    results = communicator().fused_ar_rms(X, *residual, w=WEIGHT, eps=epsilon)
    summed, normed = results if sum_first else reversed(results)
    total = X.double() if alone else TOTAL
    assert torch.equal(summed, total.bfloat16())
    close(normed, exact(total, epsilon=epsilon))
    stage = (False,) if between(release, "v0.1.10.post2", None) else ()
    again = communicator().custom_fused_ar_rms(X, *residual, WEIGHT, epsilon, *stage)
    assert all(torch.equal(one, other) for one, other in zip(again, results, strict=True))


def test_given_outputs_are_written(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    out, summed = torch.zeros_like(X), torch.zeros_like(X)
    results = communicator().fused_ar_rms(X, RESIDUAL, out=out, res_out=summed, w=WEIGHT, eps=EPS, gemma_norm=True)
    assert results[0] is out and results[1] is summed
    close(out, exact(TOTAL, 1.0))


def test_padded_results(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.16")
    out, summed = communicator().custom_fused_ar_rms(X, RESIDUAL, WEIGHT, EPS, False, 640)
    assert out.shape == (4, 640) and summed.shape == (4, WIDTH) and not out[:, WIDTH:].any()


def test_per_token_quantisation(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.10.post3")
    values, summed, scales = communicator().custom_fused_ar_rms_quant(X, RESIDUAL, WEIGHT, 0.0, False)
    assert torch.equal(summed, TOTAL.bfloat16()) and scales.shape == (4, 1)
    expected = exact(TOTAL, epsilon=0.0)
    torch.testing.assert_close(values.double() * scales.double(), expected, rtol=0.07, atol=0.02)
    aiter_of("v0.1.18")
    results = communicator().custom_fused_ar_rms_quant(X, RESIDUAL, WEIGHT, EPS, False, emit_bf16=True)
    assert len(results) == 4
    close(results[3], exact(TOTAL))


@pytest.mark.parametrize("release", ["v0.1.14-rc0", "v0.1.17", "v0.1.18", "v0.1.19.post1", "v0.1.19.post2"])
def test_per_group_quantisation_lost_its_transposed_scales_for_a_while(
    aiter_of: Callable[..., Any], release: str
) -> None:
    aiter_of(release)
    fused = communicator().custom_fused_ar_rms_per_group_quant
    values, _, scales = fused(X, RESIDUAL, WEIGHT, EPS)
    assert scales.shape == (4, 4)
    torch.testing.assert_close(
        values.double() * scales.double().repeat_interleave(128, 1), exact(TOTAL), rtol=0.07, atol=0.02
    )
    if release in ("v0.1.17", "v0.1.19.post2"):
        _, _, columns = fused(X, RESIDUAL, WEIGHT, EPS, transpose_scale=True)
        assert columns.stride() == (1, 4) and torch.equal(columns, scales)
    else:
        with pytest.raises(TypeError, match="transpose_scale"):
            fused(X, RESIDUAL, WEIGHT, EPS, transpose_scale=True)


@pytest.mark.parametrize("release", ["v0.1.14-rc0", "v0.1.20"])
def test_a_row_of_zeros_has_a_scale_of_one(aiter_of: Callable[..., Any], release: str) -> None:
    aiter_of(release)
    zeros = torch.zeros(2, WIDTH).bfloat16()
    for method in (communicator().custom_fused_ar_rms_quant, communicator().custom_fused_ar_rms_per_group_quant):
        stage = {"use_1stage": False}
        values, summed, scales = method(zeros, zeros, WEIGHT, EPS, **stage)
        assert not values.float().any() and not summed.any() and bool((scales == 1).all())


def test_when_the_communicator_does_nothing(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    ranks = communicator()
    assert ranks.custom_fused_ar_rms(X[:, ::2], RESIDUAL, WEIGHT, EPS, False) is None
    with ranks.capture():
        assert not any(result.any() for result in ranks.custom_fused_ar_rms(X, RESIDUAL, WEIGHT, EPS, False))
        assert len(ranks.custom_fused_ar_rms_per_group_quant(X, RESIDUAL, WEIGHT, EPS)) == 3
    ranks.disabled = True
    assert ranks.custom_fused_ar_rms(X, RESIDUAL, WEIGHT, EPS, False) is None
    assert not ranks.should_custom_ar(X, prefill_support=True)


def test_widths_and_tokens_that_no_kernel_takes(aiter_of: Callable[..., Any]) -> None:
    narrow = random(4, 64), random(4, 64), random(64)
    aiter_of("v0.1.20")
    with pytest.raises(RuntimeError, match="too small"):
        communicator().custom_fused_ar_rms(*narrow, EPS, False)
    communicator().custom_fused_ar_rms(*narrow, EPS, True)
    aiter_of("v0.1.11")
    odd = random(4, 720), random(4, 720), random(720)
    with pytest.raises(StandInMisuse, match="only printed"):
        communicator().custom_fused_ar_rms(*odd, 0.0, False)
    with pytest.raises(StandInMisuse, match="becomes 0"):
        communicator().custom_fused_ar_rms(X, RESIDUAL, WEIGHT, EPS, False)
    aiter_of("v0.1.16")
    many = random(81, WIDTH), random(81, WIDTH), WEIGHT
    with pytest.raises(RuntimeError, match="exceeds 80"):
        communicator().custom_fused_ar_rms(*many, EPS, True)


def test_what_is_reinterpreted_unchecked(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    fused = communicator().fused_ar_rms
    with pytest.raises(StandInMisuse, match="read as"):
        fused(X, RESIDUAL.float(), w=WEIGHT, eps=EPS)
    with pytest.raises(StandInMisuse, match="read as"):
        fused(X, RESIDUAL, w=WEIGHT.float(), eps=EPS)
    with pytest.raises(StandInMisuse, match="never registered"):
        fused(X, RESIDUAL, w=WEIGHT, eps=EPS, registered=True)
    with pytest.raises(ValueError, match="group_size=48"):
        communicator().fused_ar_rms_per_group_quant(X, RESIDUAL, w=WEIGHT, eps=EPS, group_size=48)
    with pytest.raises(TypeError):
        fused(X, RESIDUAL, WEIGHT, EPS)
