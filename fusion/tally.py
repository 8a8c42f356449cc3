"""What ran: counts the calls of compiled graphs, and says after each call of the model which sites ran fused.

The count is one dictionary entry per call of a graph, outside any CUDA graph. What it means is worked out afterwards.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from torch import nn

from .plan import Plan
from .report import UNJOINED, CallRecord, GraphRecord, Missed, Report, Use, with_fallback
from .rewrite.ownership import Surroundings
from .rewrite.parameters import names_of
from .sites import QUERY
from .uncompiled import why_uncompiled

Key = tuple[int, ...]
"""A graph's number, and for a graph that sibling layers share the identities of the weights it was called with."""


class Call:
    """One call of the model, while it runs. Of its own, as another thread may call the model meanwhile."""

    record: CallRecord | None = None
    "When it has finished."


class _Current(threading.local):
    """The calls of graphs in this thread's call of the model."""

    def __init__(self) -> None:
        self.calls: dict[Key, int] = {}


class Tally:
    """Counts for one model and one plan."""

    def __init__(self, model: nn.Module, plan: Plan, report: Report, around: Surroundings) -> None:
        self._model = model
        self._plan = plan
        self._report = report
        self._current = _Current()
        self._records: dict[int, GraphRecord] = {}
        self._resolved: dict[Key, list[tuple[Use, tuple[str, ...]]]] = {}
        self._complete: dict[frozenset[tuple[Key, int]], CallRecord] = {}
        self._around = around
        self._wanted = dict(self._count_wanted())
        self._expected = {(decision.site, decision.fusion) for decision in plan.expected()}
        self.off: str | None = None
        "Why nothing at all is compiled, as a sentence, or None."

    def replan(self, plan: Plan, around: Surroundings) -> None:
        """Hold calls to another plan from now on."""
        self._plan, self._around = plan, around
        self._resolved.clear()
        self._complete.clear()
        self._wanted = dict(self._count_wanted())
        self._expected = {(decision.site, decision.fusion) for decision in plan.expected()}

    def counted(self, record: GraphRecord, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph that counts its calls."""
        number = record.graph
        self._records[number] = record
        self._complete.clear()
        positions = sorted({position for use in record.uses if not use.whole for position, _ in use.weights})
        current = self._current

        def of_the_model(*args: Any) -> Any:
            calls = current.calls
            calls[key] = calls.get(key, 0) + 1
            return compiled(*args)

        def of_siblings(*args: Any) -> Any:
            calls = current.calls
            with_weights = (number, *[id(args[position]) for position in positions])
            if with_weights not in self._resolved:
                # Now: FSDP gives a model other parameters after the call.
                self._uses(with_weights)
            calls[with_weights] = calls.get(with_weights, 0) + 1
            return compiled(*args)

        key = (number,)
        return of_siblings if positions else of_the_model

    @contextmanager
    def call(self) -> Iterator[Call]:
        """Around one call of the model: adds it to the report when it has finished."""
        outer, self._current.calls = self._current.calls, {}
        call = Call()
        try:
            yield call
            call.record = self._record(self._current.calls)
            self._report.add_call(call.record)
        finally:
            self._current.calls = outer

    def _record(self, calls: dict[Key, int]) -> CallRecord:
        pattern = frozenset(calls.items())
        known = self._complete.get(pattern)
        if known is not None:
            return known
        ran: Counter[tuple[str, str]] = Counter()
        missed: Missed = {}
        seen: Counter[str] = Counter()
        for key, times in calls.items():
            for use, owners in self._uses(key):
                site = min(owners, key=seen.__getitem__)
                seen[site] += times
                if use.fused is not None:
                    ran[site, use.fused] += times
                for fusion, reason in use.missed.items():
                    # The graph may have been compiled for a sibling of which more is expected.
                    if (site, fusion) in self._expected:
                        missed.setdefault(fusion, {})[site] = with_fallback(reason, use.fused)
                expected, _ = self._wanted.get(site, ((), 0))
                wrong = self._why_not_its_own(site, use, expected) if expected else None
                if wrong is not None:
                    missed.setdefault(expected[0], {})[site] = with_fallback(wrong, use.fused)
        for site, (expected, wanted) in self._wanted.items():
            if seen[site] < wanted and not any(site in missed.get(fusion, {}) for fusion in expected):
                layer = self._plan.site[site].layer
                # A layer that the model does not have by this name was looked for by its norms alone.
                placed = layer in self._around.paths
                around = self._plan.site[site].role == QUERY and any(
                    count and self._plan.site[other].layer == layer for other, count in seen.items()
                )
                reason = self.off or (
                    UNJOINED
                    if around
                    else why_uncompiled(self._model, layer)
                    if placed
                    else self._report.why_absent(site)
                )
                partly = f"{seen[site]} of {wanted} uses ran in a compiled graph; " if seen[site] else ""
                missed.setdefault(expected[0], {})[site] = partly + reason
        record = CallRecord(ran=ran, missed=missed)
        if not missed:
            if len(self._complete) > 64:
                self._complete.clear()
            self._complete[pattern] = record
        return record

    def _why_not_its_own(self, site: str, use: Use, expected: tuple[str, ...]) -> str | None:
        """Why the graph of a sibling is not what the plan says of this site, or None where it is."""
        if self._plan.site[site].norms != self._plan.site[use.site].norms:
            # Modules of one class run one graph, whatever their specs say.
            return f"it ran the graph of {use.site}, and the norms there are not what its spec says"
        if use.tokens is not None and not self._plan.expects(site, use.tokens):
            return None
        if use.fused not in expected and not any(fusion in use.missed for fusion in expected):
            return (
                f"it ran in the graph that was compiled for {use.site}, where {' or '.join(expected)} is not expected"
            )
        return None

    def _uses(self, key: Key) -> list[tuple[Use, tuple[str, ...]]]:
        """The uses of a graph, each with the sites that it can be of when the graph is called with these weights."""
        found = self._resolved.get(key)
        if found is None:
            number, *identities = key
            record = self._records[number]
            positions = sorted({position for use in record.uses if not use.whole for position, _ in use.weights})
            given = dict(zip(positions, identities, strict=True))
            names = names_of(self._model) if given else {}
            found = [(use, self._owners(use, given, names)) for use in record.uses]
            self._resolved[key] = found
        return found

    def _owners(self, use: Use, given: dict[int, int], names: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
        if use.whole or not use.weights:
            return (use.site,)
        site = self._plan.site[use.site]
        candidates: list[str] | None = None
        for position, compiled_with in use.weights:
            ends = [name[len(site.layer) :] for name in compiled_with if name.startswith(site.layer)]
            layers = [
                self._around.aliases.get(layer, layer)
                for name in names.get(given[position], ())
                for end in ends
                if name.endswith(end) and (layer := name.removesuffix(end)) is not None
            ]
            sites = [
                other.name
                for layer in dict.fromkeys(layers)
                if (other := self._plan.site.get(attrs.evolve(site, layer=layer).name)) is not None
            ]
            candidates = sites if candidates is None else [name for name in candidates if name in sites]
        return tuple(candidates) if candidates else (use.site,)

    def _count_wanted(self) -> Iterator[tuple[str, tuple[tuple[str, ...], int]]]:
        """Site -> (the fusions that are expected there, one for each range of tokens; uses in one call).

        A use for each place where the model holds it.
        """
        places = Counter(
            self._around.aliases.get(path, path) for path, _ in self._model.named_modules(remove_duplicate=False)
        )
        fusions: dict[str, dict[str, None]] = {}
        for decision in self._plan.expected():
            fusions.setdefault(decision.site, {})[decision.fusion] = None
        for site, names in fusions.items():
            yield site, (tuple(names), places.get(self._plan.site[site].layer, 1))
