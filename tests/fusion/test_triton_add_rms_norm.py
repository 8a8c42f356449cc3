"""The kernel that adds and norms, against float64: on a GPU compiled, elsewhere in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers import in_turn

from layerfuse.fusion import FUSIONS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    from layerfuse.fusion.backends.triton.family import function_of

    result: tuple[torch.Tensor, torch.Tensor] = function_of(FUSIONS["add_rms_norm"].op)(
        x, residual, weight, epsilon, offset
    )
    return result


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype)
    return x.to(DEVICE), (residual * 3).to(DEVICE), weight.to(DEVICE)


def assert_exact(
    got: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float = 1e-6,
    offset: float = 0.0,
) -> None:
    """The norm of the sum before it was rounded, and the sum, each rounded once."""
    total = x.float() + residual.float()
    wide = total.double()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + epsilon) * (weight.double() + offset)
    # Triton's interpreter cuts float32 down to bfloat16 where the hardware rounds to nearest.
    unit = EPS[x.dtype] / (2 if GPU or x.dtype != torch.bfloat16 else 1)
    tiny = 6e-8 if x.dtype == torch.float16 else 1e-30
    for result, wanted in zip(got, (normed, wide), strict=True):
        assert (result.dtype, result.shape, result.is_contiguous()) == (x.dtype, x.shape, True)
        torch.testing.assert_close(
            result.double(), wanted, rtol=unit + 8 * EPS[torch.float32], atol=tiny, equal_nan=True
        )


@pytest.mark.parametrize("width", [5120, 12288, 16384])
def test_wide_rows(width: int) -> None:
    x, residual, weight = inputs(2, width)
    assert_exact(add_rms_norm(x, residual, weight), x, residual, weight)


@pytest.mark.parametrize(("width", "rows"), in_turn([64, 100, 256], [200, 700]))
def test_rows_that_share_a_program(width: int, rows: int) -> None:
    """More rows than the last program has: what it does twice is the same."""
    x, residual, weight = inputs(rows + 3, width, dtype=torch.float32)
    assert_exact(add_rms_norm(x, residual, weight), x, residual, weight)


@pytest.mark.parametrize(("width", "step"), in_turn([128, 512, 2880], range(7)))
def test_every_step_of_the_tuning(width: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerfuse.fusion.backends.triton import tuning

    monkeypatch.setattr(tuning, "regime", lambda _: step)
    x, residual, weight = inputs(9, width)
    assert_exact(add_rms_norm(x, residual, weight), x, residual, weight)


def test_weights_stored_around_zero() -> None:
    """The offset is added in float32: in bfloat16, 1 + 2^-9 would be 1."""
    x, residual, weight = inputs(3, 256)
    weight = (weight - 1) * 2**-6
    assert_exact(add_rms_norm(x, residual, weight, 1e-5, 1.0), x, residual, weight, 1e-5, 1.0)


def test_rows_of_zeros_and_broken_rows() -> None:
    x, residual, weight = inputs(5, 96, dtype=torch.float32)
    x, residual = x.clone(), residual.clone()
    x[0], residual[0] = 0, 0
    x[1, 40] = float("nan")
    x[2, 5] = float("inf")
    x[3, 6], residual[3, 6] = float("inf"), float("-inf")
    normed, total = add_rms_norm(x, residual, weight)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0, equal_nan=True)
    assert not normed[0].any()
    assert normed[1].isnan().all()
    assert normed[2, 5].isnan()
    assert not normed[2, 6:].any(), "the mean square is infinite"
    assert normed[3].isnan().all()
    assert_exact((normed[4:], total[4:]), x[4:], residual[4:], weight)


def test_the_norm_is_of_the_sum_before_it_is_rounded() -> None:
    """256 + 1 is 256 in bfloat16. Normed, one lies below 256 and the other above, where steps are wide enough to show it."""
    x = torch.full((1, 64), 256.0, device=DEVICE, dtype=torch.bfloat16)
    residual = torch.ones(1, 64, device=DEVICE, dtype=torch.bfloat16)
    residual[0, ::2] = 0
    weight = torch.full((64,), 254.75, device=DEVICE)
    normed, total = add_rms_norm(x, residual, weight, 0.0)
    assert torch.equal(total, x)
    assert normed[0, 0] < normed[0, 1], "254.25 and 255.25, where bfloat16 has steps of one"
