"""Norms that a graph holds as one op: torch's own where nothing decomposed them, and an engine's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_ops import op
from fusion_support import FUSION, KV, ROPE, Q, mla_spec
from torch.fx.experimental.proxy_tensor import make_fx

from layerfuse.fusion import Target, plan
from layerfuse.fusion.rewrite import Pipeline

# The schema of vLLM 0.33, which is not installed here; where it is, its own op is used.
op("vllm_ir::rms_norm(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor", fake=None)(
    lambda x, weight, epsilon, size=None: torch.empty_like(x)
)

FORMS: dict[str, Callable[..., Any]] = {
    "vllm_ir.rms_norm": lambda x, w: torch.ops.vllm_ir.rms_norm(x, w, 1e-6),
    "vllm_ir.rms_norm, all": lambda x, w: torch.ops.vllm_ir.rms_norm(x, w, 1e-6, None),
    "layerfuse.rms_norm": lambda x, w: torch.ops.layerfuse.rms_norm(x, w, 1e-6, 0.0),
}


def run(form: Callable[..., Any]) -> tuple[str, Pipeline]:
    def function(x: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor) -> Any:
        q, kv, _ = x.split([Q, KV, ROPE], -1)
        return form(q, q_weight), form(kv, kv_weight)

    module = make_fx(function, tracing_mode="fake")(torch.randn(3, Q + KV + ROPE), torch.rand(Q), torch.rand(KV))
    pipeline = Pipeline(plan([mla_spec()], Target.named("cpu")))
    pipeline(module.graph)
    module.graph.lint()
    return str(module.graph), pipeline


@pytest.mark.parametrize("name", FORMS)
def test_fused(name: str) -> None:
    text, pipeline = run(FORMS[name])
    assert text.count("layerfuse.mla_dual_rms_norm.default") == 1
    assert pipeline.report.of(FUSION).complete


@pytest.mark.parametrize(
    "form",
    [
        lambda x, w: torch.ops.vllm_ir.rms_norm(x, w, 1e-6, 128),
        lambda x, w: torch.ops.vllm_ir.rms_norm(x, None, 1e-6),
        lambda x, w: torch.ops.vllm_ir.rms_norm(x, w, 1.1e-6),
        lambda x, w: torch.ops.layerfuse.rms_norm(x, w, 1e-6, 1.0),
    ],
    ids=["part of the width", "no weight", "epsilon", "offset"],
)
def test_not_fused(form: Callable[..., Any]) -> None:
    text, pipeline = run(form)
    assert "mla_dual_rms_norm" not in text
    assert not pipeline.report.of(FUSION).complete


@pytest.mark.parametrize(("reader", "count"), [(False, 1), (True, 0)])
def test_torchs_own_op(reader: bool, count: int) -> None:
    # It reaches a pass whole only on a GPU, and only where nothing decomposed it: so the graph is built by hand.
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()

    def given(name: str, *shape: int) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(torch.empty(*shape))
        return node

    def call(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    x, q_weight, kv_weight = given("x", 3, Q + KV + ROPE), given("q_weight", Q), given("kv_weight", KV)
    parts = call(torch.ops.aten.split_with_sizes.default, x, [Q, KV, ROPE], -1)
    results = []
    for index, (width, weight) in enumerate(((Q, q_weight), (KV, kv_weight))):
        latent = call(operator.getitem, parts, index)
        norm = call(torch.ops.aten._fused_rms_norm.default, latent, [width], weight, 1e-6)
        results.append(call(operator.getitem, norm, 0))
        if reader:
            results.append(call(operator.getitem, norm, 1))
    graph.output(tuple(results))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    pipeline = Pipeline(plan([mla_spec()], Target.named("cpu")))
    pipeline(module.graph)
    assert str(module.graph).count("layerfuse.mla_dual_rms_norm.default") == count
    assert len(pipeline.report.of(FUSION).matched) == count
