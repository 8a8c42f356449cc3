"""Every way in which engines quantise the normed query is found, fused exactly once, and gives what is stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, NORMS, TOLERANCE, FusedProjection, Q, trace
from helpers import in_turn
from quant_support import (
    CPU_FNUZ,
    FORMS,
    PLAIN,
    Quantised,
    QuantisedTwo,
    assert_quantised,
    canonical_group,
    canonical_per_token,
    dequantise,
    exact_query,
    exact_scales,
    fusion_of,
    sglang_group,
    trace_quantised,
    vllm_group,
    vllm_per_token,
)  # fmt: skip
from torch import nn
from torch.torch_version import TorchVersion

ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""What the graphs round before they quantise, which the fused op does not: twice to the activations' dtype."""


def assert_scales(got: torch.Tensor, wanted: torch.Tensor, ideal: torch.Tensor | None, rounding: float = 2**-8) -> None:
    """To a rounding; powers of two, whose `ideal` is what they were rounded up from, are equal, but where that is within it of one of them."""
    if ideal is None:
        torch.testing.assert_close(got.double(), wanted.double(), rtol=rounding, atol=0)
        return
    mantissa = torch.frexp(ideal).mantissa  # from 1/2 to 1, which both are powers of two
    on_edge = (mantissa <= (1 + rounding) / 2) | (mantissa >= 1 - rounding)
    ratio = got.double() / wanted.double()
    assert ((ratio == 1) | on_edge & ((ratio == 2) | (ratio == 0.5))).all(), ratio
    assert (torch.frexp(got).mantissa == 0.5).all()


def assert_fused(module: Any, x: torch.Tensor, quant: str, *, ue8m0: bool = False, **kwargs: Any) -> Any:
    with torch.no_grad():
        eager = module(x)
    traced = trace_quantised(module, x, quant, **kwargs)
    verdict = traced.report.of(fusion_of(quant))
    assert verdict.matched == verdict.expected == ("layer 0:latents",), str(traced.report)
    assert traced.report.of(PLAIN).fallback == ()
    (after,) = traced.after
    assert after.count(f"layerfuse.{fusion_of(quant)}(") == traced.fused == 1
    assert not any(word in after for word in ("rsqrt", "amax", "aten.max", "aten.abs", "reciprocal")), after
    values, scales, keys, rest = traced.output
    assert [part.stride() for part in traced.output] == [part.stride() for part in eager]
    normed = exact_query(module, x)
    wanted = exact_scales(normed, scales.shape[-1], ue8m0=ue8m0)
    assert_scales(scales, wanted, exact_scales(normed, scales.shape[-1]) if ue8m0 else None)
    # Against what is stated, and against the unfused module, which may have rounded twice before.
    assert_quantised(values, scales, normed, rounding=2**-8)
    rounding = ROUNDING[x.dtype]
    assert_quantised(eager[0], eager[1], normed, rounding=rounding)
    assert_scales(scales, eager[1], exact_scales(normed, scales.shape[-1]) if ue8m0 else None, rounding)
    ours, theirs = ((dequantise(*pair).double() - normed).abs().mean() for pair in ((values, scales), eager[:2]))
    assert ours <= theirs * 1.02
    torch.testing.assert_close(keys, eager[2], **TOLERANCE[x.dtype])
    if isinstance(module, QuantisedTwo):
        # A product of quantised values: each is off by up to 2**-4, 2.6 % of it in the mean square.
        assert (rest - eager[3]).float().norm() <= 0.04 * eager[3].float().norm()
    else:
        assert torch.equal(rest, eager[3])
    return traced


@pytest.mark.parametrize(("form", "dtype", "shape"), in_turn(FORMS, TOLERANCE, [Quantised, QuantisedTwo]), ids=str)
def test_form(form: str, dtype: torch.dtype, shape: Any) -> None:
    """Of two projections, the query's product comes before the keys."""
    quantise, quant = FORMS[form]
    assert_fused(shape(quantise).to(dtype), torch.randn(7, HIDDEN, dtype=dtype), quant, ue8m0="ue8m0" in quant)


