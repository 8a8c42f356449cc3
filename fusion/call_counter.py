"""What ran: counts the calls of compiled graphs, and says after each call of the model which sites ran fused.

The count is one dictionary entry per call of a graph, outside any CUDA graph. What it means is worked out afterwards.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attrs import frozen
from torch import nn

from ..adapters.errors import counted
from .held import HeldWeights
from .planning import Plan
from .report import CallRecord, GraphRecord, Missed, Report, Use, with_fallback
from .rewrite.attribution import ModuleIndex, join
from .shadow import Placed, Shadow
from .uncompiled import why_uncompiled

Key = tuple[int, tuple[tuple[str, ...], ...]]
"""A graph's number, and for a graph that sibling layers share the names of the weights it was called with."""


@frozen(kw_only=True, eq=False)
class _Graph:
    """A compiled graph."""

    record: GraphRecord
    plan: Plan
    "By which it was rewritten."
    positions: tuple[int, ...]
    "Those of its inputs that are another weight for another layer; none where it is one layer's own."


class Call:
    """One call of the model, while it runs. Of its own, as another thread may call the model meanwhile."""

    record: CallRecord | None = None
    "When it has finished."


class _Current(threading.local):
    """The calls of graphs in this thread's call of the model."""

    def __init__(self) -> None:
        self.calls: dict[Key, int] = {}


