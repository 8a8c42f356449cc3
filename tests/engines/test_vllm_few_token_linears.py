"""Linears of 16 bits, and of fp8 with a scale per channel or per tensor, in vLLM's graphs: few tokens are layerfuse's where an option asks for it.

CUTLASS is plain torch here, behind vLLM's own op. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")

from few_token_linears import PLAIN, ROWS, everywhere
from reports import Said, told
from test_vllm_inside import seen
from test_vllm_plugin import ADD
from test_vllm_products import graph_of, targets  # which has CUTLASS's op
from test_vllm_specs import PER_TOKEN, STATIC, compressed
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.model_executor.layers.quantization.utils import w8a8_utils
from vllm_layers import fp8_kernel
from vllm_started import Started, apart, close, quantised_as_on_cuda, started

from layerfuse.engines.options import Options, OptionsError
from layerfuse.fusion.backends import counting

ON = {"few_token_linears": True}
ALL = {"fusions": "all", "strict": True}
KERNEL = "cutlass:CutlassFP8ScaledMMLinearKernel"
LINEARS = 4
"""qkv, o, gate and up, down of a layer."""
FP8 = torch.float8_e4m3fn
PER_TENSOR = compressed({"strategy": "tensor", "dynamic": False}, strategy="tensor")


@contextlib.contextmanager
def merged() -> Iterator[None]:
    """Let merged linears be given one scale when they are loaded, by plain torch in the place of vLLM's op."""

    def quantised(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (weight.float() / scale).clamp(-448, 448).to(FP8), scale

    with mock.patch.object(w8a8_utils.ops, "scaled_fp8_quant", quantised):
        yield


@contextlib.contextmanager
def model(
    path: Path, options: Any, quantisation: Any = None, stand_ins: Any = contextlib.nullcontext
) -> Iterator[Started]:
    """One layer of Qwen3."""
    overrides = {"num_hidden_layers": 1, **({} if quantisation is None else {"quantization_config": quantisation})}
    kernel = contextlib.nullcontext() if quantisation is None else fp8_kernel(KERNEL)
    with (
        kernel,
        stand_ins(),
        started("qwen3", path, layerfuse=options, dtype="bfloat16", overrides=overrides) as engine,
    ):
        yield engine


thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("quantisation", "stand_ins", "options"),
    [
        pytest.param(None, contextlib.nullcontext, {"fusions": ADD, "strict": True} | ON, id="16 bits"),
        pytest.param(None, contextlib.nullcontext, {"fusions": "none"} | ON, id="16 bits, nothing else", marks=thorough),
        pytest.param(None, contextlib.nullcontext, ON, id="16 bits, alone", marks=thorough),
        pytest.param(None, contextlib.nullcontext, {"fusions": f"+{PLAIN}"}, id="16 bits, by name"),
        pytest.param(PER_TOKEN, quantised_as_on_cuda, ALL | ON, id="per token, fused"),
        pytest.param(PER_TOKEN, quantised_as_on_cuda, {"fusions": "none"} | ON, id="per token, by vLLM's op", marks=thorough),
        pytest.param(PER_TENSOR, merged, ALL | ON, id="one scale for all", marks=thorough),
        pytest.param(STATIC, merged, ON, id="fp8, static"),
    ],
)  # fmt: skip
def test_few_tokens_are_layerfuses_where_that_is_asked_for(
    quantisation: Any, stand_ins: Any, options: dict[str, Any], tmp_path: Path, said: Said
) -> None:
    ops = "few_token_linear", "scaled_linear"
    op, other = ops if quantisation is None else ops[::-1]
    with model(tmp_path, options, quantisation, stand_ins) as engine:
        engine()  # compiles
        for tokens in (1, 16, 17):
            seen.clear()
            with counting() as called:
                found = engine(tokens)
            assert called[op] == LINEARS and not called[other]
            assert seen == [("CUTLASS", FP8, tokens)] * (LINEARS if tokens > 16 and quantisation is not None else 0)
            own = engine.uncompiled(tokens)
            assert close(found, own) if quantisation is not None else apart(found, own) < 0.02
    assert told(PLAIN if quantisation is None else ROWS, LINEARS) in said()


