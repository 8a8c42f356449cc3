"""Quantisation by a static scale: every way of writing it is fused with the norm, and what is no single scale is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import in_turn
from quant_support import FP8, MAX
from stream_support import SITE, Norm, Stream, exact_norm, form_of, rows, run, stream_spec
from torch import Tensor, nn

STATIC = "add_rms_norm_static_quant"


class Static(Stream):
    """A scale measured beforehand, in whatever shape and dtype."""

    def __init__(self, quantise: Any, shape: tuple[int, ...] = (1,), dtype: torch.dtype = torch.float32) -> None:
        super().__init__(quantise)
        self.scale = nn.Parameter(torch.full(shape, 0.02, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        total = x + residual
        normed = self.norm(total)
        values = self.reads(normed, self.scale)
        return *(values if isinstance(values, tuple) else (values,)), total


def divided(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8)


def inverted(x: Tensor, scale: Tensor) -> Tensor:
    """vLLM's QuantFP8."""
    return (x.to(torch.float32) * scale.to(torch.float32).reciprocal()).clamp(-MAX, MAX).to(FP8)


def narrow(x: Tensor, scale: Tensor) -> Tensor:
    """Divided in the activations' own dtype."""
    return torch.clamp(x / scale.to(x.dtype), min=-MAX, max=MAX).to(FP8)


def flattened(x: Tensor, scale: Tensor) -> Tensor:
    return inverted(x.view(-1, x.shape[-1]), scale.view(1, 1)).view(x.shape)


def canonical(x: Tensor, scale: Tensor) -> Tensor:
    return torch.ops.layerfuse.quantise_static(x, scale, FP8)


def assert_half_a_step(values: Tensor, scale: Tensor, normed: Tensor, rounding: float = 2**-8) -> None:
    """Values within half a step of e4m3 of the norm over the scale, which is clamped to the format's range."""
    wanted = (normed / scale.double()).clamp(-MAX, MAX)
    error = (values.double() - wanted).abs()
    allowed = (wanted.abs() * 2**-4).clamp(min=2**-10) * (1 + rounding) + rounding * wanted.abs()
    assert (error <= allowed).all(), (error / allowed).max()


