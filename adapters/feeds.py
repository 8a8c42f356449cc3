"""The linears around a norm: those that read its result and the quantisation that they agree on, and those that give what it norms.

A norm's result may have further readers: a mixture's router and routed experts, which are read with it (`experts`), and the small
projections of gates. Those are not listed as `feeds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from .activation_quant import ActivationQuant
from .errors import FOREIGN
from .linear_specs import LinearSpec
from .linears import linear_of
from .sources import Path

_NOTHING: dict[str, Any] = {}


class Linears:
    """Those linears at some paths that a layer has. They are looked for parent by parent, as a layer is read often."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        below: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            below.setdefault(path.steps[:-1], []).append(path.steps[-1])
        self._below = [(steps, [(name, ".".join((*steps, name))) for name in names]) for steps, names in below.items()]

    def of(self, layer: Any) -> tuple[LinearSpec, ...]:
        """What they are, as the layer says it now."""
        if not self._below:
            return ()
        found = self.modules(layer)
        together = tuple([path for path, _ in found])
        return tuple([linear_of(path, together, linear) for path, linear in found])

    def modules(self, layer: Any) -> list[tuple[str, Any]]:
        """Those that are there, each with its path; none where the layer's own code fails on the way, as they decide no spec."""
        found: list[tuple[str, Any]] = []
        try:
            for steps, names in self._below:
                children = children_of(layer)
                for step in steps:
                    parent = children.get(step)
                    if parent is None:
                        break
                    children = children_of(parent)
                else:
                    found += [(path, children[name]) for name, path in names if children.get(name) is not None]
        except FOREIGN:
            return []
        return found


@lru_cache(maxsize=4096)
def agreed(linears: tuple[LinearSpec, ...]) -> tuple[ActivationQuant | None, str | None]:
    """How linears that read the same quantise it; None where they differ, do not, or there are none.

    And where some do all the same, what each of them does, as a sentence.
    """
    said: dict[ActivationQuant | str | None, list[str]] = {}
    for linear in linears:
        said.setdefault(linear.activation, []).append(linear.path)
    if set(said) <= {None}:
        return None, None
    only = next(iter(said))
    if len(said) == 1 and isinstance(only, ActivationQuant):
        return only, None
    return None, "; ".join(f"{' and '.join(names)}: {_in_words(answer)}" for answer, names in said.items())


def _in_words(answer: ActivationQuant | str | None) -> str:
    if answer is None:
        return "takes its activations as they are"
    return f"quantises them with {answer}" if isinstance(answer, ActivationQuant) else answer


def children_of(parent: Any) -> Mapping[str, Any]:
    """By name, without asking a module for what it does not have: torch takes far longer to say that."""
    try:
        held = vars(parent)
    except TypeError:
        return {str(i): child for i, child in enumerate(parent)} if isinstance(parent, Sequence) else _NOTHING
    children: Mapping[str, Any] = held.get("_modules", held)
    return children