@pytest.mark.parametrize(
    ("quantisation", "stand_ins", "options"),
    [
        (None, contextlib.nullcontext, {"fusions": "all"}),
        pytest.param(None, contextlib.nullcontext, {"fusions": ADD, "few_token_linears": False}, marks=thorough),
        (PER_TOKEN, quantised_as_on_cuda, {"fusions": ADD}),
    ],
)
def test_without_the_option_they_are_vllms(quantisation: Any, stand_ins: Any, options: Any, tmp_path: Path) -> None:
    with model(tmp_path, options, quantisation, stand_ins) as engine:
        engine()
        with counting() as called:
            engine()
    assert not called["few_token_linear"] and not called["scaled_linear"]


def test_a_model_that_is_not_compiled_keeps_its_own(tmp_path: Path) -> None:
    options = {"fusions": ADD} | ON
    with (
        started("qwen3", tmp_path, layerfuse=options, dtype="bfloat16", mode="NONE") as engine,
        counting() as called,
    ):
        engine()
    assert called[ADD] and not called["few_token_linear"]


def test_the_option_is_true_or_false() -> None:
    assert Options(few_token_linears=True).asks and not Options(few_token_linears=True).says_nothing
    with pytest.raises(OptionsError, match=re.escape("few_token_linears: expected true or false, got 'yes'")):
        Options(few_token_linears="yes")  # type: ignore[arg-type]


# ---- graphs of 16 bits


def plain_graph_of(function: Any, *tensors: Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*tensors).graph


def few(graph: Graph) -> list[tuple[Any, ...]]:
    others = everywhere(PLAIN, graph)
    graph.lint()
    found = [node.args for node in graph.nodes if node.target is torch.ops.layerfuse.few_token_linear.default]
    assert others == (PLAIN,) * len(found)
    return found


X, W, B = torch.rand(6, 64).bfloat16(), torch.rand(96, 64).bfloat16(), torch.rand(96).bfloat16()


def test_with_a_bias_and_without() -> None:
    graph = plain_graph_of(lambda x, w, b: (torch.mm(x, w.t()), torch.addmm(b, x, w.t())), X, W, B)
    x, weight, bias = (node for node in graph.nodes if node.op == "placeholder")
    assert few(graph) == [(x, weight, None, False), (x, weight, bias, False)]
    assert not any("mm" in str(node.target) or "aten.t." in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda x, w: torch.mm(x, w), (X, W.t().contiguous())),  # no transpose of a parameter
        (lambda x, w: torch.mm(x, (w * 2).t()), (X, W)),  # of what is computed
        (lambda x, w: torch.mm(x, w.t()), (X[:, :1], torch.rand(65537, 1).bfloat16())),  # too wide
        (lambda x, w: torch.mm(x, w.t()), (X.float(), W.float())),
        (lambda x, w: torch.mm(x, w.t()), (X, W.t().contiguous().t())),  # column by column
        (lambda x, w: torch.mm(x, w.t()), (X.t().contiguous().t(), W)),
        (lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), (X, W, B)),
        (lambda x, w, b: torch.addmm(b, x, w.t()), (X, W, torch.rand(6, 96).bfloat16())),
    ],
)
def test_other_products_stay(function: Any, tensors: tuple[Tensor, ...]) -> None:
    graph = plain_graph_of(function, *tensors)
    before = [str(node.target) for node in graph.nodes]
    assert few(graph) == []
    assert [str(node.target) for node in graph.nodes] == before


# ---- graphs of fp8


def given() -> dict[str, Tensor]:
    return {
        "values": torch.rand(6, 256).to(FP8),
        "scales": torch.rand(6, 1),
        "weight": torch.rand(384, 256).to(FP8).t(),
        "weight_scale": torch.rand(384, 1),
        "bias": torch.rand(384).bfloat16(),
    }


