"""The linears around a norm: those that read its result and the quantisation that they agree on, and those that give what it norms.

A norm's result may have further readers: a mixture's router and routed experts, which are read with it (`experts`), and the small
projections of gates. Those are not listed as `consumers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .activation_quant import ActivationQuant
from .errors import FOREIGN
from .linear_specs import LinearSpec
from .linears import other_linear, plain_linear
from .sources import Path

_NOTHING: dict[str, Any] = {}


class Below:
    """What modules below a layer hold. They are gone through once for all linears of it, parent by parent, as a layer is read often."""

    def __init__(self) -> None:
        self._index: dict[tuple[str, ...], int] = {(): 0}
        self._parents: list[tuple[int, str]] = []

    def index_of(self, steps: tuple[str, ...]) -> int:
        """Where the children of the module at this path are."""
        if steps not in self._index:
            self._parents.append((self.index_of(steps[:-1]), steps[-1]))
            self._index[steps] = len(self._parents)
        return self._index[steps]

    def of(self, layer: Any) -> list[Mapping[str, Any]]:
        """The children of each.

        Raises:
            Exception: whatever the layer's own code raises.
        """
        tables = [children_of(layer)]
        for above, step in self._parents:
            parent = tables[above].get(step)
            if parent is None:
                tables.append(_NOTHING)
                continue
            try:
                tables.append(parent.__dict__["_modules"])
            except (AttributeError, LookupError):
                tables.append(children_of(parent))
        return tables


class Linears:
    """Those linears at some paths that a layer has."""

    def __init__(self, paths: Iterable[Path], below: Below | None = None) -> None:
        together: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            together.setdefault(path.steps[:-1], []).append(path.steps[-1])
        self._alone = Below()
        at = [(steps, name) for steps, names in together.items() for name in names]
        self._places, self._own = (
            [(each.index_of(steps), name, ".".join((*steps, name))) for steps, name in at]
            for each in (below or self._alone, self._alone)
        )
        self._together = tuple([path for _, _, path in self._own])

    def modules(self, layer: Any, tables: list[Mapping[str, Any]] | None) -> list[tuple[str, Any]]:
        """Those that are there, each with its path; none where the layer's own code fails on the way, as they decide no spec.

        Args:
            layer: what they are below.
            tables: what all of `below` hold; None where one of them fails, so that these are looked for alone.
        """
        places = self._places
        found = []
        try:
            if tables is None:
                tables, places = self._alone.of(layer), self._own
            for at, name, path in places:
                child = tables[at].get(name)
                if child is not None:
                    found.append((path, child))
        except FOREIGN:
            return []
        return found

    def of(self, layer: Any, tables: list[Mapping[str, Any]] | None) -> tuple[LinearSpec, ...]:
        """What they are."""
        found = self.modules(layer, tables)
        if not found:
            return ()
        together = self._together if len(found) == len(self._together) else tuple([path for path, _ in found])
        specs = []
        for path, linear in found:
            specs.append(plain_linear(path, together, linear) or other_linear(path, together, linear))
        return tuple(specs)


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
