"""A scenario of the contract: its number, its title, and the method that checks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import SkipTest

from attrs import frozen

F = TypeVar("F", bound=Callable[..., None])


class BrokenContractError(AssertionError):
    """The contract is broken; the text says where and how. pytest shows it as a failed test."""


class Verbs:
    """What every scenario is written in."""

    def validate(self, holds: object, otherwise: str) -> None:
        """Break the contract with a sentence unless something holds."""
        if not holds:
            raise BrokenContractError(otherwise)

    def skip(self, reason: str) -> None:
        """Leave a scenario out, with the reason; pytest and run_contract both show it."""
        raise SkipTest(reason)


@frozen
class _ToSet:
    what: str
    name: str

    def __get__(self, _: Any, contract: type[Any]) -> str:
        raise AttributeError(f"{contract.__name__}.{self.name} must be {self.what}: write it in the body of the class")


def to_set(name: str, what: str) -> Any:
    """A class variable that a subclass must set: else asking for it says what it must be, as `build` does."""
    return _ToSet(what, name)


@frozen
class Scenario:
    """One numbered scenario of docs/contract.md."""

    id: str
    "As the page numbers it: C1, C2, ..., F1, ..., S1, ..., K1, ..."
    title: str
    "The page's heading."
    method: str
    "The test method of the contract."


def scenario(number: int, title: str, of: str = "C") -> Callable[[F], F]:
    """Mark a method as the check of a scenario; `of`: the letter of its contract."""

    def mark(method: F) -> F:
        found = Scenario(f"{of}{number}", title, method.__name__)
        method.__scenario__ = found  # type: ignore[attr-defined]
        return method

    return mark


def scenarios_of(contract: type[Any]) -> tuple[Scenario, ...]:
    """The scenarios that a class checks, in the order of their numbers."""
    found = [vars(getattr(contract, name)).get("__scenario__") for name in dir(contract) if name.startswith("test_")]
    return tuple(sorted((s for s in found if s is not None), key=lambda s: int(s.id[1:])))
