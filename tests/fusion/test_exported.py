"""Exported models, compiled ahead of time: the rewriting in Inductor's slot, and the numbers of the package that comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_support import FUSION, HIDDEN, LlamaNorm, TwoProjections, mla_spec, with_modules
from torch import nn
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from layerfuse.fusion import Target, plan
from layerfuse.fusion.rewrite import Pipeline
from layerfuse.fusion.rewrite.assertions import drop_answered_checks


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoProjections(LlamaNorm) for _ in range(count))

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part for layer in self.layers for part in layer(x))


def pipeline(count: int) -> Pipeline:
    specs = [(f"layers.{i}", with_modules(mla_spec(i))) for i in range(count)]
    return Pipeline(plan(specs, Target.named("cpu")))


def in_the_slot(made: Pipeline) -> Any:
    # The wrapper's C++ is not to be quick, and headers that one compilation reads are not worth compiling beforehand.
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    return inductor_config.patch({"post_grad_custom_pre_pass": made, "force_disable_caches": True, **quick})


def test_a_package_compiled_ahead_of_time(tmp_path: Path) -> None:
    model, x, made = Layers(2).eval(), torch.randn(5, HIDDEN), pipeline(2)
    with torch.no_grad(), in_the_slot(made):
        program = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert made.report.of(FUSION).matched == ("layers.0:latents", "layers.1:latents"), str(made.report)
    assert {use.how for record in made.report.records for use in record.uses} == {"module path"}
    run = torch._inductor.aoti_load_package(package)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        got = run(x)
    for each, wanted in zip(got, model(x), strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)
    assert sum(event.name == f"layerfuse::{FUSION}" for event in profiled.events()) == 2


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ({"dtype": torch.float32}, True),
        ({"dtype": torch.float32, "device": torch.device("cpu"), "layout": torch.strided}, True),
        ({"dtype": torch.bfloat16}, False),
        ({"device": torch.device("cuda")}, False),
        ({"size": [5, HIDDEN], "dtype": torch.float32}, False),
        ({"stride": [HIDDEN, 1]}, False),
    ],
    ids=str,
)
def test_only_checks_that_the_trace_answers_are_dropped(asked: dict[str, Any], answered: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(5, HIDDEN)
    graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (x,), asked)
    graph.output(x)
    drop_answered_checks(graph)
    graph.lint()
    assert (len(graph.nodes) == 2) is answered


def test_norms_that_nothing_tells_apart_are_each_layers_in_turn() -> None:
    """In a graph with no module's path and no weight that is known."""
    model = Layers(2)
    traced = make_fx(lambda given, x: torch.func.functional_call(model, given, x), tracing_mode="fake")
    with torch.no_grad():
        graph = traced(dict(model.named_parameters()), torch.randn(5, HIDDEN)).graph
    made = Pipeline(plan([(f"layers.{i}", mla_spec(i)) for i in range(2)], Target.named("cpu")))
    made(graph)
    assert made.report.of(FUSION).matched == ("layers.0:latents", "layers.1:latents")
