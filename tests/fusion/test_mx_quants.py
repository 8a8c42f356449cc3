"""MX quantisations in compiled models: MXFP8 and MXFP4 behind a norm, as our own op or as an engine's, by its schema."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from engine_ops import op
from fusion_support import FUSION, mla_spec
from helpers import in_turn
from quant_support import config
from stream_support import SITE, Stream, checked, exact_norm, form_of, rows, run, stream_spec
from torch import Tensor

from layerfuse import fusion
from layerfuse.fusion import Target
from layerfuse.fusion.match import quant_forms
from layerfuse.fusion.ops.quantisation import quantise_mxfp4, quantise_mxfp8

TARGETS = [Target.named("gfx950"), Target.named("sm100")]
REFERENCE = {"mxfp8": quantise_mxfp8, "mxfp4": quantise_mxfp4}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def engine_op(schema: str, scheme: str, **changes: Any) -> Any:
    """An engine's op by its schema: its own where it is loaded, else a stand-in of our arithmetic."""

    def stand_in(x: Tensor, *_: Any) -> Any:
        values, scales = REFERENCE[scheme](x)
        if changes.get("column_major"):
            scales = scales.t().contiguous().t()
        return values, scales.view(changes.get("dtype", torch.uint8))

    op(schema, fake=None)(stand_in)
    space, name = schema.partition("(")[0].split("::")
    return getattr(getattr(torch.ops, space), name)


OURS = {"mxfp8": torch.ops.layerfuse.quantise_mxfp8, "mxfp4": torch.ops.layerfuse.quantise_mxfp4}
VLLM_MXFP8 = engine_op(
    "vllm::mxfp8_quantize(Tensor x, bool is_sf_swizzled_layout=False, int alignment=0) -> (Tensor, Tensor)", "mxfp8"
)
VLLM_MXFP4 = engine_op("vllm::rocm_aiter_dynamic_mxfp4_quant(Tensor x) -> (Tensor, Tensor)", "mxfp4")
FORMS = {
    "ours, mxfp8": ("mxfp8", OURS["mxfp8"]),
    "ours, mxfp4": ("mxfp4", OURS["mxfp4"]),
    "vLLM, mxfp8": ("mxfp8", VLLM_MXFP8),
    "vLLM with AITER, mxfp4": ("mxfp4", VLLM_MXFP4),
}


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """In float64."""
    if values.dtype == torch.uint8:
        codes = torch.stack([values & 15, values >> 4], -1).flatten(-2).long()
        wide = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    else:
        wide = values.float()
    return (wide.double().unflatten(-1, (-1, 32)) * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(-2)


def assert_quantised(values: Tensor, scales: Tensor, normed: Tensor, rounding: float = 2**-8) -> None:
    """Half a step of the format, one and a half bits short of the largest at most: amax counts from 1.75 on as a 2. `rounding`: before it."""
    bits, largest, smallest = (3, 448.0, 2.0**-6) if values.dtype != torch.uint8 else (1, 6.0, 1.0)
    scale = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    magnitude = normed.abs() / scale
    step = torch.exp2(torch.floor(torch.log2(magnitude.clamp(min=smallest))) - bits)
    error = (dequantise(values, scales) - normed).abs() / scale
    beyond = (magnitude - largest).clamp(min=0)
    assert (error <= step * 0.5 * (1 + 1e-4) + magnitude * rounding + beyond).all()
    assert (beyond <= 1.0 if bits == 1 else beyond == 0).all()


@pytest.mark.parametrize(("form", "target", "shape"), in_turn(FORMS, TARGETS, [(5,), (2, 3), (0,)]), ids=str)
def test_the_stream(form: str, target: Target, shape: tuple[int, ...]) -> None:
    scheme, quantise = FORMS[form]
    module = Stream(quantise)
    x, residual = (torch.randn(*shape, 256).bfloat16() for _ in range(2))
    traced = run(module, scheme, x, residual, target=target)
    name = f"add_rms_norm_{scheme}_quant"
    verdict = traced.report.of(name)
    assert verdict.matched == (SITE,) and verdict.executed == 1, str(traced.report)
    assert form_of(traced) == name
    values, scales, total = traced.output
    assert torch.equal(total, x + residual)
    assert scales.dtype == torch.uint8 and scales.shape == (*shape, 8)
    assert_quantised(values, scales, exact_norm(module, x, residual))


@pytest.mark.parametrize("scheme", REFERENCE)
def test_a_router_keeps_the_norm(scheme: str) -> None:
    traced = run(Stream(lambda normed: (*OURS[scheme](normed), normed.exp())), scheme, *rows(), target=TARGETS[0])
    assert form_of(traced) == f"add_rms_norm_{scheme}_quant_with_norm"


REFUSED = [
    ("mxfp8", lambda x: VLLM_MXFP8(x, True), "it swizzles its exponents"),
    ("mxfp8", OURS["mxfp4"], "the graph quantises to mxfp4, the plan says mxfp8"),
    ("mxfp4", OURS["mxfp8"], "the graph quantises to mxfp8, the plan says mxfp4"),
    ("mxfp8", lambda x: torch.ops.layerfuse.quantise_per_token(x, torch.float8_e4m3fn, False), "the graph quantises to torch.float8_e4m3fn, the plan says mxfp8"),
    ("group32", OURS["mxfp8"], "the graph quantises to mxfp8, the plan says one scale per 32 columns"),
    ("mxfp8", engine_op('torchao::triton_to_mxfp8_dim0(Tensor x, int inner_block_size=32, str scaling_mode="rceil") ' "-> (Tensor, Tensor)", "mxfp8", dtype=torch.float8_e8m0fnu), "it gives its exponents as float8_e8m0fnu, rounded up"),
]  # fmt: skip


@pytest.mark.parametrize(("quant", "quantise", "reason"), REFUSED)
def test_left_alone(quant: str, quantise: Any, reason: str) -> None:
    module = Stream(quantise)
    with torch.no_grad():
        traced = run(module, quant, *rows(), target=TARGETS[0], lower=checked)
    scheme = "group" if quant == "group32" else quant
    assert reason in traced.report.of(f"add_rms_norm_{scheme}_quant").missed[SITE]
    assert form_of(traced) == "add_rms_norm"


def test_exponents_column_by_column() -> None:
    """AITER's dynamic_mxfp4_quant writes them so; the fused op writes rows."""
    columns = engine_op("layerfuse_tests::mxfp4(Tensor x) -> (Tensor, Tensor)", "mxfp4", column_major=True)
    line = quant_forms.ONE_OP_QUANTS["vllm::rocm_aiter_dynamic_mxfp4_quant"]
    with mock.patch.dict(quant_forms.ONE_OP_QUANTS, {"layerfuse_tests::mxfp4": line}):
        module = Stream(columns)
        traced = run(module, "mxfp4", *rows(), target=TARGETS[0])
    assert "strides (1, 5), and the fused op gives" in traced.report.of("add_rms_norm_mxfp4_quant").missed[SITE]


def test_not_on_targets_without_mx() -> None:
    for name in ("gfx942", "sm90"):
        made = fusion.plan([stream_spec()], Target.named(name), config("mxfp8"))
        (refused, *_) = made.refused("add_rms_norm_mxfp8_quant")
        assert "has no MX formats" in refused.reason


def test_latents_have_no_mx_form() -> None:
    made = fusion.plan([mla_spec()], TARGETS[0], config("mxfp8"))
    assert made.at("layer 0:latents") and {d.fusion for d in made.expected()} == {FUSION}
