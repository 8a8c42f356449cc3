"""The shadow check: what fused ops give in a compiled model, held to their references on the same tensors, for the first calls at each site.

It listens where a backend is chosen (`backends.listening`), and only while a graph runs that has something left to be compared.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from threading import Lock, get_ident
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from ..adapters.errors import ArgumentError, LayerfuseError, counted, said, shown
from . import backends
from .closeness import Apart, compare
from .config import shadow_calls
from .declare import REFERENCE, GroupName
from .ops.library import case_maker, declared, handed_on
from .rewrite.attribution import is_around

ELSEWHERE = "outside of any site"
"""Where a model calls an op by name."""

REPLAYED = "no call of its op was seen: the graph was replayed, as a CUDA graph is"
"""Why what stands in a graph that ran was not compared."""


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


@frozen(kw_only=True, eq=False)
class Placed:
    """An op that was put at a site of a graph."""

    site: str
    fusion: str
    op: str
    weights: tuple[Tensor, ...]
    "Those of the site's norms, or of what multiplies there, by which its call is known among others."
    path: str | None = None
    "Of what holds the site, where its call is known by any parameter inside of that."
    among: int = 1
    "How many sites it is one of, where nothing tells their calls apart."

    @property
    def key(self) -> tuple[str, str]:
        """What is compared as one. Sites that nothing tells apart may become more."""
        return self.site if self.among == 1 or self.weights else "", self.op


@define(kw_only=True)
class Compared:
    """One op at one site."""

    site: str
    fusion: str
    op: str
    among: int = 1
    "How many sites it is one of, where nothing tells their calls apart."
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
    error: Exception | None = field(default=None, repr=False)
    "What comparing raised, unless that was for lack of memory."

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


def _warn(said: str) -> None:
    warnings.warn(f"layerfuse: {said}", RuntimeWarning, stacklevel=2)


class Shadow:
    """What was compared in one model."""

    def __init__(self, calls: int, tell: Callable[[str], None] = _warn) -> None:
        """Args: calls: how many at each site, at least 1. tell: told once of each site whose op gives something else, as a sentence."""
        self._most, self._tell = calls, tell
        self._found: dict[tuple[str, str], Compared] = {}
        self._joined: set[tuple[str, str]] = set()
        self._lock = Lock()  # micro-batches compare in threads of their own

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
            known = tuple(placed(args))
            if not any(self._wanted(self._record_of(each)) for each in known):
                return run(*args)
            with self.hearing(lambda: known):
                return run(*args)

        return shadowed

    @contextmanager
    def hearing(
        self,
        placed: Callable[[], Sequence[Placed]],
        silent: str = REPLAYED,
        where: Callable[[tuple[Any, ...]], str | None] | None = None,
        counts: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """Compare the ops that this thread calls while this lasts.

        Args:
            placed: what is to be called, as it is known when an op comes.
            silent: why one of them was not called.
            where: from the arguments of an op that is none of them by its weights to where it stands; None: nothing says it.
                Without it the ops come in the order of `placed`, and those of unknown weights are told by that.
            counts: whether what is called now is any of it.
        """
        thread, heard = get_ident(), Counter[tuple[str, str]]()

        def placed_of(name: str, given: tuple[Any, ...]) -> Placed:
            tensors = {each.data_ptr() for each in given if isinstance(each, Tensor)} - {0}  # 0: of no elements
            alike = [each for each in placed() if each.op == name]
            own = [
                each
                for each in alike
                if each.weights and tensors.issuperset(weight.data_ptr() for weight in each.weights)
            ]
            if not own and where is not None and (holder := where(given)) is not None:
                own = [each for each in alike if each.path is not None and is_around(each.path, holder)]
                if not own:
                    return Placed(site=holder, fusion=name, op=name, weights=())
            several = own or [each for each in alike if where is None or not each.weights]
            if where is not None and len({each.site for each in several}) > 1:
                return self._one_of(several)
            left = Counter(each.key for each in several) - heard
            found = next((each for each in several if each.key in left), None)
            if found is None and (own or where is not None):  # it is called more often than it is placed
                found = next(iter(several), None)
            return found or Placed(site=ELSEWHERE, fusion=name, op=name, weights=())

        def hear(name: str, given: tuple[Any, ...]) -> Callable[[Any], None] | None:
            if get_ident() != thread or not counts():
                return None
            found = placed_of(name, given)
            heard[found.key] += 1
            return self._begin_comparing(self._record_of(found), name, given)

        with backends.listening(hear):
            yield
        for each in placed():
            if each.key not in heard and each.key not in self._joined:
                record = self._record_of(each)
                if self._wanted(record):
                    record.not_compared = silent

    @property
    def complete(self) -> int:
        """Ops at sites of which nothing more will be compared."""
        return sum(not self._wanted(each) for each in self.found)

    def give_up(self, why: str) -> None:
        """Compare nothing more, for a reason: where something is missing, it is said there beside what was."""
        for each in filter(self._wanted, self.found):
            each.not_compared, each.never = "; ".join(filter(None, (each.not_compared, why))), True

    def check(self) -> None:
        """Raise where an op gave something else than its reference, or comparing it failed.

        Raises:
            ResultsDifferError: naming each op and its site.
            Exception: what comparing raised.
        """
        if self.beyond:
            raise ResultsDifferError(self.beyond)
        for each in self.found:
            if each.error is not None:
                raise each.error

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data, for JSON: the largest difference is a text where it is no finite number."""
        return [
            {
                "site": each.site,
                "fusion": each.fusion,
                "op": each.op,
                "backend": each.backend,
                "calls": each.calls,
                "largest": each.largest if isfinite(each.largest) else str(each.largest),
                "beyond": None if each.beyond is None else str(each.beyond),
                "not_compared": each.not_compared,
            }
            for each in self.found
        ]

    def __str__(self) -> str:
        return "\n".join(
            [f"shadow check of {counted(self._most, 'call')} at each site:", *(f"  {each}" for each in self.found)]
        )

    def _one_of(self, several: Sequence[Placed]) -> Placed:
        """What stands for sites whose calls only their order would tell apart: one that is left to an engine shifts all behind it."""
        sites, first = sorted({each.site for each in several}), several[0]
        for key in {each.key for each in several}:
            self._joined.add(key)
            if key in self._found and not self._found[key].calls:
                self._found.pop(key, None)
        site = " or ".join(sites) if first.weights else f"one of {len(sites)} sites"
        return Placed(site=site, fusion=first.fusion, op=first.op, weights=first.weights, among=len(sites))

    def _record_of(self, placed: Placed) -> Compared:
        found = self._found.setdefault(placed.key, Compared(site=placed.site, fusion=placed.fusion, op=placed.op))
        found.site, found.among = placed.site, placed.among
        return found

    def _wanted(self, found: Compared) -> bool:
        return found.calls < self._most * found.among and not found.never

    def _failed(self, found: Compared, doing: str, error: Exception) -> None:
        """Take note that comparing raised something. The model's call is none the worse."""
        found.not_compared, found.never = f"{doing} raised {said(error)}", True
        if not isinstance(error, torch.OutOfMemoryError):
            found.error = error
            self._tell(str(found))

    def _begin_comparing(self, found: Compared, name: str, given: tuple[Any, ...]) -> Callable[[Any], None] | None:
        if not self._wanted(found):
            return None
        op = declared(name)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            found.not_compared = "the call was captured in a CUDA graph"
            return None
        more = handed_on(op)
        if more is not None and more(*given) is not None:
            found.not_compared = "for so many tokens it hands on to another op, as its reference does"
            return None
        backend = backends.choose(name, given[0].device.type, case_maker(op)(*given)).backend
        found.backend = backend.name
        if any(isinstance(each, GroupName) for each in op.args):
            found.not_compared, found.never = "the ranks of a group call it together, and would its reference", True
        elif found.backend == REFERENCE:
            found.not_compared, found.never = "its reference is what runs", True
        if found.never:
            return None
        written = [place for place, each in enumerate(op.args) if each.is_mutated]
        try:
            before = tuple(each.clone() if place in written else each for place, each in enumerate(given))
        except Exception as error:
            self._failed(found, "cloning what it writes to", error)
            return None
        found.not_compared = None

        def compare_with(result: Any) -> None:
            try:
                with torch.no_grad():
                    got, wanted = (
                        (*_several(results), *(arguments[place] for place in written))
                        for results, arguments in ((result, given), (op.reference(*before), before))
                    )
                    apart = list(compare(op, given, got, wanted))
            except Exception as error:  # another package's reference, a kernel's results of another shape, no memory
                self._failed(found, "comparing", error)
                return
            wrong = next((each for each in apart if each.first is not None), None)
            with self._lock:
                found.calls += 1
                found.largest = max([found.largest, *(each.largest for each in apart)])
                is_news = wrong is not None and found.beyond is None
                if is_news:
                    found.beyond, found.at = wrong, found.calls
            if is_news:
                self._tell(str(found))

        return compare_with


def _several(results: Any) -> tuple[Tensor, ...]:
    if results is None:
        return ()
    return tuple(results) if isinstance(results, tuple | list) else (results,)
