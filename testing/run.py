"""The contract without pytest: one result per scenario, for a model that transformers can build."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal
from unittest import SkipTest

from attrs import frozen

from ..adapters.errors import said
from .contract import SCENARIOS, AdapterContract
from .models import full_model, small_model, why_not
from .scenario import Scenario

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry
    from ..registry.lookup import Registry

SLOW = ("C14",)
"""Scenarios that compile."""


@frozen(kw_only=True)
class Result:
    """What came of one scenario."""

    scenario: str
    "Its number: C1, C2, ..."
    title: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str = ""
    "Why it failed or was skipped, in a sentence or more."
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.scenario} {self.title}: {self.outcome}" + (f": {self.reason}" if self.reason else "")


def run_contract(model_name: str, *, registry: Registry | None = None, full: bool = True) -> list[Result]:
    """Hold a declared model to the contract, with the real model that transformers builds from its entry.

    Args:
        model_name: the entry's name, or its Hugging Face id.
        registry: where it is declared; the default one if not given.
        full: False leaves out the scenarios that compile.

    Returns:
        One result per scenario, in their order. Where transformers cannot build the model, those that need one are
        skipped with the reason.

    Raises:
        UnknownModelError: no entry has this name.
    """
    return list(iter_contract(model_name, registry=registry, full=full))


def iter_contract(model_name: str, *, registry: Registry | None = None, full: bool = True) -> Iterator[Result]:
    """The results of `run_contract` one by one, as they come."""
    if registry is None:
        from .. import registry as package

        registry = package.default
    entry = registry.model(model_name)
    yield from results_of(contract_of(entry, registry)(), full=full)


def results_of(contract: AdapterContract, *, full: bool = True) -> Iterator[Result]:
    """One result per scenario, for any contract."""
    for scenario in SCENARIOS:
        if not full and scenario.id in SLOW:
            yield _result(scenario, "skipped", "left out: it compiles the model")
        else:
            yield _run(contract, scenario)


def contract_of(entry: ModelEntry, registry: Registry | None = None) -> type[AdapterContract]:
    """The contract of an entry with the real model that transformers builds from it.

    Where transformers cannot build it, the scenarios that need a model are skipped with the reason.
    """
    reason = why_not(entry)

    def build(_: AdapterContract) -> Any:
        if reason is not None:
            raise SkipTest(reason)
        return full_model(entry)

    def build_small(_: AdapterContract) -> Any:
        if reason is not None:
            raise SkipTest(reason)
        return small_model(entry, layers=one_of_each(entry), hidden_size=64, heads=2)

    body = {"model": entry.name, "registry": registry, "build": build, "build_small": build_small}
    return type(f"Test_{entry.name}", (AdapterContract,), body)


def one_of_each(entry: ModelEntry) -> list[int]:
    """The first decoder layer of each kind; two where that would be a single attention."""
    kinds = entry.kind_at()
    first = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    alone = len(first) == 1 and entry.attentions_per_layer == 1
    return [0, 1] if alone and len(kinds) > 1 else first


def _run(contract: AdapterContract, scenario: Scenario) -> Result:
    started = time.perf_counter()

    def done(outcome: Literal["passed", "failed", "skipped"], reason: str = "") -> Result:
        return _result(scenario, outcome, reason, time.perf_counter() - started)

    try:
        getattr(contract, scenario.method)()
    except SkipTest as skipped:
        return done("skipped", str(skipped))
    except AssertionError as broken:
        return done("failed", str(broken))
    except Exception as error:
        return done("failed", said(error, 2000))
    return done("passed")


def _result(
    scenario: Scenario, outcome: Literal["passed", "failed", "skipped"], reason: str = "", seconds: float = 0.0
) -> Result:
    return Result(scenario=scenario.id, title=scenario.title, outcome=outcome, reason=reason, seconds=seconds)