@pytest.mark.parametrize(
    ("quantise", "dtype", "shape"),
    in_turn(
        [divided, inverted, narrow, flattened, canonical], [torch.float32, torch.bfloat16, torch.float16], [(1,), ()]
    ),
)
def test_fused(quantise: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module = Static(quantise, shape)
    module.norm.to(dtype)
    x, residual = rows(dtype=dtype)
    traced = run(module, "static", x, residual)
    assert traced.report.of(STATIC).matched == (SITE,), str(traced.report)
    assert form_of(traced) == STATIC
    assert not any(word in traced.after[0] for word in ("rsqrt", "reciprocal", "clamp", "div"))
    values, total = traced.output
    assert_half_a_step(values, module.scale, exact_norm(module, x, residual))
    assert torch.equal(total, x + residual)
    with torch.no_grad():
        eager = module(x, residual)[0]
    assert_half_a_step(eager, module.scale, exact_norm(module, x, residual), rounding=2 * torch.finfo(dtype).eps)
    # The scale is small enough that something is clamped.
    assert (values.float().abs() == MAX).any() == bool((exact_norm(module, x, residual).abs() > MAX * 0.02).any())


def test_a_scale_of_low_precision_is_widened() -> None:
    module = Static(inverted, (1,), torch.bfloat16)
    x, residual = rows()
    traced = run(module, "static", x, residual)
    assert form_of(traced) == STATIC
    assert_half_a_step(traced.output[0], module.scale, exact_norm(module, x, residual))


def test_any_number_of_tokens() -> None:
    module = Static(inverted)
    x, residual = rows(7)
    for each in (x, residual):
        torch._dynamo.mark_dynamic(each, 0)
    traced = run(module, "static", x, residual)
    assert form_of(traced) == STATIC and "float8_e4m3fn[s" in traced.after[0]


def test_a_buffer_and_the_product_of_two_scales() -> None:
    class Buffers(Static):
        def __init__(self) -> None:
            super().__init__(inverted)
            self.register_buffer("other", torch.tensor([3.0]))

        def forward(self, x: Tensor, residual: Tensor) -> Any:
            normed = self.norm(x + residual)
            return inverted(normed, self.scale * self.other), normed.sum() * 0

    module = Buffers()
    x, residual = rows()
    traced = run(module, "static", x, residual)
    assert form_of(traced) == f"{STATIC}_with_norm"
    assert_half_a_step(traced.output[0], module.scale * 3, exact_norm(module, x, residual))


def test_two_linears_with_scales_of_their_own() -> None:
    """The norm is computed once: one scale is fused, the other quantises the norm that is kept."""

    class Two(Static):
        def __init__(self) -> None:
            super().__init__(inverted)
            self.other = nn.Parameter(torch.tensor([0.05]))

        def forward(self, x: Tensor, residual: Tensor) -> Any:
            normed = self.norm(x + residual)
            return inverted(normed, self.scale), inverted(normed, self.other), inverted(normed, self.scale)

    module = Two()
    x, residual = rows()
    traced = run(module, "static", x, residual)
    assert form_of(traced) == f"{STATIC}_with_norm"
    assert traced.after[0].count("rsqrt") == 0 and traced.after[0].count("float8_e4m3fn") >= 2
    one, other, again = traced.output
    normed = exact_norm(module, x, residual)
    assert_half_a_step(one, module.scale, normed)
    assert_half_a_step(other, module.other, normed)
    assert torch.equal(one.float(), again.float())


# ---- left alone ------------------------------------------------------------------------------------------------------


def unclamped(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).to(FP8)


def clamped_above(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(max=MAX).to(FP8)


def clamped_lower(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-447.0, 447.0).to(FP8)


def whole_tensor(x: Tensor, scale: Tensor) -> Tensor:
    return inverted(x, x.abs().max().float().view(1) / MAX * (scale > 0))


def multiplied(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).clamp(-MAX, MAX).to(FP8)


def dynamic(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    each = x.abs().amax(-1, keepdim=True).float() / MAX + scale * 0
    return (x.float() / (x.abs().amax(-1, keepdim=True).float() / MAX)).clamp(-MAX, MAX).to(FP8), each


def by_another_tensor(x: Tensor, scale: Tensor) -> Tensor:
    return inverted(x, torch.ones(4, 4).sum().view(1) * scale)


@pytest.mark.parametrize(
    ("quantise", "shape", "reason"),
    [
        (unclamped, (1,), "does not clamp to the format's range, which a static scale may exceed"),
        (clamped_above, (1,), "does not clamp to the format's range"),
        (clamped_lower, (1,), "clamps to 447.0, and the format reaches 448"),
        (multiplied, (1,), "the values are multiplied by"),
        (inverted, (256,), "is static and of shape (256,); the fused op takes one element"),
        (inverted, (1, 1, 1), "dimensions that"),
        (whole_tensor, (1,), "the scale comes from "),
        (by_another_tensor, (1,), ", and not from the values that are quantised"),
        (lambda x, scale: (x / 0.25).clamp(-MAX, MAX).to(FP8), (1,), "divided by the number 0.25"),
        (lambda x, scale: torch.ops.layerfuse.quantise_per_token(x, FP8, False), (1,), "the plan says a static scale"),
        (lambda x, scale: x * scale, (1,), "nothing quantises the result"),
    ],
)
def test_left(quantise: Any, shape: tuple[int, ...], reason: str) -> None:
    module = Static(quantise, shape)
    x, residual = rows()
    traced = run(module, "static", x, residual)
    assert traced.report.of(STATIC).matched == ()
    assert reason in traced.report.of(STATIC).missed[SITE]
    # The add and the norm are still one launch, and what follows reads it.
    assert form_of(traced) == "add_rms_norm"
    with torch.no_grad():
        eager = module(x, residual)
    for got, wanted in zip(traced.output, eager, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.13, atol=0.02)


def test_a_static_scale_where_the_plan_has_one_per_token() -> None:
    traced = run(Static(inverted), "per_token", *rows())
    reason = traced.report.of("add_rms_norm_per_token_quant").missed[SITE]
    assert "is static: it does not come from the values, and the plan says one scale per token" in reason


def test_zero_centred() -> None:
    module = Static(inverted)
    module.norm = Norm(offset=1.0, after_weight=True)
    x, residual = rows()
    traced = run(module, "static", x, residual, specs=[("layer", stream_spec(offset=1.0))])
    assert form_of(traced) == STATIC
    assert_half_a_step(traced.output[0], module.scale, exact_norm(module, x, residual))
