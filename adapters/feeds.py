"""The linears around a norm: those that read its result and the quantisation that they agree on, and those that give what it norms.

A norm's result may have further readers that take it as it is: a router, routed experts that quantise what they are
sent inside their own kernel, the small projections of gates. Those are not listed as `feeds`.
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
        """What they are, as the layer says it now; none where its own code fails on the way, as they decide no spec."""
        if not self._below:
            return ()
        try:
            found = self._found(layer)
        except FOREIGN:
            return ()
        together = tuple([path for path, _ in found])
        return tuple([linear_of(path, together, linear) for path, linear in found])

    def _found(self, layer: Any) -> list[tuple[str, Any]]:
        found = []
        for steps, names in self._below:
            children = _children(layer)
            for step in steps:
                parent = children.get(step)
                if parent is None:
                    break
                children = _children(parent)
            else:
                found += [(path, children[name]) for name, path in names if children.get(name) is not None]
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


def _children(parent: Any) -> Mapping[str, Any]:
    """By name, without asking a module for what it does not have: torch takes far longer to say that."""
    try:
        held = vars(parent)
    except TypeError:
        return {str(i): child for i, child in enumerate(parent)} if isinstance(parent, Sequence) else _NOTHING
    children: Mapping[str, Any] = held.get("_modules", held)
    return children
