"""The stand-ins' fused all-reduces over one rank: what they return in which release, and what they refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import StandInMisuse
from torch import Tensor

EPS = 1e-5
WIDTH = 512
MODULE = "aiter.dist.device_communicators.custom_all_reduce"


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


def fused(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = communicator().fused_ar_rms(x, residual, w=weight, eps=EPS, **options)
    return found


@pytest.mark.parametrize("release", ["v0.1.16.post3", "v0.1.17", "v0.1.18", "v0.1.19.post1", "v0.1.19.post2"])
def test_per_group_quantisation_lost_its_transposed_scales_for_a_while(
    aiter_of: Callable[..., Any], release: str
) -> None:
    aiter_of(release)
    given = (X, RESIDUAL), {"w": WEIGHT, "eps": EPS, "use_1stage": True}
    grouped = communicator().fused_ar_rms_per_group_quant
    values, _, scales = grouped(*given[0], **given[1])
    assert scales.shape == (4, 4)
    back = values.double() * scales.double().repeat_interleave(128, 1)
    torch.testing.assert_close(back, exact(TOTAL), rtol=0.07, atol=0.02)
    if release in ("v0.1.17", "v0.1.19.post2"):
        _, _, columns = grouped(*given[0], **given[1], transpose_scale=True)
        assert columns.stride() == (1, 4) and torch.equal(columns, scales)
    else:
        with pytest.raises(TypeError, match="transpose_scale"):
            grouped(*given[0], **given[1], transpose_scale=True)


def test_a_row_of_zeros_has_a_scale_of_one(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    zeros = torch.zeros(2, WIDTH).bfloat16()
    grouped = communicator().fused_ar_rms_per_group_quant(zeros, zeros, w=WEIGHT, eps=EPS)
    for values, summed, scales in (fused(zeros, zeros, WEIGHT, post_per_token_quant=True), grouped):
        assert not values.float().any() and not summed.any() and bool((scales == 1).all())


def test_what_a_communicator_takes(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    ranks = communicator()
    assert ranks.should_custom_ar(X) and not ranks.should_custom_ar(X[:, ::2])
    ranks.disabled = True
    assert not ranks.should_custom_ar(X, prefill_support=True)


def test_widths_and_tokens_that_no_kernel_takes(aiter_of: Callable[..., Any]) -> None:
    narrow = random(4, 64), random(4, 64), random(64)
    aiter_of("v0.1.20")
    with pytest.raises(RuntimeError, match="too small"):
        fused(*narrow)
    fused(*narrow, use_1stage=True)
    aiter_of("v0.1.16.post3")
    many = random(81, WIDTH), random(81, WIDTH), WEIGHT
    with pytest.raises(RuntimeError, match="exceeds 80"):
        fused(*many, use_1stage=True)


def test_what_is_reinterpreted_unchecked(aiter_of: Callable[..., Any]) -> None:
    aiter_of("v0.1.20")
    with pytest.raises(StandInMisuse, match="read as"):
        fused(X, RESIDUAL.float(), WEIGHT)
    with pytest.raises(StandInMisuse, match="read as"):
        fused(X, RESIDUAL, WEIGHT.float())
    with pytest.raises(StandInMisuse, match="never registered"):
        fused(X, RESIDUAL, WEIGHT, registered=True)
    with pytest.raises(ValueError, match="group_size=48"):
        communicator().fused_ar_rms_per_group_quant(X, RESIDUAL, w=WEIGHT, eps=EPS, group_size=48)
    with pytest.raises(TypeError):
        communicator().fused_ar_rms(X, RESIDUAL, WEIGHT, EPS)
