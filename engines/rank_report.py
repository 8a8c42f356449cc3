"""What a rank says of a compiled module after the run of it that is looked at (`CompiledModule.run`), and what the ranks of a group say together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from attrs import field, frozen

from ..adapters.errors import LayerfuseError, counted
from ..fusion.catalog import FUSIONS
from ..fusion.planning import Plan
from ..fusion.report import FusionMissedError, Missed, in_groups, unnumbered
from ..fusion.sites import sites_in_words
from .compiled_module import CompiledModule
from .host import here
from .process import of_each_class

_FIGURES = re.compile(r" \([^()]*\d[^()]*\)$")
"""What was measured, at the end of a reason: of another machine, as likely as not. The report's file has it."""


class CallsDifferError(LayerfuseError, RuntimeError):
    """The run that was looked at called other fused ops than the report says. `problems` holds a sentence for each difference."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__(problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


@frozen(kw_only=True)
class RankReport:
    """One rank's."""

    rank: int
    fused: dict[str, tuple[str, ...]]
    "Fusion -> sites, over all pieces and ranges."
    missed: Missed
    beyond: dict[str, tuple[str, ...]] = field(factory=dict)
    "Fusion -> expected sites whose graphs are for other numbers of tokens."
    called: dict[str, int] | None
    "Fusion -> calls of its ops in the run that was looked at; None where they were not counted."
    problems: tuple[str, ...] = ()
    "Where the calls differ from the report, and what went wrong in layerfuse itself."
    notes: tuple[str, ...] = ()
    sources: dict[str, int] = field(factory=dict)
    "Where the graphs came from -> how many did."

    def same_as(self, other: RankReport) -> bool:
        """Whether two ranks say the same. Their graphs may number the nodes in a reason differently."""
        return bool(self._said() == other._said())

    def _said(self) -> tuple[object, ...]:
        missed = {name: {site: unnumbered(why) for site, why in sites.items()} for name, sites in self.missed.items()}
        return self.fused, missed, self.called


def rank_report_of(compiled: CompiledModule, rank: int) -> RankReport:
    """What one rank says, from its records and from the calls that were counted."""
    report = compiled.report()
    called = _called(compiled)
    missed: Missed = {}
    fused: dict[str, tuple[str, ...]] = {}
    beyond: dict[str, tuple[str, ...]] = {}
    for name in filter(compiled.plan.concerns, FUSIONS):
        of = report.of(name)
        lost = dict(of.missed)
        blind = _why_blind(compiled)
        if blind is not None:
            lost = dict.fromkeys(lost, blind)
        unsure = _unsure(compiled, lost) if blind is None else list(lost)
        proven = bool(unsure) and called is not None and called.get(name, 0) == len(of.expected)
        if proven:
            # As many calls as sites: what no record tells, the run does.
            lost = {site: why for site, why in lost.items() if site not in unsure}
        sites = [site for site in of.expected if site not in lost and site not in of.beyond]
        fused[name] = (*sites, *of.fallback)
        beyond[name] = tuple(of.beyond)
        if lost:
            missed[name] = lost
    return RankReport(
        rank=rank,
        fused={name: sites for name, sites in fused.items() if sites},
        missed=missed,
        beyond={name: sites for name, sites in beyond.items() if sites},
        called=called,
        problems=(*compiled.trouble, *differences(compiled)),
        notes=tuple(_notes(compiled)),
        sources=dict(Counter(piece.source for piece in compiled.parts)),
    )


def _why_blind(compiled: CompiledModule) -> str | None:
    """Why nothing is known of any graph of a module, as a sentence; None where something is."""
    if compiled.from_cache and compiled.kept_since is None:
        return f"the model came from {here().name}'s cache, which holds no report of it"
    return None if compiled.pieces else compiled.spoiled


def _unsure(compiled: CompiledModule, lost: dict[str, str]) -> list[str]:
    """Missed sites that stand in a piece of which no record is known."""
    inside = {site for piece in compiled.pieces if piece.source == "unknown" for site in piece.sites}
    return [site for site in lost if site in inside]


