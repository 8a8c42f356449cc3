"""Parts of a layer that torch's children do not tell: behind a wrapper, a property, a parametrization. A spec is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrize

from layerfuse import registry
from layerfuse.testing import small_model


class Forwarding(nn.Module):
    """As torch's checkpoint wrapper and its compiled module: what it does not have it asks what is inside for."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inside, name)


def as_attribute(holder: nn.Module, name: str) -> None:
    """Not among its children."""
    held = holder._modules.pop(name)
    object.__setattr__(holder, name, held)


def as_property(holder: nn.Module, name: str) -> None:
    held = holder._modules.pop(name)
    cls = type(holder)
    holder.__class__ = type(
        cls.__name__, (cls,), {name: property(lambda _: held), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )  # fmt: skip


def wrapped(holder: nn.Module, name: str) -> None:
    setattr(holder, name, Forwarding(getattr(holder, name)))


def parametrized(holder: nn.Module, name: str) -> None:
    parametrize.register_parametrization(getattr(holder, name), "weight", nn.Identity())


def decoder_of(model: str, mixture: bool) -> nn.Module:
    made = small_model(registry.model(model), layers=4)
    return next(each for each in made.model.layers if (registry.spec_for(each).experts is not None) is mixture)


@pytest.mark.parametrize("change", [as_attribute, wrapped, parametrized])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "mixtral-8x7b", "olmoe-1b-7b"])
def test_a_router_tells_the_sizes_of_its_mixture(model: str, change: Callable[[nn.Module, str], None]) -> None:
    layer = decoder_of(model, mixture=True)
    before = registry.spec_for(layer).experts
    assert before.num_experts and before.experts_per_token and before.intermediate_size
    change(layer.mlp, "router" if model.startswith("gpt") else "gate")
    after = registry.spec_for(layer).experts
    for size in (
        "num_experts",
        "num_local_experts",
        "experts_per_token",
        "intermediate_size",
        "local_intermediate_size",
    ):
        assert getattr(after, size) == getattr(before, size), size


@pytest.mark.parametrize("change", [as_attribute, as_property, wrapped])
@pytest.mark.parametrize("model", ["qwen3-32b", "deepseek-v3"])
def test_the_weights_of_an_mlp_tell_its_ranks(model: str, change: Callable[[nn.Module, str], None]) -> None:
    layer = decoder_of(model, mixture=False)
    assert registry.spec_for(layer).mlp_ranks == 1
    change(layer, "mlp")
    assert registry.spec_for(layer).mlp_ranks == 1