def multiplied(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    out = torch.empty(len(values), weight.shape[1], dtype=dtype)
    named = {"out": out, "a": values, "b": weight, "a_scales": scales, "b_scales": weight_scale, "bias": bias}
    return auto_functionalized(torch.ops._C.cutlass_scaled_mm.default, **named)[1]


def linears(graph: Graph) -> list[tuple[Any, ...]]:
    everywhere(ROWS, graph)
    graph.lint()
    return [node.args for node in graph.nodes if node.target is torch.ops.layerfuse.scaled_linear.default]


def test_a_weight_that_was_turned_when_it_was_loaded() -> None:
    graph = graph_of(multiplied, **given())
    values, scales, weight, weight_scale, bias = (node for node in graph.nodes if node.op == "placeholder")
    ((first, second, turned, *others),) = linears(graph)
    assert (first, second) == (values, scales)
    assert turned.target is torch.ops.aten.permute.default and turned.args == (weight, [1, 0])
    assert turned.meta["val"].shape == (384, 256) and turned.meta["val"].is_contiguous()
    assert others == [weight_scale, bias, torch.bfloat16, True, "layerfuse_vllm::scaled_product_bfloat16"]
    assert targets(graph) == ["aten.permute.default", "layerfuse.scaled_linear.default"]


def test_a_weight_that_is_turned_in_the_graph() -> None:
    def turning(weight: Tensor, **others: Tensor) -> Tensor:
        return multiplied(weight=weight.t(), **others)

    tensors = given() | {"weight": torch.rand(384, 256).to(FP8)}
    graph = graph_of(turning, **tensors)
    weight = next(node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("arg2"))
    assert [args[2] for args in linears(graph)] == [weight]
    assert "auto_functionalized" not in targets(graph)


@pytest.mark.parametrize(
    "change",
    [
        {"scales": torch.rand(()), "weight_scale": torch.rand(())},
        {"scales": torch.rand(1), "weight_scale": torch.rand(1)},
        {"scales": torch.rand(1, 1), "weight_scale": torch.rand(384)},
        {"weight_scale": torch.rand(1, 384)},
    ],
    ids=("numbers", "of one", "a row of one", "columns"),
)
def test_one_scale_for_all_and_scales_in_other_shapes(change: dict[str, Tensor]) -> None:
    assert len(linears(graph_of(multiplied, **(given() | change)))) == 1


def test_what_it_becomes_computes_the_same() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        tensors = given()
        tensors["bias"] = tensors["bias"].to(dtype)

        def product(*each: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return multiplied(*each, dtype=dtype)

        module = make_fx(product, tracing_mode="fake")(*tensors.values())
        right = module(*tensors.values())
        assert len(linears(module.graph)) == 1
        module.recompile()
        torch.testing.assert_close(module(*tensors.values()), right)
        many = {name: tensors[name].repeat(3, 1) for name in ("values", "scales")}
        seen.clear()
        torch.testing.assert_close(module(*(tensors | many).values())[:6], right)
        assert seen == [("CUTLASS", FP8, 18)]


@pytest.mark.parametrize(
    "change",
    [
        {"scales": torch.rand(2, 6).t()},  # one for 128 columns
        {"scales": torch.rand(2, 6).t(), "weight_scale": torch.rand(3, 2).t()},  # blocks
        {"weight_scale": torch.rand(192, 1)},
        {"weight_scale": torch.rand(768, 1)[::2]},
        {"weight_scale": torch.rand(384, 1).double()},
        {"scales": torch.rand(6, 1).half()},
        {"values": torch.rand(6, 512).to(FP8)[:, ::2]},
        {"weight": torch.rand(256, 384).to(FP8)},  # row by row
        {"bias": torch.rand(768).bfloat16()[::2]},
        {"bias": torch.rand(384)},
        {name: given()[name].to(torch.int8) for name in ("values", "weight")},
    ],
    ids=lambda change: "-".join(f"{name}{tuple(each.shape)}{each.dtype}" for name, each in change.items()),
)
def test_what_the_kernel_does_not_read_is_left_alone(change: dict[str, Tensor]) -> None:
    graph = graph_of(multiplied, **(given() | change))
    before = targets(graph)
    assert linears(graph) == [] and targets(graph) == before


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
def test_what_is_computed_is_no_parameter(name: str) -> None:
    def changed(**each: Tensor) -> Tensor:
        narrow = each[name].view(torch.uint8) if name == "weight" else each[name]
        return multiplied(**(each | {name: torch.bitwise_or(narrow, 1).view(FP8) if name == "weight" else narrow * 2}))

    graph = graph_of(changed, **given())
    before = targets(graph)
    assert linears(graph) == [] and targets(graph) == before


def test_another_activation_of_the_graph_is_no_weight() -> None:
    """A piece's inputs are activations of other pieces too: of as many tokens as the step has."""
    q, k = torch.rand(4, 32), torch.rand(6, 32)
    graph = make_fx(lambda q, k: torch.relu(q) @ k.t(), tracing_mode="symbolic")(q.bfloat16(), k.bfloat16()).graph
    assert few(graph) == []
    graph = make_fx(
        lambda q, k, scales, one: multiplied(q, scales, k.t(), one), tracing_mode="symbolic"
    )(q.to(FP8), k.to(FP8), torch.rand(4, 1), torch.rand(1)).graph  # fmt: skip
    assert linears(graph) == []
