"""The shadow check: what fused ops give in a compiled model, held to their references on the same tensors, for the first calls at each site.

It listens where a backend is chosen (`backends.listening`), and only while a graph runs that has something left to be compared.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from ..adapters.errors import ArgumentError, LayerfuseError, said, shown
from . import backends
from .closeness import Apart, compare
from .config import shadow_calls
from .declare import REFERENCE, GroupName
from .ops.library import case_maker, declared

ELSEWHERE = "outside of any site"
"""Where a model calls an op by name."""


class ResultsDifferError(LayerfuseError, RuntimeError):
    """Strict, and a fused op gave something else than its reference. `found` holds what was compared there."""

    def __init__(self, found: Sequence[Compared]) -> None:
        self.found = tuple(found)
        super().__init__(self.found)

    def __str__(self) -> str:
        return "a fused op gave something else than its reference:\n" + "\n".join(f"  - {each}" for each in self.found)


def calls_asked(shadow: int | None) -> int:
    """How many calls are to be compared at each site: as given, else what `LAYERFUSE_SHADOW` says, else none.

    Raises:
        ArgumentError: that is no number, or one below 0.
    """
    if shadow is None:
        return shadow_calls()
    if type(shadow) is not int or shadow < 0:
        raise ArgumentError(f"shadow: expected how many calls are compared at each site, got {shown(shadow)}")
    return shadow


@frozen(kw_only=True)
class Placed:
    """An op that was put at a site of a graph."""

    site: str
    fusion: str
    op: str
    weights: tuple[Tensor, ...]
    "Those of the site's norms, by which its call is known among others."


@define(kw_only=True)
class Compared:
    """One op at one site."""

    site: str
    fusion: str
    op: str
    calls: int = 0
    "That were compared."
    backend: str = ""
    "Whose results they were."
    largest: float = 0.0
    "The largest difference of all results in all of them; of quantised values, of what they stand for."
    beyond: Apart | None = None
    "The first result that was further off than it may be, or None."
    at: int = 0
    "In which of the compared calls that was."
    not_compared: str | None = None
    "Why a call was not compared, as a sentence, or None."
    never: bool = field(default=False, repr=False)
    "Whether that holds for every call."

    def __str__(self) -> str:
        where = f"{self.fusion} at {self.site}" + (f" ({self.backend})" if self.backend else "")
        parts = []
        if self.beyond is not None:
            parts.append(f"call {self.at}: {self.beyond}")
        if self.calls:
            plural = "s" if self.calls > 1 else ""
            parts.append(f"{self.calls} call{plural} compared, at most {self.largest:.2g} apart")
        if self.not_compared is not None:
            parts.append(f"not compared: {self.not_compared}")
        return f"{where}: {'; '.join(parts)}"


class _Running(threading.local):
    """In this thread: the ops of the graph that runs and are still to be called, or None where none is listened to."""

    left: list[Placed] | None = None


class Shadow:
    """What was compared in one model."""

    def __init__(self, calls: int) -> None:
        """Args: calls: how many at each site, at least 1."""
        self._most = calls
        self._running = _Running()
        self._found: dict[tuple[str, str], Compared] = {}

    @property
    def found(self) -> tuple[Compared, ...]:
        """Each op at each site, in the order in which they were first called."""
        return tuple(self._found.values())

    @property
    def beyond(self) -> tuple[Compared, ...]:
        """Those that gave something else than their reference."""
        return tuple(each for each in self.found if each.beyond is not None)

    def around(
        self, run: Callable[..., Any], placed: Callable[[tuple[Any, ...]], Iterable[Placed]]
    ) -> Callable[..., Any]:
        """A compiled graph whose ops are compared.

        Args:
            run: the graph.
            placed: from its arguments to the ops in it, in their order.
        """

        def shadowed(*args: Any) -> Any:
            ops = list(placed(args))
            if not any(self._wanted(self._of(each)) for each in ops):
                return run(*args)
            outer, self._running.left = self._running.left, ops
            try:
                with backends.listening(self._hear):
                    result = run(*args)
                silent = self._running.left
            finally:
                self._running.left = outer
            for found in map(self._of, silent):
                if self._wanted(found):
                    found.not_compared = "no call of its op was seen: the graph was replayed, as a CUDA graph is"
            return result

        return shadowed

    def check(self) -> None:
        """Raise where an op gave something else than its reference.

        Raises:
            ResultsDifferError: naming each op and its site.
        """
        if self.beyond:
            raise ResultsDifferError(self.beyond)

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data, for JSON."""
        return [
            {
                "site": each.site,
                "fusion": each.fusion,
                "op": each.op,
                "backend": each.backend,
                "calls": each.calls,
                "largest": each.largest,
                "beyond": None if each.beyond is None else str(each.beyond),
                "not_compared": each.not_compared,
            }
            for each in self.found
        ]

    def __str__(self) -> str:
        return "\n".join([f"shadow check of {self._most} calls at each site:", *(f"  {each}" for each in self.found)])

    def _of(self, placed: Placed) -> Compared:
        key = placed.site, placed.op
        if key not in self._found:
            self._found[key] = Compared(site=placed.site, fusion=placed.fusion, op=placed.op)
        return self._found[key]

    def _wanted(self, found: Compared) -> bool:
        return found.calls < self._most and not found.never

    def _hear(self, name: str, given: tuple[Any, ...]) -> Callable[[Any], None] | None:
        left = self._running.left
        if left is None:  # another thread's
            return None
        found = self._of(_taken(left, name, given))
        if not self._wanted(found):
            return None
        op = declared(name)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            found.not_compared = "the call was captured in a CUDA graph"
            return None
        backend = backends.choose(name, given[0].device.type, case_maker(op)(*given)).backend
        found.backend = backend.name
        if any(isinstance(each, GroupName) for each in op.args):
            found.not_compared, found.never = "the ranks of a group call it together, and would its reference", True
        elif found.backend == REFERENCE:
            found.not_compared, found.never = "its reference is what runs", True
        if found.never:
            return None
        found.not_compared = None
        written = [place for place, each in enumerate(op.args) if each.is_mutated]
        before = tuple(each.clone() if place in written else each for place, each in enumerate(given))

        def compare_with(result: Any) -> None:
            try:
                with torch.no_grad():
                    got, wanted = (
                        (*_several(results), *(arguments[place] for place in written))
                        for results, arguments in ((result, given), (op.reference(*before), before))
                    )
                    apart = list(compare(op, given, got, wanted))
            except (
                Exception
            ) as error:  # another package's reference, or no memory for it: the model's call is none the worse
                found.not_compared, found.never = f"comparing raised {said(error)}", True
                return
            found.calls += 1
            found.largest = max([found.largest, *(each.largest for each in apart)])
            wrong = next((each for each in apart if each.first is not None), None)
            if wrong is not None and found.beyond is None:
                found.beyond, found.at = wrong, found.calls
                warnings.warn(f"layerfuse: {found}", RuntimeWarning, stacklevel=2)

        return compare_with


def _taken(left: list[Placed], name: str, given: tuple[Any, ...]) -> Placed:
    """The first op of this name that is left, by the weights that it is called with, and takes it off."""
    tensors = {each.data_ptr() for each in given if isinstance(each, Tensor)}
    alike = [each for each in left if each.op == name]
    own = [each for each in alike if tensors.issuperset(weight.data_ptr() for weight in each.weights)]
    placed = next(iter(own or alike), None)
    if placed is None:
        return Placed(site=ELSEWHERE, fusion=name, op=name, weights=())
    left.remove(placed)
    return placed


def _several(results: Any) -> tuple[Tensor, ...]:
    if results is None:
        return ()
    return tuple(results) if isinstance(results, tuple | list) else (results,)
