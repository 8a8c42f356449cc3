"""The products of gated MLPs with the quantisation that reads them: every form, found at the right MLP, counted, exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_ops import op
from fusion_support import HIDDEN, Traced, trace
from gated_support import INNER, PRODUCTS, GatedMLP, clamped, mlp, swiglu
from helpers import in_turn
from quant_support import CPU_FP8, assert_quantised, config, dequantise, sglang_group, vllm_group, vllm_per_token
from stream_support import checked
from torch import Tensor, nn
from torch.nn import functional as F

from layerfuse import fusion

GROUP, PER_TOKEN = "silu_mul_group_quant", "silu_mul_per_token_quant"


def traced_mlp(model: nn.Module, x: Tensor, quant: str = "group128", specs: Any = None, **changes: Any) -> Traced:
    specs = [("", mlp())] if specs is None else specs
    with torch.no_grad():
        return trace(model, x, specs=specs, config=config(quant), target=CPU_FP8, **changes)


class Values(GatedMLP):
    """The quantised product itself."""

    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.gate_up_proj(x).chunk(2, -1) if self.merged else (self.gate_proj(x), self.up_proj(x))

    def forward(self, x: Tensor) -> Any:
        return self.quantise(self.product(*self.halves(x)))


@pytest.mark.parametrize(
    ("name", "merged", "dtype"),
    in_turn(PRODUCTS, [True, False], [torch.bfloat16, torch.float16, torch.float32]),
    ids=str,
)
def test_every_form_is_found_and_exact(name: str, merged: bool, dtype: torch.dtype) -> None:
    product, limit = PRODUCTS[name]
    model = Values(sglang_group, product, merged).to(dtype)
    x = torch.randn(2, 3, HIDDEN, dtype=dtype) * 4
    traced = traced_mlp(model, x, specs=[("", mlp(limit))])
    assert traced.report.of(GROUP).complete, str(traced.report)
    assert "aten.clone" not in traced.after[0] and "aten.exp" not in traced.after[0]
    values, scales = traced.output
    gate, up = (half.double() for half in model.halves(x))
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    wanted = F.silu(gate) * up
    assert_quantised(values, scales, wanted, rounding=2**-8)


READERS = [
    (vllm_per_token, "per_token"),
    (sglang_group, "group128"),
    (lambda x: vllm_group(x.contiguous()), "group128"),
    (lambda x: sglang_group(x.flatten(0, -2)), "group128"),
    (lambda x: vllm_group(x, 64), "group64"),
    (lambda x: vllm_group(x.flatten(0, -2), column_major=True), "group128,column_major"),
]


@pytest.mark.parametrize(("reader", "merged"), in_turn(READERS, [True, False]))
def test_batches_and_tokens_may_both_vary(reader: tuple[Any, str], merged: bool) -> None:
    quantise, quant = reader
    # Two projections give joined rows, and what reads the quantisation has them in two dimensions.
    model = Values(quantise, merged=merged).bfloat16()
    x = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    with torch._dynamo.config.patch(specialize_float=True):
        traced = traced_mlp(model, x, quant, lower=checked)
    verdict = traced.report.of(PER_TOKEN if quant == "per_token" else GROUP)
    assert verdict.complete and verdict.executed == 1, str(traced.report)
    values, scales = traced.output
    eager_values, eager_scales = model(x)
    assert (values.shape, scales.shape) == (eager_values.shape, eager_scales.shape)
    gate, up = (half.double() for half in model.halves(x))
    wanted = (F.silu(gate) * up).view(values.shape)
    assert_quantised(values, scales, wanted, rounding=2**-8)


def test_without_a_quantisation_nothing_is_planned() -> None:
    # The compiler makes one kernel of silu and the product by itself.
    model = GatedMLP(None)
    traced = trace(model, torch.randn(2, HIDDEN), specs=[("", mlp())], target=CPU_FP8)
    assert traced.report.plan.expected() == ()
    assert traced.after == traced.before


# ---- whose product it is ---------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def layers_of(count: int, **changes: Any) -> list[tuple[str, Any]]:
    return [(f"layers.{i}", mlp(index=i, **changes)) for i in range(count)]


@pytest.mark.parametrize("by_weight", [True, False])
def test_each_layer_has_its_own(by_weight: bool) -> None:
    model = Layers(*(GatedMLP(sglang_group) for _ in range(3))).bfloat16()
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    traced = traced_mlp(model, x, specs=layers_of(3), by_weight=by_weight)
    uses = traced.report.records[0].uses
    assert [use.site for use in uses] == [f"layers.{i}:activation" for i in range(3)]
    assert {use.how for use in uses} == {"parameter" if by_weight else "module path"}
    assert traced.report.of(GROUP).complete


def test_experts_are_not_the_shared_mlp() -> None:
    class Experts(nn.Module):
        """Gate, up and down of all experts in one tensor each."""

        def __init__(self) -> None:
            super().__init__()
            self.gate_up = nn.Parameter(torch.randn(2, HIDDEN, 2 * INNER) / 8)
            self.down = nn.Parameter(torch.randn(2, INNER, HIDDEN) / 16)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = (x @ self.gate_up).chunk(2, -1)
            return (dequantise(*sglang_group(F.silu(gate) * up)).to(x.dtype) @ self.down).sum(0)

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.shared = Experts(), GatedMLP(sglang_group)

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x) + self.shared(x)

    model = Sparse().bfloat16()
    traced = traced_mlp(model, torch.randn(5, HIDDEN, dtype=torch.bfloat16), specs=[("shared", mlp())])
    assert traced.report.of(GROUP).complete
    assert traced.report.of(GROUP).compiled == 1
    assert traced.after[0].count("aten.amax") + traced.after[0].count("aten.max.dim") == 1


# ---- engines' ops ----------------------------------------------------------------------------------------------------


def silu_and_mul(
    out: Tensor, given: Tensor, limit: float = float("inf"), alpha: float = 1.0, beta: float = 0.0
) -> None:
    gate, up = given.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_(gate * torch.sigmoid(alpha * gate) * (up + beta))


for _schema in (
    "_C::silu_and_mul(Tensor! result, Tensor input) -> ()",
    "_C::silu_and_mul_with_clamp(Tensor! result, Tensor input, float limit, float alpha=1.0, float beta=0.0) -> ()",
):
    op(_schema)(silu_and_mul)


def by(name: str, *more: float) -> Callable[[Tensor, Tensor], Tensor]:
    space, name = name.split("::")

    def call(gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(up, memory_format=torch.contiguous_format)
        getattr(getattr(torch.ops, space), name)(out, torch.cat([gate, up], -1), *more)
        return out

    return call


@pytest.mark.parametrize(
    ("op", "more", "limit"),
    [
        ("_C::silu_and_mul", (), None),
        ("_C::silu_and_mul_with_clamp", (0.5,), 0.5),
    ],
)  # fmt: skip
def test_an_engines_op_goes_in_as_columns_of_its_input(op: str, more: Any, limit: float | None) -> None:
    model = GatedMLP(sglang_group, by(op, *more), merged=False).bfloat16()
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16) * 4
    traced = traced_mlp(model, x, specs=[("", mlp(limit))])
    assert traced.report.of(GROUP).complete, str(traced.report)
    assert "silu_and_mul" not in traced.after[0] and "aten.empty" not in traced.after[0]
    assert traced.after[0].count("aten.slice") == 2
    torch.testing.assert_close(traced.output, model(x), rtol=0.1, atol=0.1)


def test_an_engines_op_that_does_more_is_left_alone() -> None:
    model = GatedMLP(sglang_group, by("_C::silu_and_mul_with_clamp", 7.0, 1.702, 1.0), merged=False).bfloat16()
    traced = traced_mlp(model, torch.randn(5, HIDDEN, dtype=torch.bfloat16), specs=[("", mlp(7.0))])
    assert traced.after == traced.before
    assert traced.report.of(GROUP).matched == () and traced.report.of(GROUP).missed


# ---- look-alikes -----------------------------------------------------------------------------------------------------


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def clamped_below(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(-0.5, 0.5)) * up.clamp(-0.5, 0.5)


def two_clamps(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=0.5)) * up.clamp(-0.25, 0.25)


def lopsided(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=0.5)) * up.clamp(-0.25, 0.5)


LOOK_ALIKES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None, str]] = {
    "gelu": (gelu, None, "neither of which is silu of a gate"),
    "gpt-oss": (gpt_oss, 7.0, "neither of which is silu of a gate"),
    "relu": (lambda gate, up: gate.relu() * up, None, "neither of which is silu of a gate"),
    "sigmoid": (lambda gate, up: gate.sigmoid() * up, None, "neither of which is silu of a gate"),
    "a clamp that is not planned": (clamped, None, "has a clamp at 0.5; the spec says no clamp"),
    "no clamp": (swiglu, 0.5, "has no clamp; the spec says a clamp at 0.5"),
    "another clamp": (clamped, 7.0, "has a clamp at 0.5; the spec says a clamp at 7"),
    "a gate clamped from below": (clamped_below, 0.5, "clamps the gate from below, at -0.5"),
    "two limits": (two_clamps, 0.5, "clamps its gate to 0.5 and the other half to 0.25"),
    "lopsided": (lopsided, 0.5, "clamps between -0.25 and 0.5"),
}


@pytest.mark.parametrize(("name", "by_weight"), in_turn(LOOK_ALIKES, [True, False]))
def test_a_look_alike_is_left_alone_with_its_reason(name: str, by_weight: bool) -> None:
    product, limit, reason = LOOK_ALIKES[name]
    model = GatedMLP(sglang_group, product).bfloat16()
    x = torch.randn(2, 3, HIDDEN, dtype=torch.bfloat16)
    traced = traced_mlp(Layers(model), x, specs=layers_of(1, limit=limit), by_weight=by_weight)
    assert traced.after == traced.before
    verdict = traced.report.of(GROUP)
    assert (len(verdict.expected), verdict.matched) == (1, ())
    assert reason in verdict.missed["layers.0:activation"]


def test_a_clamp_at_a_number_that_varies_is_no_limit() -> None:
    def product(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.clamp(max=gate.shape[0])) * up

    with torch._dynamo.config.patch(specialize_float=True):
        traced = traced_mlp(GatedMLP(sglang_group, product), torch.randn(5, HIDDEN), dynamic=True)
    (text,) = traced.after
    assert traced.report.of(GROUP).matched == ("activation",)
    assert "aten.clamp_max(" in text and ", inf, torch.float8_e4m3fn, 128," in text


@pytest.mark.parametrize("gate", ["gelu", "relu2"])
def test_another_activation_is_refused_by_the_plan(gate: str) -> None:
    made = fusion.plan([("mlp", mlp(activation=gate))], CPU_FP8, config("group128"))
    (refused,) = made.refused(GROUP)
    assert refused.reason == f"its gate passes through {gate}; the fused op knows silu"


def test_an_mlp_of_another_width() -> None:
    traced = traced_mlp(GatedMLP(sglang_group, width=128), torch.randn(5, HIDDEN))
    assert "has width 128; the spec says 256" in traced.report.of(GROUP).missed["activation"]


# ---- a real model ----------------------------------------------------------------------------------------------------
