"""The linears that read a norm's result, and the quantisation that they agree on.

A norm's result may have further readers that take it as it is: a router, routed experts that quantise what they are
sent inside their own kernel, the small projections of gates. Those are not listed as `feeds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .activation_quant import ActivationQuant
from .errors import FOREIGN
from .linear_quant import activation_quant_of
from .sources import Path

_NOTHING: dict[str, Any] = {}


class Feeds:
    """Those linears of one norm that a layer has. They are looked for parent by parent, as a layer is read often."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        below: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            below.setdefault(path.steps[:-1], []).append(path.steps[-1])
        self._below = list(below.items())

    def quant(self, layer: Any) -> ActivationQuant | None:
        """How the linears quantise their activations; None where they differ, do not, or there are none."""
        try:
            found = {activation_quant_of(linear) for linear in self._linears(layer)}
        except FOREIGN:  # a layer whose own code fails where its children are looked for: this decides no spec
            return None
        return found.pop() if len(found) == 1 else None

    def _linears(self, layer: Any) -> Iterator[Any]:
        for steps, names in self._below:
            parent = layer
            for step in steps:
                parent = _children(parent).get(step)
            children = _children(parent)
            for name in names:
                if children.get(name) is not None:
                    yield children[name]


def _children(parent: Any) -> Mapping[str, Any]:
    """By name, without asking a module for what it does not have: torch takes far longer to say that."""
    try:
        held = vars(parent)
    except TypeError:
        return {str(i): child for i, child in enumerate(parent)} if isinstance(parent, Sequence) else _NOTHING
    children: Mapping[str, Any] = held.get("_modules", held)
    return children
