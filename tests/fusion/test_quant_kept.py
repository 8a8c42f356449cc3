"""A norm with other readers: one launch gives the norm and its quantisation, and it is normed once however often it is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, mla_spec
from quant_support import (
    FP8,
    MAX,
    Quantised,
    assert_quantised,
    exact_query,
    fusion_of,
    sglang_group,
    trace_quantised,
    vllm_group,
    vllm_per_token,
)
from stream_support import SITE, Stream, exact_norm, form_of, rows, run
from torch import Tensor

GROUP = "add_rms_norm_group_quant"


def routed(x: Tensor) -> tuple[Tensor, ...]:
    """A router beside the experts' quantised input."""
    return (*vllm_group(x), x @ torch.full((256, 4), 2**-6, dtype=x.dtype))


def widened(x: Tensor) -> tuple[Tensor, ...]:
    """The router reads the norm in float32, as the quantisation does."""
    wide = x.float()
    scale = wide.view(-1, 2, 128).abs().amax(-1).clamp(min=1e-10) / MAX
    values = (wide.view(-1, 2, 128) / scale.unsqueeze(-1)).clamp(-MAX, MAX).to(FP8).view(x.shape)
    return values, scale, wide.neg()


def returned(x: Tensor) -> tuple[Tensor, ...]:
    return (*vllm_group(x), x)


def reshaped(x: Tensor) -> tuple[Tensor, ...]:
    return (*vllm_group(x), x.view(-1, 128).neg())


def keeps_the_largest(x: Tensor) -> tuple[Tensor, ...]:
    amax = x.view(-1, 2, 128).abs().amax(-1).float().clamp(min=1e-10)
    values = (x.view(-1, 2, 128) / (amax / MAX).unsqueeze(-1)).clamp(-MAX, MAX).to(FP8).view(x.shape)
    return values, amax, x


@pytest.mark.parametrize("reads", [routed, widened, returned, reshaped])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_launch_gives_both(reads: Any, dynamic: bool) -> None:
    module = Stream(reads)
    x, residual = rows()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(residual, 0)
    traced = run(module, "group128", x, residual)
    assert traced.report.of(GROUP).matched == (SITE,), str(traced.report)
    assert form_of(traced) == f"{GROUP}_with_norm"
    (after,) = traced.after
    assert after.count("layerfuse.") == 1 and "rsqrt" not in after and "amax" not in after
    values, scales, other, total = traced.output
    normed = exact_norm(module, x, residual)
    assert_quantised(values, scales, normed, rounding=2**-8)
    with torch.no_grad():
        eager = module(x, residual)
    torch.testing.assert_close(other, eager[2], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(total, eager[3])


def test_without_another_reader_the_norm_is_not_written() -> None:
    traced = run(Stream(vllm_group), "group128", *rows())
    assert form_of(traced) == GROUP


@pytest.mark.parametrize(
    ("other", "more"),
    [
        (lambda x: vllm_group(x, 64), "max"),
        (vllm_per_token, "max"),
        (lambda x: vllm_group(x, ue8m0=True), "log2"),
        (lambda x: (x.abs().amax(0, keepdim=True),), "max"),
    ],
)
def test_two_quantisations_that_differ(other: Any, more: str) -> None:
    """The one that is as planned is fused, and the other quantises the norm that is kept: it is normed once."""
    module = Stream(lambda x: (*vllm_group(x), *other(x), *sglang_group(x)))
    x, residual = rows()
    traced = run(module, "group128", x, residual)
    assert form_of(traced) == f"{GROUP}_with_norm", str(traced.report)
    (after,) = traced.after
    assert after.count("layerfuse.") == 1 and "rsqrt" not in after and more in after
    normed = exact_norm(module, x, residual)
    for start in (0, len(traced.output) - 3):
        assert_quantised(*traced.output[start : start + 2], normed, rounding=2**-8)
    with torch.no_grad():
        eager = module(x, residual)
    for got, wanted in zip(traced.output[2:-3], eager[2:-3], strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.13, atol=0.02)


@pytest.mark.parametrize("quant", ["per_token", "group128"])
def test_the_query_latent_beside_its_quantisation(quant: str) -> None:
    """An indexer reads the normed query that the up-projection reads quantised."""

    class Module(Quantised):
        def forward(self, x: Tensor) -> Any:
            q, kv, k_pe = self.split(x)
            query = self.q_norm(q)
            return *self.quantise(query), self.kv_norm(kv), k_pe.exp(), query * 2

    module = Module(vllm_per_token if quant == "per_token" else vllm_group).bfloat16()
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    traced = trace_quantised(module, x, quant, specs=[("", mla_spec())])
    fusion = fusion_of(quant)
    assert traced.report.of(fusion).matched == ("latents",), str(traced.report)
    assert traced.after[0].count(f"layerfuse.{fusion}_with_norm(") == traced.fused == 1
    values, scales, _, _, doubled = traced.output
    normed = exact_query(module, x)
    assert_quantised(values, scales, normed, rounding=2**-8)
    torch.testing.assert_close(doubled.double(), 2 * normed, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (lambda x: (*vllm_group(x, 64), x), "the graph quantises groups of 64, the plan says 128"),
        (lambda x: (*vllm_group(x, 64), *vllm_per_token(x)), "the graph quantises "),
        (lambda x: (x, x * 2), "nothing quantises the result"),
        (keeps_the_largest, "a fused op does not compute"),
    ],
)
def test_where_none_is_as_planned_the_norm_alone_is_fused(reads: Any, reason: str) -> None:
    traced = run(Stream(reads), "group128", *rows())
    assert form_of(traced) == "add_rms_norm"
    assert reason in traced.report.of(GROUP).missed[SITE]


def test_nothing_is_kept_where_no_quantisation_is_planned() -> None:
    traced = run(Stream(routed), None, *rows())
    assert form_of(traced) == "add_rms_norm"
    assert not traced.report.of(GROUP).missed