@pytest.mark.parametrize(
    ("form", "norm"),
    in_turn(
        ["vllm, per token", "widened first", "deepgemm, groups", "canonical, groups"],
        sorted(set(NORMS) - {"llama", "torch"}),
    ),
)
def test_every_norm(form: str, norm: str) -> None:
    if (form, norm) == ("widened first", "wide") and TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("torch before 2.13 folds the rounding between norm and quantisation away: no norm is left to find")
    quantise, quant = FORMS[form]
    assert_fused(Quantised(quantise, NORMS[norm]).bfloat16(), torch.randn(7, HIDDEN, dtype=torch.bfloat16), quant)


def once_for_a_scheme(cases: list[Any]) -> list[Any]:
    """Of the cases of a form, those whose scheme another form has had already are `thorough`: `test_form` has every form."""
    first = {quant: form for form, (_, quant) in reversed(FORMS.items())}.values()
    return [
        pytest.param(*case.values, marks=case.marks if case.values[0] in first else pytest.mark.thorough)
        for case in cases
    ]


ROW_MAJOR = [form for form, (_, quant) in FORMS.items() if "column" not in quant]


@pytest.mark.parametrize(("form", "leading"), once_for_a_scheme(in_turn(ROW_MAJOR, [(2, 3), (2, 1, 3)])), ids=str)
def test_more_dimensions(form: str, leading: tuple[int, ...]) -> None:
    quantise, quant = FORMS[form]
    module = Quantised(quantise).half()
    assert_fused(module, torch.randn(*leading, HIDDEN, dtype=torch.float16), quant, ue8m0="ue8m0" in quant)


@pytest.mark.parametrize(("form", "shape"), once_for_a_scheme(in_turn(FORMS, [QuantisedTwo, Quantised])))
def test_one_graph_serves_every_token_count(form: str, shape: Any) -> None:
    quantise, quant = FORMS[form]
    x = torch.randn(7, HIDDEN)
    torch._dynamo.mark_dynamic(x, 0)
    traced = assert_fused(shape(quantise), x, quant, ue8m0="ue8m0" in quant)
    assert "float8_e4m3fn[s" in traced.after[0]


