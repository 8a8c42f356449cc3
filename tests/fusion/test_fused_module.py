"""A FusedModel as the nn.Module that torch's own machinery works on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fusion_support import FUSION, HIDDEN, TwoProjections, mla_spec
from torch import nn

from layerfuse import fusion


class Layers(nn.Module):
    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoProjections() for _ in range(count))

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(part for layer in self.layers for part in layer(x))


pytestmark = pytest.mark.usefixtures("_op_by_op")


def compiled(model: nn.Module, count: int = 1, **more: Any) -> fusion.FusedModel:
    return fusion.compile(model, specs=[(f"layers.{i}", mla_spec(i)) for i in range(count)], **more)


def test_its_own_compile_leaves_the_model_alone() -> None:
    model = Layers()
    fused = compiled(model)
    fused.compile()
    assert model._compiled_call_impl is None
    x = torch.randn(5, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    assert fused.report.of(FUSION).last_call == 1


def test_in_a_graph_of_somebody_else_it_says_why_it_is_in_none() -> None:
    fused, x = compiled(Layers()), torch.randn(5, HIDDEN)
    with torch.no_grad():
        with pytest.raises(torch._dynamo.exc.Unsupported, match="this model is compiled with its fusions already"):
            torch.compile(nn.Sequential(fused), fullgraph=True)(x)
        torch.testing.assert_close(torch.compile(nn.Sequential(fused))(x), fused.original(x))
    assert fused.report.of(FUSION).last_call == 1


def test_full_backward_hooks() -> None:
    class Summed(Layers):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.cat([part.flatten() for part in super().forward(x)])

    model = Summed()
    fused = compiled(model)
    seen: list[Any] = []
    fused.register_full_backward_hook(lambda module, *_: seen.append(module))
    fused(torch.randn(5, HIDDEN, requires_grad=True)).sum().backward()
    assert seen == [fused]
    assert model._is_full_backward_hook is None


def test_the_plan_cannot_be_set() -> None:
    model = Layers()
    with pytest.raises(AttributeError, match="made from specs"):
        compiled(model).plan = 3
    assert not hasattr(model, "plan")


def test_of_a_fused_model_the_original_is_taken() -> None:
    model = Layers()
    again = compiled(compiled(model), strict=True)
    assert again.original is model
    with torch.no_grad():
        again(torch.randn(5, HIDDEN))


def test_strict_is_about_the_call_of_its_own_thread() -> None:
    # A call that runs uncompiled finishes in another thread while this one's is about to be checked.
    fused = compiled(Layers(), strict=True)
    x = torch.randn(5, HIDDEN)
    add_call = fused.report.add_call
    inside = threading.local()

    def other() -> None:
        inside.other = True
        with torch.no_grad(), fused._counter.call():
            fused.original(x)

    def and_another(record: Any) -> None:
        add_call(record)
        if not getattr(inside, "other", False):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    fused.report.add_call = and_another  # type: ignore[method-assign]
    with torch.no_grad():
        fused(x)
    assert fused.report.last is not None
    assert fused.report.last.missed
