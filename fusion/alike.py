"""What is alike, as numbers: sites and specs are compared in everything that they say, or in all but their place.

Specs leave out of their equality what is not of the layer itself, such as who reads a norm. Here it counts, as decisions and
rewriting act on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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

    def number(self, of: Any) -> int:
        """The number of a site, a spec or another frozen class of attrs."""
        met = self._met.get(id(of))
        if met is None:
            cls: Any = type(of)
            key = self._of_each(_reading(cls, self._without)(of))
            met = self._met[id(of)] = of, self._numbers.setdefault(key, len(self._numbers))
        number: int = met[1]
        return number

    @property
    def said(self) -> Sequence[tuple[Any, ...]]:
        """What each number stands for: a class and the values of its fields, numbers in the place of what has fields of its own."""
        return tuple(self._numbers)

    def _of_each(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        # Most are plain, or were met: a call for each would be most of a plan's time.
        met = self._met
        return tuple(
            [
                each
                if type(each) in _PLAIN
                else known[1]
                if (known := met.get(id(each))) is not None
                else self._within(each)
                for each in values
            ]
        )

    def _within(self, value: Any) -> Any:
        if type(value) is not tuple:
            return self.number(value)
        made = self._of_each(value)
        self._met[id(value)] = value, made
        return made


_PLAIN = frozenset({str, int, float, bool, NoneType, type})


@cache
def _reading(cls: Any, without: tuple[str, ...]) -> attrgetter[tuple[Any, ...]]:
    return attrgetter("__class__", *[field.name for field in attrs.fields(cls) if field.name not in without])