def fused_ops() -> dict[str, str]:
    """Every fused op -> the fusion that it belongs to."""
    return {form.op.name: fusion.name for fusion in FUSIONS.values() for form in fusion.forms}


def _called(compiled: CompiledModule) -> dict[str, int] | None:
    if compiled.counted is None:
        return None
    fusions = fused_ops()
    found: Counter[str] = Counter()
    for op, calls in compiled.counted.items():
        if op in fusions:  # others are canonical forms, which a graph may hold as well
            found[fusions[op]] += calls
    return dict(found)


def differences(compiled: CompiledModule) -> Iterable[str]:
    """Sentences on calls that the records do not account for; none where a record is missing that would tell."""
    told = compiled.pieces or compiled.at_modules is not None
    if compiled.counted is None or not told or any(piece.source == "unknown" for piece in compiled.pieces):
        return
    planned, known = compiled.ranges(), fused_ops()
    ran = Counter({op: calls for op, calls in compiled.counted.items() if op in known})
    # The run had one number of tokens, so that one range of those that were compiled was called.
    if any(calls == ran for calls in planned.values()):
        return
    names = sorted({name for calls in (*planned.values(), ran) for name in calls})
    for name in names:
        said = sorted({calls[name] for calls in planned.values()})
        if ran[name] not in said:
            *others, last = said
            held = " or ".join([*map(str, others), counted(last, "time")])
            yield f"{name} was called {counted(ran[name], 'time')} in the {compiled.run}; the graphs hold it {held}"


def _notes(compiled: CompiledModule) -> Iterable[str]:
    sources = Counter(piece.source for piece in compiled.pieces)
    if (said := compiled.plan.measured_with_another_release()) is not None:
        yield said
    if compiled.at_modules is not None:
        yield f"the fused ops stand in the model's modules: {compiled.at_modules}"
    if compiled.kept_since is not None:
        yield f"the model came from {here().name}'s cache; this is the report that was kept with it on {compiled.kept_since}"
    elif compiled.from_cache:
        yield f"the model came from {here().name}'s cache without a report (delete that folder of the cache to have one)"
    if compiled.spoiled is not None and not compiled.pieces:
        yield f"{compiled.spoiled}: what is fused is known by the calls of the {compiled.run} alone"
    if sources["equal"]:
        yield f"graphs that are equal to others, and were compiled with them: {sources['equal']}"
    if sources["cache"]:
        yield f"{counted(sources['cache'], 'graph')} came from Inductor's cache with the records of those that filled it"
    if sources["unknown"]:
        yield f"{counted(sources['unknown'], 'graph')} came from a cache without a record"
    others = Counter(piece.tokens for piece in compiled.pieces for _ in piece.record.others)
    if others:
        yield f"{max(others.values())} linears that no spec lists are layerfuse's for few tokens too"
    if compiled.untouched:
        yield f"in steps of {compiled.untouched[0]} to {compiled.untouched[-1]} tokens {here().name}'s own graph runs"
    for each in compiled.placements.values():
        yield from each.notes(compiled.run)
    yield from (f"not read, as no text runs it: {of_a_class}" for of_a_class in of_each_class(compiled.unread))
    if compiled.outside:
        shown = ", ".join(compiled.outside[:3]) + (
            f" and {len(compiled.outside) - 3} more" if len(compiled.outside) > 3 else ""
        )
        yield f"outside of what {here().name} compiles: {shown}"


# ---- ranks together


