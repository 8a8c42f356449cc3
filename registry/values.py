"""What each number of an entry may be, checked under the name that the file gives it.

A spec names its own fields: a file's `latent_norm_eps` would be reported as the `epsilon` of a norm that it does not mention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from ..adapters.specs import FAMILIES, GatedMLPSpec, NormSpec, ResidualSpec, kind_of, problem_of

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
    for name, facts in entry.engines.items():
        yield from _wrong(f"engines.{name}.", facts, NormSpec)


def _wrong(where: str, said: Any, spec: type[Any]) -> Iterator[str]:
    kinds = {a.name: kind_of(a) for cls in (NormSpec, spec) for a in attrs.fields(cls)}
    for name, value in attrs.asdict(said, recurse=False).items():
        kind = "positive" if name.endswith(("_eps", "_scale")) else kinds.get(name, "")
        if kind in ("", "text") or value is None or value in _UNSET or isinstance(value, tuple | list | dict):
            continue
        if not isinstance(value, int | float | str):
            continue  # a table of its own
        problem = problem_of(kind, value)
        if problem is not None:
            yield f"{where}{name}: {problem}"
