"""Checks of the arguments of public functions: each refuses with an error of this library that names the argument."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import ArgumentError, ArgumentValueError, did_you_mean, shown
from .spec_fields import LARGEST


def expect(name: str, value: object, kinds: type[Any] | tuple[type[Any], ...], what: str) -> None:
    """Refuse a value of another type; `what` says what to give.

    Raises:
        ArgumentError: it is of none of these types.
    """
    # Not isinstance: that asks the value for its class, which is the value's own code.
    if not issubclass(type(value), kinds):
        raise ArgumentError(f"{name}: expected {what}, got {shown(value)}")


def check_counts(least: int = 1, **numbers: object) -> None:
    """Refuse numbers that are no counts: bool, floats, and scalars of numpy and torch are none.

    Raises:
        ArgumentValueError: one that is no whole number from `least` to the largest int32.
    """
    for name, value in numbers.items():
        if type(value) is not int or value < least:
            raise ArgumentValueError(f"{name} is a whole number from {least} on, got {shown(value)}")
        if value > LARGEST:
            raise ArgumentValueError(f"{name} is a whole number of at most {LARGEST}, got {shown(value)}")


def check_flags(**flags: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ArgumentError: with the flag's name.
    """
    for name, value in flags.items():
        expect(name, value, bool, "True or False")


def check_word(name: str, value: object, known: Iterable[str]) -> None:
    """Refuse what is none of these words.

    Raises:
        ArgumentValueError: with the closest of them.
    """
    words = list(known)
    if type(value) is not str or value not in words:
        raise ArgumentValueError(
            f"{name}: expected one of {', '.join(words)}, got {shown(value)}{did_you_mean(value, words)}"
        )


def expect_callable(name: str, value: object) -> None:
    """Refuse what cannot be called.

    Raises:
        ArgumentError: with the argument's name.
    """
    if not callable(value):
        raise ArgumentError(f"{name}: expected a function, got {shown(value)}")


def check_whole(**numbers: object) -> None:
    """Refuse what is no whole number, whichever: bool, floats, and scalars of numpy and torch are none.

    Raises:
        ArgumentError: with the number's name.
    """
    for name, value in numbers.items():
        if type(value) is not int:
            raise ArgumentError(f"{name}: expected a whole number, got {shown(value)}")
