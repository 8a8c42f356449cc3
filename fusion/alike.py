"""What is alike but for its place in the model: sites and specs as numbers.

Specs leave out of their equality what is not of the layer itself, such as who reads a norm. Here it counts, as a decision may
act on it.
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any

import attrs

PLACE = ("layer", "layer_index")
"""The fields that say where a site or a layer is."""


class Alike:
    """Numbers of what is asked about: the same one where all but the place is the same."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._met: dict[int, tuple[Any, int]] = {}
        "By identity, as most are met again, and with the object, so that no other may come to have its identity."

    def number(self, of: Any) -> int:
        """The number of a site, a spec or another frozen class of attrs."""
        met = self._met.get(id(of))
        if met is None:
            cls: Any = type(of)
            said = _reading(cls)(of)
            key = (cls, *[value if type(value) in _PLAIN else self._within(value) for value in said])
            met = self._met[id(of)] = of, self._numbers.setdefault(key, len(self._numbers))
        return met[1]

    def _within(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        return tuple(map(self._within, value)) if type(value) is tuple else self.number(value)


_PLAIN = frozenset({str, int, float, bool, NoneType})


@cache
def _reading(cls: Any) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*[attribute.name for attribute in attrs.fields(cls) if attribute.name not in PLACE])
