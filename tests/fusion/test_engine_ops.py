"""Ops of engines that write into buffers or in place, as auto_functionalized has them in both of its versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_ops import scale_buffer
from fusion_support import HIDDEN, FusedProjection, mla_spec
from helpers import in_turn
from quant_support import FP8, MAX, assert_quantised, exact_query, fusion_of, trace_quantised
from stream_support import EPSILON, SITE, Stream, exact_norm, form_of, rows, run, stream_spec
from test_quant_static import assert_half_a_step
from torch import Tensor, nn

STATIC = "add_rms_norm_static_quant"


@pytest.fixture(params=[False, True], ids=["v1", "v2"], autouse=True)
def _version(request: pytest.FixtureRequest) -> Any:
    """vLLM asks for the first version, torch's default is the second."""
    with torch._inductor.config.patch(enable_auto_functionalized_v2=request.param):
        yield


def vllm_group(
    x: Tensor,
    layout: str = "row",
    size: int = 128,
    eps: float = 1e-10,
    high: float = MAX,
    low: float = -MAX,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    values, scales = torch.empty(x.shape, dtype=FP8), scale_buffer(x.shape[0], x.shape[1] // size, layout)
    torch.ops._C.per_token_group_fp8_quant(
        x, values, scales, size, eps, low, high, more.get("ue8m0", False), layout != "row", layout == "aligned"
    )
    return values, scales


def vllm_token(x: Tensor, bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
    values, scales = torch.empty(x.shape, dtype=FP8), torch.empty((x.shape[0], 1), dtype=torch.float32)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(values, x, scales, bound)
    return values, scales


QUANTS: dict[str, tuple[Any, str]] = {
    "vllm, row by row": (vllm_group, "group128"),
    "vllm, column by column": (lambda x: vllm_group(x, "column"), "group128,column_major"),
    "vllm, aligned": (lambda x: vllm_group(x, "aligned"), "group128,tma_aligned"),
    "vllm, aligned, ue8m0": (lambda x: vllm_group(x, "aligned", ue8m0=True), "group128,tma_aligned,ue8m0"),
    "vllm, groups of 64": (lambda x: vllm_group(x, size=64), "group64"),
    "vllm, per token": (vllm_token, "per_token"),
}


@pytest.mark.parametrize(("name", "dynamic"), in_turn(QUANTS, [False, True]))
def test_quantisations_into_buffers(name: str, dynamic: bool) -> None:
    quantise, quant = QUANTS[name]
    module = Stream(quantise)
    x, residual = rows(7)
    if dynamic:
        for each in (x, residual):
            torch._dynamo.mark_dynamic(each, 0)
    traced = run(module, quant, x, residual)
    assert form_of(traced) == f"add_rms_norm_{fusion_of(quant).removeprefix('mla_dual_rms_norm_')}", str(traced.report)
    assert "auto_functionalized" not in traced.after[0] and "aten.empty" not in traced.after[0]
    values, scales, _ = traced.output
    assert scales.stride() == module(x, residual)[1].stride()
    assert_quantised(values, scales, exact_norm(module, x, residual), rounding=2**-8)


class Static(Stream):
    def __init__(self, write: Any, shape: tuple[int, ...] = (1,)) -> None:
        super().__init__(write)
        self.scale = nn.Parameter(torch.full(shape, 0.02), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        total = x + residual
        normed = self.norm(total)
        values = torch.empty(normed.shape, dtype=FP8)
        scale = self.reads(values, normed, self.scale)
        return values, total, self.scale if scale is None else scale


def vllm_static(values: Tensor, x: Tensor, scale: Tensor) -> None:
    torch.ops._C.static_scaled_fp8_quant(values, x, scale, (-1, -1))


def aiter_static(values: Tensor, x: Tensor, scale: Tensor, dynamic: bool = False) -> Tensor:
    handed = scale.clone()
    torch.ops.vllm.rocm_aiter_per_tensor_quant(values, x, handed, dynamic)
    return handed


@pytest.mark.parametrize("write", [vllm_static, aiter_static])
def test_a_static_scale(write: Any) -> None:
    module = Static(write)
    x, residual = rows()
    traced = run(module, "static", x, residual)
    assert form_of(traced) == STATIC, str(traced.report)
    values, _, scale = traced.output
    assert_half_a_step(values, module.scale, exact_norm(module, x, residual))
    assert torch.equal(scale, module.scale)


@pytest.mark.parametrize(
    ("quantise", "quant", "reason"),
    [
        (lambda x: vllm_group(x, eps=1e-5), "group128", "raises the largest magnitude of a group to 1e-05"),
        (lambda x: vllm_group(x, eps=1.1e-10), "group128", "raises the largest magnitude of a group to 1.1e-10"),
        (lambda x: vllm_group(x, high=224.0, low=-224.0), "group128", "reaches 224, and the fused op 448"),
        (lambda x: vllm_group(x, low=-1.0), "group128", "clamps to -1 and 448"),
        (lambda x: vllm_group(x, "column"), "group128", "has the scales column by column, the plan row by row"),
        (lambda x: vllm_group(x, "column"), "group128,tma_aligned", "the plan column by column, TMA-aligned"),
        (lambda x: vllm_group(x, "aligned"), "group128,column_major", "has the scales column by column, TMA-aligned"),
        (lambda x: vllm_group(x, ue8m0=True), "group128", "the graph's scales are powers of two"),
        (lambda x: vllm_token(x, torch.ones(1)), "per_token", "the scale is bounded above"),
        (vllm_group, "per_token", "the graph quantises groups of 128"),
    ],
)
def test_left(quantise: Any, quant: str, reason: str) -> None:
    module = Stream(quantise)
    x, residual = rows(7)
    traced = run(module, quant, x, residual)
    fusion = f"add_rms_norm_{fusion_of(quant).removeprefix('mla_dual_rms_norm_')}"
    assert reason in traced.report.of(fusion).missed[SITE]
    assert form_of(traced) == "add_rms_norm" and "auto_functionalized" in traced.after[0]


@pytest.mark.parametrize(
    ("write", "shape", "reason"),
    [
        (lambda *given: torch.ops._C.static_scaled_fp8_quant(*given, (1, 128)), (5, 2), "given for blocks of (1, 128)"),
        (lambda *given: torch.ops._C.static_scaled_fp8_quant(*given, None), (256,), "is static and of shape (256,)"),
        (lambda *given: aiter_static(*given, True), (1,), "one scale for the whole tensor"),
    ],
)
def test_no_single_static_scale(write: Any, shape: tuple[int, ...], reason: str) -> None:
    traced = run(Static(write, shape), "static", *rows())
    assert reason in traced.report.of(STATIC).missed[SITE]
    assert form_of(traced) == "add_rms_norm"


# ---- norms -----------------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """The op writes the norm over its input and the sum over the residual."""

    def __init__(self, op: Any, more: tuple[Any, ...] = (), offset: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.rand(256).bfloat16() + 0.5 - offset, requires_grad=False)
        self.norm.offset = offset
        self.op, self.more = op, more

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = x.clone(), residual.clone()
        self.op(x, residual, self.norm.weight, EPSILON, *self.more)
        return x, residual

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        x, residual = self.add_and_norm(x, residual)
        return x * 2, residual


class Functional(InPlace):
    """vLLM's IR."""

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.op(x, residual, self.norm.weight, EPSILON)  # type: ignore[no-any-return]


class Gemma(Functional):
    """vLLM's GemmaRMSNorm: its op is given the weight with one added, in float32."""

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.op(x, residual, self.norm.weight.float() + 1.0, EPSILON)  # type: ignore[no-any-return]


ADDS: dict[str, Any] = {
    "vllm": lambda: InPlace(torch.ops._C.fused_add_rms_norm),
    "vllm ir": lambda: Functional(torch.ops.vllm_ir.fused_add_rms_norm),
    "vllm ir, gemma": lambda: Gemma(torch.ops.vllm_ir.fused_add_rms_norm, (), 1.0),
}


@pytest.mark.parametrize("name", ADDS)
def test_the_residual_is_added_inside_the_op(name: str) -> None:
    module = ADDS[name]()
    x, residual = rows()
    traced = run(module, None, x, residual, specs=[("layer", stream_spec(module.norm.offset))])
    assert form_of(traced) == "add_rms_norm", str(traced.report)
    assert "fused_add" not in traced.after[0]
    doubled, total = traced.output
    torch.testing.assert_close(doubled.double(), 2 * exact_norm(module, x, residual), rtol=2**-7, atol=1e-6)
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize(
    "weight",
    [lambda w: w + 1.0, lambda w: w.float() + 2.0, lambda w: w.float().add(1.0, alpha=2)],
    ids=["in bfloat16", "two", "twice one"],
)
def test_what_else_is_added_to_a_weight_is_no_zero_centred_norm(weight: Any) -> None:
    class Other(Gemma):
        def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            return self.op(x, residual, weight(self.norm.weight), EPSILON)  # type: ignore[no-any-return]

    traced = run(
        Other(torch.ops.vllm_ir.fused_add_rms_norm, (), 1.0), None, *rows(), specs=[("layer", stream_spec(1.0))]
    )
    assert "adds 0 to its weight; the spec says 1" in traced.report.of("add_rms_norm").missed[SITE]


@pytest.mark.parametrize(("reads", "name"), in_turn(["quantised", "both", "no sum"], ["vllm", "vllm ir"]))
def test_and_what_follows_is_quantised(name: str, reads: str) -> None:
    module = ADDS[name]()

    def forward(self: Any, x: Tensor, residual: Tensor) -> Any:
        x, residual = self.add_and_norm(x, residual)
        more = {"quantised": (residual,), "both": (residual, x * 2), "no sum": ()}[reads]
        return (*vllm_group(x), *more)

    changed = type("Changed", (type(module),), {"forward": forward})
    module.__class__ = changed
    x, residual = rows()
    traced = run(module, "group128", x, residual)
    assert form_of(traced) == "add_rms_norm_group_quant" + ("_with_norm" if reads == "both" else ""), str(traced.report)
    assert "auto_functionalized" not in traced.after[0]
    assert_quantised(*traced.output[:2], exact_norm(module, x, residual), rounding=2**-8)


def test_inputs_of_the_graph_are_still_written() -> None:
    class Writes(InPlace):
        def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            self.op(x, residual, self.norm.weight, EPSILON)
            return x, residual

    module = Writes(torch.ops._C.fused_add_rms_norm)
    x, residual = rows()
    given = (x.clone(), residual.clone())
    traced = run(module, None, *given)
    assert form_of(traced) == "add_rms_norm"
    torch.testing.assert_close(given[0].double(), exact_norm(module, x, residual), rtol=2**-7, atol=1e-6)
    assert torch.equal(given[1], x + residual)


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:3], lambda x: x[3:], lambda x: x.view(2, 3, -1)],
    ids=["first rows", "last rows", "batches"],
)
def test_views_of_what_is_written(view: Any, request: Any) -> None:
    class Part(InPlace):
        def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            x, residual = x * 1, residual * 1
            a, b = view(x), view(residual)
            self.op(a, b, self.norm.weight[: a.shape[-1]], EPSILON)
            return x, residual

    module = Part(torch.ops._C.fused_add_rms_norm)
    x, residual = rows(6)
    traced = run(module, None, x, residual)
    if "v2" in request.node.name:
        # The graph names the bases, and says beside them which part of each the op takes.
        assert traced.after == traced.before
        said = traced.report.of("add_rms_norm").missed[SITE]
        assert "_C::fused_add_rms_norm reads a view of" in said and "writes into it" in said
    with torch.no_grad():
        for got, wanted in zip(traced.output, module(x, residual), strict=True):
            torch.testing.assert_close(got, wanted, rtol=2**-6, atol=1e-6)


def test_an_op_with_another_epsilon() -> None:
    module = InPlace(lambda x, r, w, epsilon: torch.ops._C.fused_add_rms_norm(x, r, w, epsilon + 1e-7))
    traced = run(module, None, *rows())
    assert form_of(traced) is None and "epsilon" in traced.report.of("add_rms_norm").missed[SITE]


# ---- what the engine has fused already -------------------------------------------------------------------------------


class FusedByVllm(FusedProjection):
    """As vLLM's own pass leaves the latents: the query's norm and quantisation are one op, the keys' norm is another."""

    def __init__(self, quant: str, layout: str = "row") -> None:
        super().__init__()
        self.quant, self.layout = quant, layout

    def forward(self, x: Tensor) -> Any:
        q, kv, k_pe = self.split(x)
        values = torch.empty(q.shape, dtype=FP8)
        if self.quant == "group128":
            scales = scale_buffer(q.shape[0], 12, self.layout)
            torch.ops._C.rms_norm_per_block_quant(
                values, q, self.q_norm.weight, scales, EPSILON, None, None, 128, self.layout != "row"
            )
        else:
            scales = torch.empty((q.shape[0], 1), dtype=torch.float32)
            torch.ops._C.rms_norm_dynamic_per_token_quant(values, q, self.q_norm.weight, scales, EPSILON, None, None)
        keys = torch.empty(kv.shape, dtype=kv.dtype)
        torch.ops._C.rms_norm(keys, kv, self.kv_norm.weight, EPSILON)
        return values, scales, keys, k_pe.exp()


@pytest.mark.parametrize(
    ("quant", "layout"), [("group128", "row"), ("group128", "column"), ("group128", "aligned"), ("per_token", "row")]
)
def test_both_latents_are_one_launch_though_vllm_had_fused_one(quant: str, layout: str) -> None:
    module = FusedByVllm(quant, layout).bfloat16()
    module.requires_grad_(False)
    planned = quant + {"row": "", "column": ",column_major", "aligned": ",tma_aligned"}[layout]
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    traced = trace_quantised(module, x, planned, specs=[("", mla_spec())])
    assert traced.report.of(fusion_of(quant)).matched == ("latents",), str(traced.report)
    assert traced.fused == 1 and "auto_functionalized" not in traced.after[0]
    values, scales, keys, _ = traced.output
    normed = exact_query(module, x)
    assert_quantised(values, scales, normed, rounding=2**-8)
    assert scales.stride() == module(x)[1].stride()
    torch.testing.assert_close(keys, module(x)[2], rtol=2e-2, atol=2e-2)


def test_what_the_engine_has_fused_is_left_where_nothing_is_added_to_it() -> None:
    class Fused(Stream):
        def forward(self, x: Tensor, residual: Tensor) -> Any:
            values = torch.empty(x.shape, dtype=FP8)
            scales, total = scale_buffer(x.shape[0], 2, "row"), residual.clone()
            torch.ops._C.rms_norm_per_block_quant(values, x, self.norm.weight, scales, EPSILON, None, total, 128, False)
            return values, scales, total

    module = Fused(None)  # type: ignore[arg-type]
    module.norm.requires_grad_(False)
    traced = run(module, "group128", *rows())
    assert form_of(traced) is None and "auto_functionalized" in traced.after[0]
    reason = traced.report.of("add_rms_norm_group_quant").missed[SITE]
    assert reason == "the engine's own op norms and quantises already (_C::rms_norm_per_block_quant)"
