"""Graph breaks: Dynamo then compiles a layer's forward by itself, and may run one graph for several layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_support import FUSION, HIDDEN, TwoProjections, mla_spec, trace, with_modules
from torch import nn


class Breaking(TwoProjections):
    """Breaks after its norms."""

    def forward(self, x: torch.Tensor) -> Any:
        q, kv, k_pe = super().forward(x)
        torch._dynamo.graph_break()
        return q + 1, kv, k_pe


class Layers(nn.Module):
    def __init__(self, *epsilons: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Breaking(epsilon=epsilon) for epsilon in epsilons)

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part for layer in self.layers for part in layer(x))


def specs(*epsilons: float) -> list[tuple[str, Any]]:
    return [(f"layers.{i}", mla_spec(i, epsilon=epsilon, kv_epsilon=1e-6)) for i, epsilon in enumerate(epsilons)]


@pytest.mark.parametrize("named", [True, False])
def test_one_graph_serves_layers_of_one_shape(named: bool) -> None:
    model, x = Layers(1e-6, 1e-6), torch.randn(5, HIDDEN)
    given = [(path, with_modules(spec) if named else spec) for path, spec in specs(1e-6, 1e-6)]
    traced = trace(model, x, specs=given)
    # Dynamo compiles the layer's forward once and runs it for both: one fused op, two layers served.
    assert traced.fused == 1
    (use,) = [use for record in traced.report.records for use in record.uses]
    assert (use.site, use.fused, use.how, use.whole) == ("layers.0:latents", FUSION, "parameter", False)
    verdict = traced.report.of(FUSION)
    assert verdict.matched == ("layers.0:latents", "layers.1:latents")
    assert (verdict.compiled, verdict.executed, verdict.last_call) == (1, 2, 2)
    with torch.no_grad():
        torch.testing.assert_close(traced.output, model(x), rtol=1e-5, atol=1e-5)


def test_a_layer_of_another_spec_does_not_share() -> None:
    # The second layer's spec is wrong: whatever graph it ran, it was not one that its spec allows.
    traced = trace(Layers(1e-6, 1e-6), torch.randn(5, HIDDEN), specs=specs(1e-6, 1e-5))
    verdict = traced.report.of(FUSION)
    assert verdict.matched == ("layers.0:latents",)
    assert list(verdict.missed) == ["layers.1:latents"]
    assert "it ran the graph of layers.0:latents, and the norms there" in verdict.missed["layers.1:latents"]
    # The op did run for both layers, and is counted as the profiler would count it.
    assert (verdict.executed, verdict.last_call) == (2, 2)


def test_different_epsilons_have_graphs_of_their_own() -> None:
    with torch._dynamo.config.patch(specialize_float=True):
        traced = trace(Layers(1e-6, 1e-5), torch.randn(5, HIDDEN), specs=specs(1e-6, 1e-5))
    assert traced.fused == 2
    assert traced.report.of(FUSION).complete, str(traced.report)


def test_an_epsilon_that_became_an_input() -> None:
    # Without what fusion.compile does about it, Dynamo makes an input of a float that changes between layers.
    traced = trace(Layers(1e-6, 1e-5), torch.randn(5, HIDDEN), specs=specs(1e-6, 1e-5))
    assert "specialize_float" in traced.report.of(FUSION).missed["layers.1:latents"]


def test_an_epsilon_that_is_a_tensor_is_no_float_that_became_an_input() -> None:
    traced = trace(Layers(torch.tensor(1e-6), torch.tensor(1e-5)), torch.randn(5, HIDDEN), specs=specs(1e-6, 1e-5))
    why = traced.report.of(FUSION).missed["layers.0:latents"]
    assert "has an epsilon that is a tensor (" in why
    assert "specialize_float" not in why
