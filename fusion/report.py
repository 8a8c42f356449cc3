"""The result of a plan: what was expected, what was fused in compiled graphs, what ran fused, and why the rest did not.

Rewriting adds a record for each compiled graph. `fusion.compile` also counts the calls of those graphs, so that the
report tells what was compiled from what was executed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from ..adapters.errors import LayerfuseError, counted, first_of
from .catalog import FUSIONS
from .planning import Plan
from .sites import sites_in_words

if TYPE_CHECKING:
    from .shadow import Shadow

Missed = dict[str, dict[str, str]]
"""Fusion -> site -> reason."""


@frozen(kw_only=True)
class Use:
    """One use of a site in one graph."""

    site: str
    fused: str | None
    "The fusion that was put there, or None."
    form: str | None = None
    "The op that it was put there with: the fusion's, or that of a form which keeps or pads the norm."
    tokens: int | None = None
    "How many tokens the graph is for; None: any number, or nothing there tells."
    left: str | None = None
    "Why a step of another form, such as a padding, stayed behind the op. No miss: the fusion is there without it."
    missed: Mapping[str, str] = field(factory=dict)
    "Expected fusion -> why it was not. Also what is expected only of siblings that run the same graph, where it is not there."
    how: str = "structure"
    "How the norms were assigned to the site: parameter, module path, or structure alone."
    weights: tuple[tuple[int, tuple[str, ...]], ...] = ()
    "The norms' weights: position among the graph's inputs, and the names that the model has for the parameter."
    whole: bool = True
    "Whether the graph always runs with these weights. If not, sibling layers share it."


@frozen(kw_only=True)
class GraphRecord:
    """What rewriting did to one graph."""

    graph: int
    "0-based, in order of compilation."
    uses: tuple[Use, ...]
    unattributed: tuple[str, ...] = ()
    "Sentences on norms that resemble a site's and could be assigned to none."
    strange: tuple[tuple[str, str], ...] = ()
    "Norms of the residual stream that belong to no layer that was read: the path of what holds one, and its name there."
    others: tuple[str, ...] = ()
    "Ops that were put in at linears of which the plan has no site."
    bodies: tuple[str, ...] = ()
    "Higher-order ops of the graph whose bodies hold norms: they are not rewritten."
    failed: str | None = None
    "The error that rewriting ended in, so that nothing was fused; None: it did not."

    def fused(self, fusion: str | None = None) -> int:
        """Uses that this fusion (or any) was put at."""
        return sum(use.fused is not None and fusion in (None, use.fused) for use in self.uses)


@frozen(kw_only=True)
class CallRecord:
    """One call of a compiled model."""

    ran: Counter[tuple[str, str]]
    "(site, fusion) -> uses that ran fused."
    missed: Missed
    "What was expected and did not run fused in this call."
    strange: tuple[tuple[str, str], ...] = ()
    "As in `GraphRecord`, of the graphs that ran."

    def fused(self, fusion: str | None = None) -> int:
        """Uses that ran with this fusion, or any."""
        return sum(count for (_, name), count in self.ran.items() if fusion in (None, name))


def unnumbered(reason: str) -> str:
    """A reason with the numbers of graph nodes left out: `mm_3` is `mm`."""
    return re.sub(r"\b([A-Za-z]\w*?)_\d+\b", r"\1", reason)


def in_groups(reasons: Mapping[str, str], same: Callable[[str], str] = unnumbered) -> Iterator[str]:
    """`layers.0:input and 3 more: why`, a line for each reason of sites or layers.

    Args:
        reasons: site or layer -> reason.
        same: what of a reason tells it from others: all but numbers of graph nodes.
    """
    groups: dict[str, list[str]] = {}
    for place, reason in reasons.items():
        groups.setdefault(same(reason), []).append(place)
    for places in groups.values():
        yield f"{first_of(places)}: {reasons[places[0]]}"


class FusionMissedError(LayerfuseError, RuntimeError):
    """Expected fusions that did not happen, or layers of which nothing can be expected.

    `missed` maps fusion to site to reason; `unknown` maps what no adapter reads to its class, `unfound` what is asked for by name and has
    no site to the reason.
    """

    def __init__(
        self, missed: Missed, unknown: dict[str, str] | None = None, unfound: dict[str, str] | None = None
    ) -> None:
        self.missed = missed
        self.unknown = {} if unknown is None else unknown
        self.unfound = {} if unfound is None else unfound
        super().__init__(missed, self.unknown, self.unfound)

    def __str__(self) -> str:
        lines = []
        for fusion, sites in self.missed.items():
            lines.append(f"{fusion} was expected and did not happen at {sites_in_words(len(sites))}:")
            lines += [f"  - {line}" for line in in_groups(sites)]
        lines += [f"{name} is asked for, and has no site in this model: {why}" for name, why in self.unfound.items()]
        if self.unknown:
            lines.append("No adapter knows the class of these layers, so nothing can be planned for them:")
            lines += [f"  - {line}" for line in in_groups(self.unknown, str)]
            lines.append(
                "Declare the class in a models.toml entry, or pass specs= to leave such layers out on purpose."
            )
        if self.missed or self.unfound:
            lines.append("Switch the fusion off in FusionConfig, or compile with strict=False, if that is acceptable.")
        return "\n".join(lines)


@frozen(kw_only=True)
class FusionReport:
    """One fusion over all graphs and calls so far."""

    fusion: str
    expected: tuple[str, ...]
    "Sites, in the plan's order."
    matched: tuple[str, ...]
    "Expected sites that were fused in every graph that holds them, and that ran fused in the last call if there was one."
    missed: dict[str, str]
    "Expected sites that are not matched, with the reason."
    refused: dict[str, str]
    "`missed`, and the sites that the plan itself refused."
    not_applicable: dict[str, str]
    fallback: tuple[str, ...] = ()
    "Sites that were fused this way because a longer fusion was missed there."
    beyond: dict[str, str] = field(factory=dict)
    "Expected sites whose graphs so far are all for numbers of tokens at which another chain is taken. They are no misses."
    left: dict[str, str] = field(factory=dict)
    "Sites that were fused without the padding behind them, with the reason. They are no misses."
    compiled: int = 0
    "Uses that were fused in all compiled graphs together."
    executed: int = 0
    "Uses that ran fused in all calls together."
    last_call: int | None = None
    "Uses that ran fused in the last call; None where calls are not counted, or there was none."

    @property
    def complete(self) -> bool:
        """Whether everything expected happened."""
        return not self.missed

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return attrs.asdict(self)

    def __str__(self) -> str:
        more = f", {len(self.fallback)} as a fallback" if self.fallback else ""
        more += "" if self.last_call is None else f"; {counted(self.last_call, 'use')} ran fused in the last call"
        lines = [
            f"{self.fusion}: {len(self.expected)} expected, {len(self.matched)} matched, {len(self.refused)} refused, "
            f"{len(self.not_applicable)} not applicable{more}"
        ]
        kinds = {
            "refused": self.refused,
            "not applicable": self.not_applicable,
            "beyond its tokens": self.beyond,
            "padding left": self.left,
        }
        lines += [f"  {kind}: {line}" for kind, sites in kinds.items() for line in in_groups(sites)]
        return "\n".join(lines)


class Report:
    """The plan, the records of every compiled graph and call, and the verdicts on each fusion."""

    def __init__(self, plan: Plan, at_modules: bool = False) -> None:
        self.plan = plan
        self.at_modules = at_modules
        "Whether nothing compiles the model: its records are of ops that stand in modules."
        self.records: list[GraphRecord] = []
        self.calls = 0
        "Calls that were counted."
        self.executed: Counter[tuple[str, str]] = Counter()
        "(site, fusion) -> uses that ran fused in all calls together."
        self.last: CallRecord | None = None
        "The last call that was held to this plan, or None."
        self.shadow: Shadow | None = None
        "What fused ops gave beside their references, where `fusion.compile` was asked to compare; see `shadow.found`."
        self.unknown: dict[str, str] = {}
        "What no adapter reads though it should (`registry.unknown_in`), with its class: it is in no plan."
        self.unfound: dict[str, str] = {}
        "What is asked for by name and has no site in the model, with the reason."

    def replan(self, plan: Plan) -> None:
        """Hold graphs and calls to another plan from now on. What was missed where it says something else is no miss of it."""

        def now(use: Use) -> Use:
            site, before = plan.site.get(use.site), self.plan.site.get(use.site)
            same = site is not None and site == before and plan.at(use.site) == self.plan.at(use.site)
            return use if same else attrs.evolve(use, missed={})

        self.records = [attrs.evolve(record, uses=tuple(map(now, record.uses)), strange=()) for record in self.records]
        self.plan, self.last = plan, None

    def add(self, record: GraphRecord) -> None:
        """Take in what rewriting did to one more graph."""
        self.records.append(record)

    def add_call(self, call: CallRecord) -> None:
        """Take in one more call."""
        self.calls += 1
        self.executed.update(call.ran)
        self.last = call

    @property
    def graphs(self) -> int:
        """Graphs seen so far."""
        return len(self.records)

    def of(self, fusion: str) -> FusionReport:
        """The verdict on one fusion.

        Raises:
            UnknownFusionError: no such fusion.
        """
        FUSIONS.check(fusion)
        expected = tuple(dict.fromkeys(decision.site for decision in self.plan.expected(fusion)))
        missed = {site: why for site in expected if (why := self._why_missed(fusion, site)) is not None}
        wanted, served = set(expected), self._served(fusion)
        beyond = {
            site: why
            for site in expected
            if site not in missed and site not in served and (why := self._why_beyond(fusion, site)) is not None
        }
        return FusionReport(
            fusion=fusion,
            expected=expected,
            matched=tuple(site for site in expected if site not in missed and site not in beyond),
            beyond=beyond,
            missed=missed,
            refused={**{d.site: d.reason for d in self.plan.refused(fusion)}, **missed},
            not_applicable={d.site: d.reason for d in self.plan.not_applicable(fusion) if d.site not in wanted},
            fallback=tuple(decision.site for decision in self.plan.fallback(fusion) if decision.site in served),
            left={u.site: u.left for r in self.records for u in r.uses if u.fused == fusion and u.left is not None},
            compiled=sum(record.fused(fusion) for record in self.records),
            executed=sum(count for (_, name), count in self.executed.items() if name == fusion),
            last_call=None if self.last is None else self.last.fused(fusion),
        )

    def _served(self, fusion: str) -> set[str]:
        """Sites that some graph was fused at, or that ran fused."""
        compiled = {use.site for record in self.records for use in record.uses if use.fused == fusion}
        return compiled | {site for site, name in self.executed if name == fusion}

    def _why_beyond(self, fusion: str, site: str) -> str | None:
        """Which other numbers of tokens a site's graphs are for, where none is for one at which the fusion is expected."""
        planned = [d.tokens for d in self.plan.at(site) if d.fusion == fusion and d.applies]
        counts = [use.tokens for record in self.records for use in record.uses if use.site == site]
        known = sorted({count for count in counts if count is not None})
        if not known or None in counts or any(count in tokens for count in known for tokens in planned):
            return None
        several = f"{' and '.join(map(str, known[:3]))}{' and more' if len(known) > 3 else ''} token{'' if known == [1] else 's'}"
        return f"its graphs are for {several}; it is planned {' and '.join(map(str, planned))}"

    def _why_missed(self, fusion: str, site: str) -> str | None:
        uses = [use for record in self.records for use in record.uses if use.site == site]
        for use in uses:
            if fusion in use.missed:
                return with_fallback(use.missed[fusion], use.fused)
        if self.last is not None:
            return self.last.missed.get(fusion, {}).get(site)
        rivals = {d.fusion for d in self.plan.at(site) if d.kind == "expected"}
        # A use without a miss was fused otherwise, or its graph is for a number of tokens at which nothing is expected.
        return None if uses or any(site in self._served(name) for name in rivals) else self.why_absent(site)

    def why_absent(self, site: str) -> str:
        """Why a site without a use in any graph so far has none, as a sentence."""
        if self.at_modules:
            return "nothing compiles the model, and no op was put in at this site before its first call"
        if not self.records:
            return "no graph was rewritten: the model was not called, Dynamo is off, or Inductor had the graph in its cache"
        failed = next((record.failed for record in self.records if record.failed is not None), None)
        if failed is not None:
            return f"rewriting a graph failed: {failed}"
        if (hidden := self.why_hidden()) is not None:
            return hidden
        loose = [sentence for record in self.records for sentence in record.unattributed]
        hint = f"; norms that match no site: {'; '.join(loose[:3])}" if loose else ""
        placed = self.plan.site[site]
        what = "its norms are" if placed.norms else "its chain is"
        if placed.multiplies is not None:
            what = "a product that layerfuse knows is"
            hint = "; other ops multiply there, or it ran in no graph (TORCH_LOGS=aot_graphs,graph_breaks says which)"
        return f"{what} in none of the {counted(len(self.records), 'compiled graph')}{hint}"

    def why_hidden(self) -> str | None:
        """Why norms are in no graph, where bodies inside of graphs hold some, as a sentence; None where none do."""
        names = dict.fromkeys(name for record in self.records for name in record.bodies)
        if not names:
            return None
        return (
            f"it is in no graph itself, and norms are in the body of {' and '.join(names)}, which is not rewritten: leave "
            "torch.compiler.nested_compile_region and torch.cond out around layers that are to be fused"
        )

    def missed(self) -> Missed:
        """Everything expected that was lost in some graph, or did not run in the last call; empty when all is well."""
        found = {name: self.of(name).missed for name in FUSIONS}
        return {name: sites for name, sites in found.items() if sites}

    def check(self) -> None:
        """Raise where something expected did not happen, in any graph so far or in the last call.

        Raises:
            FusionMissedError: naming each site and its reason.
        """
        self._raise(self.missed(), self.all_unknown())

    def check_call(self, call: CallRecord | None = None) -> None:
        """Raise where something expected did not run fused in a call, the last one if not given.

        Raises:
            FusionMissedError: naming each site and its reason.
        """
        call = self.last if call is None else call
        if call is None:
            self._raise({}, self.unknown)
        else:
            self._raise(call.missed, self._with(call.strange))

    def _raise(self, missed: Missed, unknown: dict[str, str]) -> None:
        if missed or unknown or self.unfound:
            raise FusionMissedError(missed, unknown, self.unfound)

    def all_unknown(self) -> dict[str, str]:
        """What no adapter reads, by its class, and what graphs hold of norms beyond that."""
        return self._with(pair for record in self.records for pair in record.strange)

    def _with(self, strange: Iterable[tuple[str, str]]) -> dict[str, str]:
        """What no adapter reads, and these norms of the residual stream with what holds them, as far as it is not said of that."""
        found: dict[str, dict[str, None]] = {}
        for path, norm in strange:
            if f" {norm} " not in self.unknown.get(path, ""):
                found.setdefault(path, {})[norm] = None
        words = {path: f"RMS norms of its residual stream: {', '.join(norms)}" for path, norms in found.items()}
        also = {path: f"{words[path]}; {cls}" if path in words else cls for path, cls in self.unknown.items()}
        return {**words, **also}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "target": self.plan.target.to_dict(),
            "graphs": self.graphs,
            "calls": self.calls,
            "unknown": self.all_unknown(),
            "unfound": self.unfound,
            "fusions": {name: self.of(name).to_dict() for name in FUSIONS},
            "records": [attrs.asdict(record) for record in self.records],
            **({} if self.shadow is None else {"shadow": self.shadow.to_dict()}),
        }

    def __str__(self) -> str:
        calls = f", {counted(self.calls, 'call')}" if self.calls else ""
        lines = [f"fusion report: {counted(self.graphs, 'graph')} compiled for {self.plan.target}{calls}"]
        lines += [] if self.plan.why_empty is None else [f"  {self.plan.why_empty}"]
        for name in filter(self.plan.concerns, FUSIONS):
            lines += ["  " + line for line in str(self.of(name)).splitlines()]
        lines += [f"  {name} is asked for, and has no site in this model: {why}" for name, why in self.unfound.items()]
        unknown = {layer: f"no adapter knows {name}" for layer, name in self.all_unknown().items()}
        lines += [f"  unknown: {line}" for line in in_groups(unknown, str)]
        if self.shadow is not None:
            lines += ["  " + line for line in str(self.shadow).splitlines()]
        return "\n".join(lines)


def with_fallback(reason: str, fused: str | None) -> str:
    """The reason of a miss, and what was fused there instead."""
    return reason if fused is None else f"{reason}; {fused} was fused there instead"
