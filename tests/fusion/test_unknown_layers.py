"""A layer of which nothing can be expected is said to be one: it never just drops out of the plan."""

from __future__ import annotations

import pytest
import torch

from layerfuse import fusion, registry
from layerfuse.fusion import FusionMissedError
from layerfuse.fusion.report import Report
from layerfuse.testing import small_model


class FooAttention(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.projection = inner.o_proj

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None


@pytest.fixture
def model() -> torch.nn.Module:
    made = small_model(registry.model("deepseek-v3"), layers=2)
    layers = made.get_submodule("model.layers")
    layers[1].self_attn = FooAttention(layers[1].self_attn)
    return made


def test_unknown_attention_is_in_the_report(model: torch.nn.Module) -> None:
    # Its decoder layer cannot say by how many ranks it was sharded either, so only the other layer's is read.
    known = registry.Registry.specs_in(registry.default, model.get_submodule("model.layers.0"))
    assert len(known) == 3

    compiled = fusion.compile(model.get_submodule("model.layers"), strict=True, registry=_Tolerant())

    assert compiled.report.unknown == {"1.self_attn": f"{__name__}:FooAttention"}
    assert "unknown: 1.self_attn: no adapter knows" in str(compiled.report)
    with pytest.raises(
        FusionMissedError, match=r"No adapter knows the class of these.*:\n  - 1.self_attn: .*FooAttention"
    ):
        compiled.report.check()


class _Tolerant(registry.Registry):
    """The default registry, asked only for attention: what is under test is what becomes of the unknown."""

    def specs_in(self, model: torch.nn.Module, parallel: object) -> list[object]:
        from layerfuse import MLASpec

        return registry.specs_in(model, of=MLASpec)

    def unknown_in(self, model: torch.nn.Module) -> list[tuple[str, str]]:
        return registry.unknown_in(model)


def test_specs_that_are_given_leave_a_layer_out_on_purpose(model: torch.nn.Module) -> None:
    compiled = fusion.compile(model, specs=[], strict=True)

    assert compiled.report.unknown == {}
    Report.check(compiled.report)
