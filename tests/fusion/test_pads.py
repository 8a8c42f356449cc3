"""Columns of zeros behind a norm are written by its launch; what reads the norm itself reads columns of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_support import SITE, Stream, exact_norm, form_of, rows, run
from torch import Tensor
from torch.nn.functional import pad

ADD = "add_rms_norm"


def joined(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(*x.shape[:-1], 32)], -1)


def filled(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full((x.shape[0], 32), 0.0, dtype=x.dtype)], -1)


def flattened(x: Tensor) -> Tensor:
    return pad(x.view(-1, x.shape[-1]), (0, 32)).view(*x.shape[:-1], -1)


def twice(x: Tensor) -> tuple[Tensor, ...]:
    return pad(x, (0, 32)), pad(x, (0, 32)) * 2


def routed(x: Tensor) -> tuple[Tensor, ...]:
    """gpt-oss: the router reads the norm, the experts read it padded."""
    return (
        pad(x, (0, 32)),
        x @ torch.full((x.shape[-1], 4), 2**-6, dtype=x.dtype),
        (x.view(-1, x.shape[-1]) * 2).view(x.shape),
    )


def split_up(x: Tensor) -> tuple[Tensor, ...]:
    """Views that columns of a wider tensor do not have."""
    return pad(x, (0, 32)), x.view(-1).exp(), x.unsqueeze(0).transpose(1, 2) + 1


def handed_on(x: Tensor) -> tuple[Tensor, ...]:
    return pad(x, (0, 32)), x


@pytest.mark.parametrize("reads", [lambda x: pad(x, (0, 32)), joined, filled, flattened, twice])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused(reads: Any, dtype: torch.dtype) -> None:
    assert_padded(Stream(reads), dtype)


@pytest.mark.parametrize("reads", [routed, split_up, handed_on])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_norm_has_other_readers(reads: Any, dynamic: bool) -> None:
    traced = assert_padded(Stream(reads), torch.bfloat16, dynamic=dynamic)
    assert "slice" in traced.after[0]


@pytest.mark.parametrize(("width", "more"), [(240, 16), (2880, 192), (2880, 1), (333, 179)])
def test_any_width_and_multiple(width: int, more: int) -> None:
    assert_padded(Stream(lambda x: pad(x, (0, more)), width=width), torch.bfloat16, width=width, wide=width + more)


def test_three_dimensions() -> None:
    module = Stream(lambda x: (pad(x.view(-1, 256), (0, 32)), x.sum(-1)))
    x, residual = (each.view(2, 3, 256) for each in rows(6))
    traced = run(module, None, x, residual)
    assert form_of(traced) == f"{ADD}_pad"
    with torch.no_grad():
        eager = module(x, residual)
    for got, wanted in zip(traced.output, eager, strict=True):
        assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def assert_padded(module: Any, dtype: torch.dtype, width: int = 256, wide: int = 288, dynamic: bool = False) -> Any:
    module.norm.to(dtype)
    x, residual = rows(dtype=dtype, width=width)
    if dynamic:
        for each in (x, residual):
            torch._dynamo.mark_dynamic(each, 0)
    traced = run(module, None, x, residual)
    assert traced.report.of(ADD).matched == (SITE,), str(traced.report)
    assert form_of(traced) == f"{ADD}_pad"
    assert not any(word in traced.after[0] for word in ("constant_pad", "aten.cat", "rsqrt"))
    with torch.no_grad():
        eager = module(x, residual)
    rounding = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for got, wanted in zip(traced.output, eager, strict=True):
        assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
        torch.testing.assert_close(got, wanted, **rounding)
    padded = traced.output[0]
    assert padded.shape[-1] == wide and (padded[:, width:] == 0).all()
    normed = exact_norm(module, x, residual)
    error = (padded[:, :width].double() - normed).abs()
    assert (error <= normed.abs() * torch.finfo(dtype).eps * 8 + 1e-6).all()
    return traced


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (lambda x: pad(x, (32, 0)), "pads in front of the columns, or rows"),
        (lambda x: pad(x, (8, 24)), "pads in front of the columns, or rows"),
        (lambda x: pad(x, (-16, 32)), "cuts columns or rows off"),
        (lambda x: pad(x, (0, 32), value=1.0), "pads with 1.0, and the fused op with zeros"),
        (lambda x: pad(x, (0, 32, 0, 1)), "pads in front of the columns, or rows"),
        (lambda x: torch.cat([x.new_zeros(5, 32), x], -1), "has something in front of the normed tensor"),
        (lambda x: torch.cat([x, x.new_ones(5, 32)], -1), "which is not of zeros"),
        (lambda x: torch.cat([x, x.new_zeros(1, 256)], 0), "joins along dimension 0, not along the last"),
        (lambda x: (pad(x, (0, 32)), pad(x, (0, 64))), "padded to 288 and to 320 columns, and one width is needed"),
        (lambda x: pad(x, (0, -16)), "cuts columns or rows off"),
        (lambda x: (pad(x, (0, 32)), torch.cat([x, x.exp()], -1)), "which is not of zeros"),
        # Nothing pads the norm.
        (lambda x: pad(x * 2, (0, 32)), None),
        (lambda x: torch.cat([x, x.exp()], -1), None),
    ],
)
def test_another_padding_is_left_behind_the_plain_norm_with_its_reason(reads: Any, reason: str | None) -> None:
    module = Stream(reads)
    x, residual = rows()
    traced = run(module, None, x, residual)
    verdict = traced.report.of(ADD)
    assert form_of(traced) == ADD and verdict.matched == (SITE,)
    assert "constant_pad" in traced.after[0] or "aten.cat" in traced.after[0]
    assert SITE not in traced.report.missed().get(ADD, {})  # of which a strict compilation makes errors
    assert verdict.to_dict()["left"] == verdict.left
    if reason is None:
        assert verdict.left == {} and "padding" not in str(traced.report)
    else:
        assert list(verdict.left) == [SITE] and reason in verdict.left[SITE]
        assert f"padding left: {SITE}: {verdict.left[SITE]}" in str(traced.report)
    with torch.no_grad():
        eager = module(x, residual)
    for got, wanted in zip(traced.output, eager, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
