"""What each number of an entry may be, checked under the name that the file gives it.

A spec names its own fields: a file's `latent_norm_eps` would be reported as the `epsilon` of a norm that it does not mention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from ..adapters.spec_fields import GATED, kinds_in, problem_of
from ..adapters.specs import FAMILIES, ExpertsSpec, GatedMLPSpec, NormSpec, ResidualSpec

if TYPE_CHECKING:
    from .catalog import ModelEntry

_UNSET = ("none", "off")
"""Words for what a model does not have. Where they are allowed, the file's reader has decided."""


def wrong_values(entry: ModelEntry) -> Iterator[str]:
    """A sentence for each number that is out of its bounds, whether a layer uses it or not."""
    yield from _wrong("", entry, ResidualSpec)
    for name, kind in entry.layers.items():
        yield from _wrong(f"layers.{name}.", kind, FAMILIES[kind.family])
    for name, mlp in entry.mlps.items():
        yield from _wrong(f"mlps.{name}.", mlp, GatedMLPSpec)
    if entry.experts is not None:
        yield from _wrong("experts.", entry.experts, ExpertsSpec)
    for name, facts in entry.engines.items():
        yield from _wrong(f"engines.{name}.", facts, NormSpec)


def _wrong(where: str, said: Any, spec: type[Any]) -> Iterator[str]:
    for name, kind in _numbers_of(type(said), spec):
        value = getattr(said, name)
        # Neither a table of its own, nor one of the words.
        if isinstance(value, int | float | str) and value not in _UNSET:
            problem = problem_of(kind, value)
            if problem is not None:
                yield f"{where}{name}: {problem}"


_NUMBERS_OF: dict[tuple[type[Any], type[Any]], tuple[tuple[str, str], ...]] = {}


def _numbers_of(cls: type[Any], spec: type[Any]) -> tuple[tuple[str, str], ...]:
    """The fields of a table that have bounds, with the kind of value that each takes. Kept, as files hold thousands."""
    found = _NUMBERS_OF.get((cls, spec))
    if found is None:
        kinds = dict((*kinds_in(NormSpec), *kinds_in(spec)))
        several = {
            a.name: "positive" if a.name.endswith(("_eps", "_scale")) else kinds.get(a.name, "text")
            for a in attrs.fields(cls)
        }
        found = _NUMBERS_OF[cls, spec] = tuple(
            (name, kind) for name, kind in several.items() if kind not in ("text", *GATED)
        )
    return found
