"""Every entry of models.toml against the contract, with the real transformers model of its published dimensions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from helpers import twin_of

from layerfuse import registry
from layerfuse.testing import SCENARIOS
from layerfuse.testing.models import why_not
from layerfuse.testing.run import SLOW, contract_of

pytest.importorskip("transformers")

OF_NUMBERS = ("C1", "C2", "C9")
"""Scenarios that hold the entry's own numbers; the others hold its classes, and a twin's are the same."""


@functools.cache
def first_of_its_graph(name: str) -> str:
    """The first entry that can be built here whose graph has the same kinds of layers, norms and products: C14 compiles that one."""

    def graph(entry: Any) -> Any:
        kinds = {
            (
                kind.family,
                kind.stream_norms,
                kind.qk_norms if kind.family == "gqa" else None,
                kind.q_lora_rank == "none" if kind.family == "mla" else None,
            )
            for kind in entry.layers.values()
        }
        products = {kind.activation for kind in entry.mlps.values()}
        return kinds, products, entry.norm_weight_offset, entry.attentions_per_layer, entry.experts is None

    own = graph(registry.model(name))
    return next(other for other, entry in registry.models().items() if graph(entry) == own and why_not(entry) is None)


def left_to_others(name: str, scenario: str) -> bool:
    """Whether another entry holds the same code in a default run."""
    if scenario in SLOW:
        return why_not(registry.model(name)) is None and first_of_its_graph(name) != name
    return scenario not in OF_NUMBERS and twin_of(name) is not None


@functools.cache
def contract(name: str) -> Any:
    """The contract of one entry, whose model is built once."""
    return contract_of(registry.model(name))()


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        pytest.param(
            name,
            scenario,
            id=f"{name}-{scenario.id}",
            marks=pytest.mark.thorough if left_to_others(name, scenario.id) else [],
        )
        for name in registry.models()
        for scenario in SCENARIOS
    ],
)
def test_the_contract(name: str, scenario: Any) -> None:
    getattr(contract(name), scenario.method)()


def test_only_kimi_k3_cannot_be_built() -> None:
    """A sentence for each entry that is held to the contract without a model, so that none drops out unseen."""
    assert {e.name: why_not(e) for e in registry.models().values() if why_not(e)} == {
        "kimi-k3": "transformers (read up to 5.24) has no kimi_k3; vLLM's layers of it are read instead"
    }
