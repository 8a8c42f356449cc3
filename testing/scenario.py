"""A scenario of the contract: its number, its title, and the method that checks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from attrs import frozen

F = TypeVar("F", bound=Callable[..., None])


class BrokenContractError(AssertionError):
    """The contract is broken; the text says where and how. pytest shows it as a failed test."""


@frozen
class Scenario:
    """One numbered scenario of docs/contract.md."""

    id: str
    "As the page numbers it: C1, C2, ..."
    title: str
    "The page's heading."
    method: str
    "The test method of AdapterContract."


def scenario(number: int, title: str) -> Callable[[F], F]:
    """Mark a method as the check of a scenario."""

    def mark(method: F) -> F:
        found = Scenario(f"C{number}", title, method.__name__)
        method.__scenario__ = found  # type: ignore[attr-defined]
        return method

    return mark


def scenarios_of(contract: type[Any]) -> tuple[Scenario, ...]:
    """The scenarios that a class checks, in the order of their numbers."""
    found = [vars(getattr(contract, name)).get("__scenario__") for name in dir(contract) if name.startswith("test_")]
    return tuple(sorted((s for s in found if s is not None), key=lambda s: int(s.id[1:])))
