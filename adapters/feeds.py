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
from .linears import Plain, linear_of, plain_of, plain_spec
from .sources import Path

_NOTHING: dict[str, Any] = {}


class Around:
    """Linears on one side of a norm. Equal ones are one object, so that what is made of them is found by it at once."""

    __slots__ = ("quant", "specs", "unquantised")

    def __init__(self, specs: tuple[LinearSpec, ...]) -> None:
        self.specs = specs
        self.quant, self.unquantised = _agreed(specs)


def _agreed(linears: tuple[LinearSpec, ...]) -> tuple[ActivationQuant | None, str | None]:
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


NONE = Around(())
"""Where there are none."""


@lru_cache(maxsize=4096)
def _around(specs: tuple[LinearSpec, ...]) -> Around:
    return Around(specs)


@lru_cache(maxsize=4096)
def _around_plain(paths: tuple[str, ...], plain: tuple[Plain, ...]) -> Around:
    return _around(tuple([plain_spec(path, paths, one) for path, one in zip(paths, plain, strict=True)]))


class Linears:
    """Those linears at some paths that a layer has. They are looked for parent by parent, as a layer is read often."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        below: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            below.setdefault(path.steps[:-1], []).append(path.steps[-1])
        self._below = [(steps, [(name, ".".join((*steps, name))) for name in names]) for steps, names in below.items()]

    def of(self, layer: Any) -> Around:
        """What they are, as the layer says it now."""
        if not self._below:
            return NONE
        found = self.modules(layer)
        if not found:
            return NONE
        paths = tuple([path for path, _ in found])
        plain: list[Plain] = []
        for _, linear in found:
            one = plain_of(linear)
            if one is None:
                return _around(tuple([linear_of(path, paths, linear) for path, linear in found]))
            plain.append(one)
        return _around_plain(paths, tuple(plain))

    def modules(self, layer: Any) -> list[tuple[str, Any]]:
        """Those that are there, each with its path; none where the layer's own code fails on the way, as they decide no spec."""
        found: list[tuple[str, Any]] = []
        try:
            held = children_of(layer)
            for steps, names in self._below:
                children = held
                for step in steps:
                    parent = children.get(step)
                    if parent is None:
                        break
                    children = children_of(parent)
                else:
                    for name, path in names:
                        linear = children.get(name)
                        if linear is not None:
                            found.append((path, linear))
        except FOREIGN:
            return []
        return found


def children_of(parent: Any) -> Mapping[str, Any]:
    """By name, without asking a module for what it does not have: torch takes far longer to say that."""
    try:
        held = parent.__dict__
    except AttributeError:
        return {str(i): child for i, child in enumerate(parent)} if isinstance(parent, Sequence) else _NOTHING
    children: Mapping[str, Any] = held.get("_modules", held)
    return children
