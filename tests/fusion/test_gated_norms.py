"""Gated norms in graphs: each way of writing one is found, goes in without copies, and is as exact as one rounding allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import HIDDEN, trace
from gated_support import FORMS, GATED, HEADS, WIDTH, GatedNorm, Heads, delta_net, exact
from helpers import in_turn
from quant_support import CPU_FP8, assert_quantised, config, dequantise, sglang_group, vllm_group, vllm_per_token
from stream_support import checked
from torch import Tensor, nn

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = ["heads", "flat", "tokens"]


def assert_as_exact_as_one_rounding(found: Tensor, wanted: Tensor) -> None:
    # Half a unit in the last place, and what float32 sums leave.
    step = torch.finfo(found.dtype).eps / 2
    error = (found.double() - wanted).abs()
    assert (error <= wanted.abs() * (step + 3e-6) + 1e-7).all(), (error / wanted.abs().clamp(min=1e-6)).max()


@pytest.mark.parametrize(("name", "dtype"), in_turn(FORMS, DTYPES), ids=str)
def test_every_form_is_found_and_exact(name: str, dtype: torch.dtype) -> None:
    make, activation, before, offset = FORMS[name]
    model = Heads(make()).to(dtype)
    hidden = torch.randn(2, 3, HIDDEN, dtype=dtype)
    traced = trace(model, hidden, specs=[("", delta_net(activation, before=before, offset=offset))])
    assert traced.report.of(GATED).complete, str(traced.report)
    assert traced.after[0].count("layerfuse.gated_rms_norm(") == 1
    assert "aten.rsqrt" not in traced.after[0] and "aten.mul" not in traced.after[0]
    core, gate = model.halves(hidden)
    wanted = exact(model.norm, core, gate.unflatten(-1, (HEADS, WIDTH)), activation, before, offset)
    assert_as_exact_as_one_rounding(traced.output, wanted.flatten(-2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_strided_gate_goes_in_without_a_copy(layout: str) -> None:
    model = Heads(GatedNorm(), layout).bfloat16()
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    traced = trace(model, hidden, specs=[("", delta_net())])
    assert traced.report.of(GATED).complete, str(traced.report)
    assert ("aten.clone" in traced.before[0]) == (layout == "flat")
    assert "aten.clone" not in traced.after[0]
    torch.testing.assert_close(traced.output, model(hidden), rtol=1.6e-2, atol=1.6e-2)


def test_a_strided_gate_whose_heads_were_never_apart_goes_in_without_a_copy() -> None:
    class Joined(Heads):
        def forward(self, hidden: Tensor) -> Tensor:
            core, gate = self.proj(hidden).split([HEADS * WIDTH, HEADS * WIDTH], -1)
            return self.norm(core.sin().reshape(-1, WIDTH), gate.reshape(-1, WIDTH))

    model = Joined(GatedNorm())
    traced = trace(model, torch.randn(2, 3, HIDDEN), specs=[("", delta_net())])
    assert traced.report.of(GATED).complete, str(traced.report)
    assert "aten.clone" in traced.before[0] and "aten.clone" not in traced.after[0]


def test_a_copy_that_something_else_reads_stays() -> None:
    class Shared(Heads):
        def forward(self, hidden: Tensor) -> Any:
            core, gate = self.halves(hidden)
            flat = gate.reshape(-1, WIDTH)
            return self.norm(core.reshape(-1, WIDTH), flat), flat

    model = Shared(GatedNorm()).bfloat16()
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    traced = trace(model, hidden, specs=[("", delta_net())])
    assert traced.report.of(GATED).complete
    assert traced.after[0].count("aten.clone") == 1
    assert all(torch.equal(a, b) for a, b in zip(traced.output[1:], model(hidden)[1:], strict=True))


def test_a_gate_whose_columns_are_interleaved_keeps_its_copy() -> None:
    class Interleaved(Heads):
        def forward(self, hidden: Tensor) -> Tensor:
            core, gate = self.halves(hidden)
            gate = gate.unflatten(-1, (WIDTH, HEADS)).transpose(-1, -2)  # last stride 4
            return self.norm(core, gate)

    model = Interleaved(GatedNorm()).bfloat16()
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    traced = trace(model, hidden, specs=[("", delta_net())])
    assert traced.after == traced.before
    assert "no views (..., 4, 128) of one shape with a last stride of 1" in traced.report.of(GATED).missed["output"]


def test_a_float32_weight_beside_16_bit_activations() -> None:
    for name in ("silu", "rounded before the weight", "after the gate"):
        make, activation, before, offset = FORMS[name]
        model = Heads(make()).bfloat16()
        model.norm.float()
        hidden = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
        traced = trace(model, hidden, specs=[("", delta_net(activation, before=before))])
        assert traced.report.of(GATED).complete, f"{name}: {traced.report}"
        core, gate = model.halves(hidden)
        wanted = exact(model.norm, core, gate.unflatten(-1, (HEADS, WIDTH)), activation, before, offset)
        assert_as_exact_as_one_rounding(traced.output, wanted.flatten(-2))


# ---- with a quantisation ---------------------------------------------------------------------------------------------


class Quantised(Heads):
    """The out projection takes fp8."""

    def __init__(self, norm: nn.Module, layout: str, quantise: Any) -> None:
        super().__init__(norm, layout)
        self.quantise = quantise

    def forward(self, hidden: Tensor) -> Any:
        return self.quantise(super().forward(hidden))


READERS = [
    (vllm_per_token, "per_token"),
    (sglang_group, "group128"),
    (lambda x: sglang_group(x, 32), "group32"),
    (lambda x: vllm_group(x, column_major=True), "group128,column_major"),
    (lambda x: vllm_group(x.flatten(0, -2)), "group128"),
]


@pytest.mark.parametrize(
    ("reader", "name", "layout"),
    in_turn(READERS, ["silu", "rounded before the weight", "after a sigmoid gate"], LAYOUTS),
)
def test_quantised_in_the_readers_shapes(name: str, layout: str, reader: tuple[Any, str]) -> None:
    (make, activation, before, offset), (quantise, quant) = FORMS[name], reader
    model = Quantised(make(), layout, quantise).bfloat16()
    hidden = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    spec = delta_net(activation, before=before)
    with torch.no_grad():
        traced = trace(model, hidden, specs=[("", spec)], config=config(quant), target=CPU_FP8)
    fusion = f"{GATED}_{'per_token' if quant == 'per_token' else 'group'}_quant"
    assert traced.report.of(fusion).complete, str(traced.report)
    assert "aten.clone" not in traced.after[0] and "aten.amax" not in traced.after[0]
    values, scales = traced.output
    eager_values, eager_scales = model(hidden)
    assert values.shape == eager_values.shape and scales.shape == eager_scales.shape
    assert scales.stride() == eager_scales.stride()
    core, gate = model.halves(hidden)
    wanted = exact(model.norm, core, gate.unflatten(-1, (HEADS, WIDTH)), activation, before, offset).flatten(-2)
    assert_quantised(values, scales, wanted, rounding=2**-8)


class TwoProjections(Quantised):
    """The gate has a projection of its own, as with fp8 layers that are not merged."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.gate_proj, self.proj = (nn.Linear(HIDDEN, HEADS * WIDTH, bias=False) for _ in range(2))

    def halves(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.proj(hidden).unflatten(-1, (HEADS, WIDTH)), self.gate_proj(hidden)


@pytest.mark.parametrize(("layout", "reader", "make"), in_turn(LAYOUTS, READERS[:2], [Quantised, TwoProjections]))
def test_quantised_where_batches_and_tokens_both_vary(reader: tuple[Any, str], make: Any, layout: str) -> None:
    quantise, quant = reader
    model = make(GatedNorm(), layout, quantise).bfloat16()
    hidden = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(hidden, dim)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        traced = trace(model, hidden, specs=[("", delta_net())], config=config(quant), target=CPU_FP8, lower=checked)
    verdict = traced.report.of(f"{GATED}_{'per_token' if quant == 'per_token' else 'group'}_quant")
    assert verdict.complete and verdict.executed == 1, str(traced.report)
    values, scales = traced.output
    eager_values, eager_scales = model(hidden)
    assert (values.shape, scales.shape) == (eager_values.shape, eager_scales.shape)
    core, gate = model.halves(hidden)
    wanted = exact(model.norm, core, gate.unflatten(-1, (HEADS, WIDTH)), "silu", True, 0.0).flatten(-2)
    assert_quantised(values, scales, wanted, rounding=2**-8)


def test_a_quantisation_of_single_heads() -> None:
    # Rows of one head are quantised before the heads are joined: groups as wide as a head.
    model = Quantised(GatedNorm(), "flat", lambda x: sglang_group(x.reshape(-1, WIDTH))).bfloat16()
    hidden = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        traced = trace(model, hidden, specs=[("", delta_net())], config=config("group128"), target=CPU_FP8)
    assert traced.report.of(f"{GATED}_group_quant").complete, str(traced.report)
    values, scales = traced.output
    assert values.shape == (5 * HEADS, WIDTH) and scales.shape == (5 * HEADS, 1)
    wanted, wanted_scales = model(hidden)
    torch.testing.assert_close(dequantise(values, scales), dequantise(wanted, wanted_scales), rtol=0.13, atol=0.05)


def test_a_second_reader_leaves_the_gated_norm_alone_as_the_fallback() -> None:
    class Read(Quantised):
        def forward(self, hidden: Tensor) -> Any:
            normed = Heads.forward(self, hidden)
            return *self.quantise(normed), normed * 2

    model = Read(GatedNorm(), "flat", sglang_group).bfloat16()
    hidden = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        traced = trace(model, hidden, specs=[("", delta_net())], config=config("group128"), target=CPU_FP8)
    assert "needs it unquantised" in traced.report.of(f"{GATED}_group_quant").missed["output"]
    assert traced.report.of(GATED).fallback == ("output",)
    assert "layerfuse.gated_rms_norm(" in traced.after[0]