class CallCounter:
    """Counts for one model and one plan."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        report: Report,
        around: ModuleIndex,
        look_again: Callable[[], bool] = lambda: False,
        shadow: Shadow | None = None,
    ) -> None:
        """Args: look_again: plans anew where the model says something else than the plan, and answers whether it does.

        shadow: compares what fused ops give.
        """
        self._model = model
        self._plan = plan
        self._report = report
        self._current = _Current()
        self._graphs: dict[int, _Graph] = {}
        self._held = HeldWeights(model)
        self._resolved: dict[Key, list[tuple[Use, tuple[str, ...]]]] = {}
        self._complete: dict[frozenset[tuple[Key, int]], CallRecord] = {}
        self._around = around
        self._look_again = look_again
        self._shadow = shadow
        self._wanted = dict(self._count_wanted())
        self._expected = {(decision.site, decision.fusion) for decision in plan.expected()}
        self.off: str | None = None
        "Why nothing at all is compiled, as a sentence, or None."

    def replan(self, plan: Plan, around: ModuleIndex) -> None:
        """Hold calls to another plan from now on."""
        self._plan, self._around = plan, around
        self._resolved.clear()
        self._complete.clear()
        self._wanted = dict(self._count_wanted())
        self._expected = {(decision.site, decision.fusion) for decision in plan.expected()}
        self._watch()

    def counted(self, record: GraphRecord, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph that counts its calls."""
        number = record.graph
        positions = sorted({position for use in record.uses if not use.whole for position, _ in use.weights})
        self._graphs[number] = _Graph(record=record, plan=self._plan, positions=tuple(positions))
        self._watch()
        self._complete.clear()
        current, names_of, forget = self._current, self._held.names_of, self._held.forget
        if self._shadow is not None:
            compiled = self._shadow.around(compiled, lambda args: self._placed(number, args))

        def of_the_model(*args: Any) -> Any:
            calls = current.calls
            calls[key] = calls.get(key, 0) + 1
            return compiled(*args)

        def of_siblings(*args: Any) -> Any:
            # Now: FSDP and offloading give a model other parameters after the call.
            named = (number, tuple([names_of(args[position]) for position in positions]))
            calls = current.calls
            if named in calls:  # a parameter through which every layer is loaded may be in one more by now
                forget()
                named = (number, tuple([names_of(args[position]) for position in positions]))
            calls[named] = calls.get(named, 0) + 1
            return compiled(*args)

        key = (number, ())
        return of_siblings if positions else of_the_model

    def _placed(self, number: int, args: tuple[Any, ...]) -> Iterator[Placed]:
        """The ops in a graph that is called with these arguments."""
        names = [self._held.names_of(args[position]) for position in self._graphs[number].positions]
        for use, owners in self._uses((number, tuple(names))):
            if use.fused is not None and use.form is not None:
                weights = tuple(args[position] for position, _ in use.weights)
                yield Placed(site=" or ".join(owners), fusion=use.fused, op=use.form, weights=weights)

    def _watch(self) -> None:
        """Know the weights that the graphs so far may be called with."""
        graphs = self._graphs.values()
        shared = [(use, graph.plan) for graph in graphs for use in graph.record.uses if not use.whole]
        self._held.watch(
            join(site.layer, end)
            for use, plan in shared
            for ends in _ends(use, plan).values()
            for end in ends
            for site in self._plan.like(plan.site[use.site])
        )

    @contextmanager
    def call(self) -> Iterator[Call]:
        """Around one call of the model: adds it to the report when it has finished."""
        outer, self._current.calls = self._current.calls, {}
        self._held.start()
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
        stale = False
        for key, times in calls.items():
            graph = self._graphs[key[0]]
            for use, owners in self._uses(key):
                for site, count in _handed_out(times, owners, seen).items():
                    if use.fused is not None:
                        ran[site, use.fused] += count
                    for fusion, reason in use.missed.items():
                        # The graph may have been compiled for a sibling of which more is expected.
                        if (site, fusion) in self._expected:
                            missed.setdefault(fusion, {})[site] = with_fallback(reason, use.fused)
                    expected, _ = self._wanted.get(site, ((), 0))
                    wrong = self._why_not_its_own(site, use, graph.plan, expected) if expected else None
                    if wrong is not None:
                        stale |= graph.plan is not self._plan
                        missed.setdefault(expected[0], {})[site] = with_fallback(wrong, use.fused)
        if stale and self._look_again():
            # The model is again what it was when the graph was compiled, so Dynamo compiled nothing.
            return self._record(calls)
        for site, (expected, wanted) in self._wanted.items():
            if seen[site] < wanted and not any(site in missed.get(fusion, {}) for fusion in expected):
                at, reason = self._plan.site[site], self.off or self._report.why_absent(site)
                # A layer that the model does not have by this name was looked for by its norms alone.
                if not self.off and at.layer in self._around.paths:
                    hidden = self._report.why_hidden() if at.multiplies is None else reason
                    reason = why_uncompiled(self._model, at.layer, hidden)
                partly = f"{seen[site]} of {counted(wanted, 'use')} ran in a compiled graph; " if seen[site] else ""
                missed.setdefault(expected[0], {})[site] = partly + reason
        strange = dict.fromkeys(pair for number, _ in calls for pair in self._graphs[number].record.strange)
        record = CallRecord(ran=ran, missed=missed, strange=tuple(strange))
        if not missed:
            if len(self._complete) > 64:
                self._complete.clear()
            self._complete[pattern] = record
        return record

    def _why_not_its_own(self, site: str, use: Use, made: Plan, expected: tuple[str, ...]) -> str | None:
        """Why a graph is not what the plan says of this site now, or None where it is. `made`: by which it was rewritten."""
        changed = "that was compiled before the model changed"
        of, where = (changed, changed) if use.site == site else (f"of {use.site}", f"that was compiled for {use.site}")
        if self._plan.site[site].norms != made.site[use.site].norms:
            # Modules of one class run one graph, whatever their specs say.
            return f"it ran the graph {of}, and the norms there are not what its spec says"
        if use.tokens is not None and not self._plan.expects(site, use.tokens):
            return None
        if use.fused not in expected and not any(fusion in use.missed for fusion in expected):
            return f"it ran in the graph {where}, where {' or '.join(expected)} is not expected"
        return None

    def _uses(self, key: Key) -> list[tuple[Use, tuple[str, ...]]]:
        """The uses of a graph, each with the sites that it can be of when the graph is called with these weights."""
        found = self._resolved.get(key)
        if found is None:
            number, names = key
            graph = self._graphs[number]
            given = dict(zip(graph.positions, names, strict=True))
            found = self._resolved[key] = [(use, self._owners(use, graph.plan, given)) for use in graph.record.uses]
        return found

    def _owners(self, use: Use, made: Plan, given: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
        """The sites that a use can be of, where its weights have these names. `made`: by which its graph was rewritten."""
        if use.whole or not use.weights:
            return (use.site,)
        ends = _ends(use, made)
        owners = tuple(
            site.name
            for site in self._plan.like(made.site[use.site])
            if all(
                any(join(site.layer, end) in given[position] for end in ends.get(position, ()))
                for position, _ in use.weights
            )
        )
        return owners or (use.site,)

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


def _handed_out(times: int, owners: tuple[str, ...], seen: Counter[str]) -> Counter[str]:
    """So many uses for each of the sites that they can be of: in turn, as layers with tied weights run."""
    shares: Counter[str] = Counter()
    for _ in range(times):
        site = min(owners, key=seen.__getitem__)
        seen[site] += 1
        shares[site] += 1
    return shares


def _ends(use: Use, plan: Plan) -> dict[int, tuple[str, ...]]:
    """Position of a weight among a graph's inputs -> its names below the layer."""
    layer = join(plan.site[use.site].layer, "")
    return {
        position: tuple(name.removeprefix(layer) for name in names if name.startswith(layer))
        for position, names in use.weights
    }
