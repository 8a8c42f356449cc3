"""fp8 linears with a scale per channel or per tensor in vLLM's graphs: few tokens are layerfuse's where an option asks for it.

CUTLASS is plain torch here, behind vLLM's own op. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")

from few_token_linears import ROWS, everywhere
from test_vllm_inside import seen
from test_vllm_plugin import ADD, fresh, said  # noqa: F401 (`fresh` is a fixture)
from test_vllm_products import graph_of, targets  # which has CUTLASS's op
from test_vllm_specs import PER_TOKEN, STATIC, compressed
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.model_executor.layers.quantization.utils import w8a8_utils
from vllm_layers import fp8_kernel
from vllm_started import close, quantised_as_on_cuda, started

from layerfuse.fusion.backends import counting

ON = {"few_token_linears": True}
KERNEL = "cutlass:CutlassFP8ScaledMMLinearKernel"
LINEARS = 4
"""qkv, o, gate and up, down of a layer."""
FP8 = torch.float8_e4m3fn


@contextlib.contextmanager
def merged() -> Iterator[None]:
    """Let merged linears be given one scale when they are loaded, by plain torch in the place of vLLM's op."""

    def quantised(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (weight.float() / scale).clamp(-448, 448).to(FP8), scale

    with mock.patch.object(w8a8_utils.ops, "scaled_fp8_quant", quantised):
        yield


@pytest.mark.parametrize(
    ("quantisation", "quantised", "fusions"),
    [
        pytest.param(PER_TOKEN, quantised_as_on_cuda, {"fusions": "all", "strict": True}, id="per token, fused"),
        pytest.param(
            PER_TOKEN,
            quantised_as_on_cuda,
            {"fusions": "none"},
            id="per token, by vLLM's op",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            compressed({"strategy": "tensor", "dynamic": False}, strategy="tensor"),
            merged,
            {"fusions": "all", "strict": True},
            id="one scale for all",
            marks=pytest.mark.thorough,
        ),
        pytest.param(STATIC, merged, {}, id="fp8, static"),
    ],
)
def test_few_tokens_are_layerfuses_where_that_is_asked_for(
    quantisation: dict[str, Any],
    quantised: Any,
    fusions: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    overrides = {"quantization_config": quantisation, "num_hidden_layers": 1}
    with (
        fp8_kernel(KERNEL),
        quantised(),
        started("qwen3", tmp_path, layerfuse=fusions | ON, dtype="bfloat16", overrides=overrides) as engine,
    ):
        engine()  # compiles
        for tokens in (1, 16, 17):
            seen.clear()
            with counting() as called:
                found = engine(tokens)
            assert called["scaled_linear"] == LINEARS and not called["few_token_linear"]
            assert seen == [("CUTLASS", FP8, tokens)] * (LINEARS if tokens > 16 else 0)
            assert close(found, engine.uncompiled(tokens))
    assert (
        f"{ROWS}: {LINEARS} expected, {LINEARS} fused, 0 missed; called {LINEARS} times in the profiling run"
        in said(caplog)
    )


def test_without_the_option_they_are_vllms(tmp_path: Path) -> None:
    overrides = {"quantization_config": PER_TOKEN, "num_hidden_layers": 1}
    with (
        fp8_kernel(KERNEL),
        quantised_as_on_cuda(),
        started("qwen3", tmp_path, layerfuse={"fusions": ADD}, dtype="bfloat16", overrides=overrides) as engine,
    ):
        engine()
        with counting() as called:
            engine()
    assert not called["scaled_linear"]


# ---- graphs


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
    rows, others = torch.rand(4, 32).to(FP8), torch.rand(6, 32).to(FP8)
    graph = make_fx(
        lambda q, k, scales, one: multiplied(q, scales, k.t(), one), tracing_mode="symbolic"
    )(rows, others, torch.rand(4, 1), torch.rand(1)).graph  # fmt: skip
    assert linears(graph) == []
