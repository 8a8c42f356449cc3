"""What is alike, as numbers: sites and specs are compared in everything that they say, or in all but their place.

Specs leave out of their equality what is not of the layer itself, such as who reads a norm. Here it counts, as decisions and
rewriting act on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from types import NoneType
from typing import Any

import attrs

PLACE = ("layer", "layer_index")
"""The fields that say where a site or a layer is."""


class Alike:
    """Numbers of what is asked about, from 0 on: the same one for what says the same."""

    def __init__(self, without: tuple[str, ...]) -> None:
        """Args: without: names of fields that do not count, wherever they stand."""
        self._without = without
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._met: dict[int, tuple[Any, Any]] = {}
        "By identity, as most are met again, and with the object, so that no other may come to have its identity."
        self._read: dict[type, attrgetter[tuple[Any, ...]]] = {}

    def number(self, of: Any) -> int:
        """The number of a site, a spec or another frozen class of attrs."""
        number: int = self._within(of)
        return number

    @property
    def said(self) -> Sequence[tuple[Any, ...]]:
        """What each number stands for: a class and the values of its fields, numbers in the place of what has fields of its own."""
        return tuple(self._numbers)

    def _within(self, value: Any) -> Any:
        met = self._met
        known = met.get(id(value))
        if known is not None:
            return known[1]
        cls = type(value)
        several = value if cls is tuple else (self._read.get(cls) or self._reading(cls))(value)
        # Most are plain, or were met: a call for each would be most of a plan's time.
        made: Any = tuple(
            [
                each if type(each) in _PLAIN else known[1] if (known := met.get(id(each))) else self._within(each)
                for each in several
            ]
        )
        if cls is not tuple:
            made = self._numbers.setdefault(made, len(self._numbers))
        met[id(value)] = value, made
        return made

    def _reading(self, cls: Any) -> attrgetter[tuple[Any, ...]]:
        names = (field.name for field in attrs.fields(cls) if field.name not in self._without)
        return self._read.setdefault(cls, attrgetter("__class__", *names))


_PLAIN = frozenset({str, int, float, bool, NoneType, type})
