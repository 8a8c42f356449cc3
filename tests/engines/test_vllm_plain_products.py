"""Linears of 16 bits in vLLM's graphs: few tokens are layerfuse's where an option asks for it.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_started")

from few_token_linears import PLAIN, everywhere
from test_vllm_plugin import ADD, fresh, said  # noqa: F401 (`fresh` is a fixture)
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from vllm_started import apart, started

from layerfuse.engines.options import Options, OptionsError
from layerfuse.fusion.backends import counting

ON = {"few_token_linears": True}
ONE: dict[str, Any] = {"overrides": {"num_hidden_layers": 1}}


@pytest.mark.parametrize(
    "fusions",
    [
        {"fusions": ADD, "strict": True} | ON,
        pytest.param({"fusions": "none"} | ON, marks=pytest.mark.thorough),
        pytest.param(ON, marks=pytest.mark.thorough),
        {"fusions": f"+{PLAIN}"},
    ],
)
def test_linears_of_a_compiled_model_are_layerfuses_where_that_is_asked_for(
    fusions: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started("qwen3", tmp_path, layerfuse=fusions, dtype="bfloat16", **ONE) as engine:
        engine()
        for tokens in (1, 16, 17):
            with counting() as called:
                found = engine(tokens)
            assert called["few_token_linear"] == 4, "qkv, o, gate and up, down"
            assert apart(found, engine.uncompiled(tokens)) < 0.02
    assert f"{PLAIN}: 4 expected, 4 fused, 0 missed; called 4 times in the profiling run" in said(caplog)


@pytest.mark.parametrize(
    "layerfuse",
    [{"fusions": "all"}, pytest.param({"fusions": ADD, "few_token_linears": False}, marks=pytest.mark.thorough)],
)
def test_without_the_option_they_are_vllms(layerfuse: dict[str, Any], tmp_path: Path) -> None:
    with started("qwen3", tmp_path, layerfuse=layerfuse, dtype="bfloat16", **ONE) as engine:
        engine()
        with counting() as called:
            engine()
    assert not called["few_token_linear"]


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


# ---- graphs


def graph_of(function: Any, *tensors: Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*tensors).graph


def few(graph: Graph) -> list[tuple[Any, ...]]:
    others = everywhere(PLAIN, graph)
    graph.lint()
    found = [node.args for node in graph.nodes if node.target is torch.ops.layerfuse.few_token_linear.default]
    assert others == (PLAIN,) * len(found)
    return found


X, W, B = torch.rand(6, 64).bfloat16(), torch.rand(96, 64).bfloat16(), torch.rand(96).bfloat16()


def test_with_a_bias_and_without() -> None:
    graph = graph_of(lambda x, w, b: (torch.mm(x, w.t()), torch.addmm(b, x, w.t())), X, W, B)
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
    graph = graph_of(function, *tensors)
    before = [str(node.target) for node in graph.nodes]
    assert few(graph) == []
    assert [str(node.target) for node in graph.nodes] == before


def test_another_activation_of_the_graph_is_no_weight() -> None:
    """A piece's inputs are activations of other pieces too: of as many tokens as the step has."""
    rows = torch.rand(4, 32).bfloat16(), torch.rand(6, 32).bfloat16()
    graph = make_fx(lambda q, k: torch.relu(q) @ k.t(), tracing_mode="symbolic")(*rows).graph
    assert few(graph) == []