@pytest.mark.parametrize("form", [form for form, (_, quant) in FORMS.items() if "column" in quant])
@pytest.mark.parametrize("rows", [0, 1])
def test_a_single_token_lies_row_by_row_and_column_by_column(form: str, rows: int) -> None:
    quantise, quant = FORMS[form]
    for planned in (quant, quant.replace(",column_major", "")):
        traced = trace_quantised(Quantised(quantise), torch.randn(rows, HIDDEN), planned)
        assert traced.report.of(fusion_of(quant)).complete, str(traced.report)
        assert traced.output[1].shape == (rows, 12)


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Left in rows of one group each, which no other size of the graph has."""
    rows = x.reshape(-1, 128)
    scale = rows.abs().amax(-1, keepdim=True).float() / 448
    return (rows / scale).to(torch.float8_e4m3fn), scale


def turned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = vllm_group(x)
    return values, scales.T


def both_layouts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = vllm_group(x)
    return values, torch.stack([scales, scales.T.contiguous().T])


@pytest.mark.parametrize("quantise", [as_rows, turned, both_layouts])
@pytest.mark.parametrize("dynamic", [True, False])
def test_results_are_read_in_other_shapes(quantise: Any, dynamic: bool) -> None:
    module, x = Quantised(quantise), torch.randn(5, HIDDEN)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        eager = module(x)
    traced = trace_quantised(module, x, "group128")
    assert traced.fused == 1, str(traced.report)
    for got, wanted in zip(traced.output[:2], eager[:2], strict=True):
        assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
        torch.testing.assert_close(got.float(), wanted.float(), rtol=2**-3, atol=2**-9)


def test_the_format_of_gfx942() -> None:
    module = Quantised(lambda x: vllm_per_token(x, 240.0, torch.float8_e4m3fnuz)).bfloat16()
    x = torch.randn(7, HIDDEN, dtype=torch.bfloat16)
    traced = trace_quantised(module, x, "per_token", target=CPU_FNUZ)
    assert traced.fused == 1
    values, scales = traced.output[:2]
    assert values.dtype == torch.float8_e4m3fnuz
    torch.testing.assert_close(scales.double(), exact_scales(exact_query(module, x), 1, 240.0), rtol=2**-8, atol=0)


def test_rows_of_zeros_and_tiny_rows() -> None:
    # The graph's floor is 1 / (448 * 512) under the scale, the op's 1e-10 / 448: only such rows differ.
    module = Quantised(vllm_per_token)
    x = torch.randn(3, HIDDEN)
    x[0] = 0
    x[1] *= 1e-11
    with torch.no_grad():
        eager = module(x)
    values, scales, *_ = trace_quantised(module, x, "per_token").output
    assert (values[0].float() == 0).all() and (eager[0][0].float() == 0).all()
    assert scales[0].item() == pytest.approx(1e-10 / 448)
    assert eager[1][0].item() == pytest.approx(1 / (448 * 512))
    # The floor under the scale leaves a tiny row few steps; without it the row has them all.
    normed = exact_query(module, x)
    assert scales[1] < eager[1][1]
    assert_quantised(values[1:], scales[1:], normed[1:], rounding=2**-8)
    ours, theirs = (
        (dequantise(v[1:2], s[1:2]).double() - normed[1:2]).abs().mean() for v, s in ((values, scales), eager[:2])
    )
    assert ours < theirs
    torch.testing.assert_close(values[2].float(), eager[0][2].float(), rtol=2**-3, atol=2**-9)


def test_without_a_floor_a_row_of_zeros_is_nan_until_it_is_fused() -> None:
    quantise, quant = FORMS["torchao, no floor"]
    module, x = Quantised(quantise), torch.zeros(2, HIDDEN)
    with torch.no_grad():
        assert module(x)[0].float().isnan().all()
    values, scales, *_ = trace_quantised(module, x, quant).output
    assert (values.float() == 0).all() and (scales > 0).all()


class Twice(FusedProjection):
    """Two readers quantise the same value the same way, as an indexer beside the attention does."""

    def forward(self, x: torch.Tensor) -> Any:
        q, kv, _ = self.split(x)
        query = self.q_norm(q)
        return *sglang_group(query), self.kv_norm(kv), *vllm_group(query)


def test_two_equal_quantisations_are_one() -> None:
    x = torch.randn(5, HIDDEN)
    traced = trace_quantised(Twice(), x, "group128")
    assert traced.fused == 1
    a, a_scales, _, b, b_scales = traced.output
    assert torch.equal(a.float(), b.float()) and torch.equal(a_scales, b_scales)


@pytest.mark.parametrize(
    "quantise",
    [
        canonical_per_token,
        lambda x: canonical_per_token(x, True),
        canonical_group,
        lambda x: canonical_group(x, 64, True, True),
        lambda x: canonical_group(x, 32, False, True),
    ],
)
@pytest.mark.parametrize("rows", [(7,), (2, 3)])
def test_canonical_ops_that_nothing_took_are_lowered_bit_for_bit(quantise: Any, rows: tuple[int, ...]) -> None:
    class Alone(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return quantise(x)

    x = torch.randn(*rows, Q, dtype=torch.bfloat16)
    x[0] = 0
    x[-1, ..., 5] = torch.nan
    traced = trace(Alone(), x, specs=[])
    # Rows in several dimensions, laid out column by column, are said best by the op itself.
    stays = len(rows) > 1 and not quantise(x)[1].is_contiguous()
    assert ("layerfuse" in traced.after[0]) == stays
    for got, wanted in zip(traced.output, quantise(x), strict=True):
        assert got.stride() == wanted.stride()
        assert torch.equal(got.float().nan_to_num(nan=7e7), wanted.float().nan_to_num(nan=7e7))