@frozen(kw_only=True)
class Outcome:
    """What all ranks of a group say of one module."""

    plan: Plan = field(repr=False)
    ranks: tuple[RankReport, ...]
    unknown: dict[str, str] = field(factory=dict)
    run: str = "profiling run"
    "As `CompiledModule.run`."

    @property
    def missed(self) -> Missed:
        """Fusion -> site -> reason, with the rank where the ranks differ."""
        found: Missed = {}
        for report in self.ranks:
            for name, sites in report.missed.items():
                for site, why in sites.items():
                    everywhere = all(site in other.missed.get(name, {}) for other in self.ranks)
                    prefix = "" if everywhere else f"rank {report.rank}: "
                    found.setdefault(name, {}).setdefault(site, prefix + why)
        return found

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences, with the rank where there are several."""
        several = len(self.ranks) > 1
        return tuple(
            f"rank {report.rank}: {problem}" if several else problem
            for report in self.ranks
            for problem in report.problems
        )

    def fused(self, name: str) -> tuple[str, ...]:
        """Sites that a fusion was put at on every rank."""
        first, *others = (report.fused.get(name, ()) for report in self.ranks)
        return tuple(site for site in first if all(site in sites for sites in others))

    def check(self) -> None:
        """Raise where something expected did not happen.

        Raises:
            FusionMissedError: an expected fusion is missing somewhere, or something of the model is unknown.
            CallsDifferError: the run that was looked at called other fused ops than the report says.
        """
        if self.missed or self.unknown:
            raise FusionMissedError(self.missed, self.unknown)
        if self.problems:
            raise CallsDifferError(self.problems)

    def sites(self) -> list[dict[str, Any]]:
        """Every decision and what became of it, as plain data."""
        missed, rows = self.missed, []
        fused = {name: set(self.fused(name)) for name in FUSIONS}
        for decision in self.plan.decisions:
            outcome, reason = decision.kind.replace("_", " "), decision.reason
            if decision.site in fused[decision.fusion] and decision.kind in ("expected", "fallback"):
                outcome = "fused"
            elif decision.kind == "expected":
                lost = missed.get(decision.fusion, {}).get(decision.site)
                outcome, reason = ("beyond its tokens", reason) if lost is None else ("missed", lost)
            rows.append(
                {
                    "site": decision.site,
                    "fusion": decision.fusion,
                    "tokens": str(decision.tokens),
                    "decision": decision.kind,
                    "outcome": outcome,
                    "reason": reason,
                }
            )
        return rows


def lines_of(outcome: Outcome) -> list[str]:
    """The outcome for people: a line for each fusion that concerns the model, and what of it did not happen."""
    missed, engine = outcome.missed, outcome.plan.engine
    lines: list[str] = []
    if engine is not None and "*" in engine.refuses:
        names = ", ".join(filter(outcome.plan.concerns, FUSIONS))
        count = len({decision.site for decision in outcome.plan.refused()})
        return [f"{names}: cannot stand at {sites_in_words(count)}: {engine.refuses['*']}"] if names else lines
    for name in filter(outcome.plan.concerns, FUSIONS):
        called = _calls(name, outcome)
        fused = len(outcome.fused(name))
        expected = len({decision.site for decision in outcome.plan.expected(name)})
        if not expected and not fused:
            off = outcome.plan.off
            reasons = Counter(
                ("off" if each.reason in off else "cannot stand", _FIGURES.sub("", each.reason))
                for each in outcome.plan.refused(name)
            )
            lines += [
                f"{name}: {word} at {sites_in_words(count)}: {reason}" for (word, reason), count in reasons.items()
            ]
            continue
        lines.append(f"{name}: {expected} expected, {fused} fused, {len(missed.get(name, {}))} missed{called}")
        lines += [f"  missed: {line}" for line in in_groups(missed.get(name, {}))]
    return lines


def _calls(name: str, outcome: Outcome) -> str:
    ranks, run = outcome.ranks, outcome.run
    counts = [report.called.get(name, 0) for report in ranks if report.called is not None]
    if len(counts) < len(ranks):
        return ""
    if len(set(counts)) == 1:
        return f"; called {counted(counts[0], 'time')} in the {run}" + (" of every rank" if len(ranks) > 1 else "")
    return f"; called {' / '.join(map(str, counts))} times in the {run}s of the ranks"
