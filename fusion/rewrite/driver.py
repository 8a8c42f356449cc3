"""The one driver: finds the uses of a plan's sites in a graph, and puts at each the longest chain that is there.

A shorter chain that the plan allows at the site is the fallback. Every use that is expected to fuse and does not is
recorded with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
from torch.fx import Graph, Node

from ...adapters.specs import FinalNormSpec, KernelSpec
from .. import ops as _ops  # noqa: F401  (registers the ops that rewritten graphs hold)
from ..catalog import FUSIONS
from ..chain import Fusion
from ..match.errors import Unmatched
from ..match.linears import READERS, Reader
from ..planning import Decision, Plan
from ..report import GraphRecord, Use
from ..sites import STREAM
from .assertions import drop_answered_checks
from .attribution import ModuleIndex
from .bodies import bodies_with_norms
from .emit import replace, why_not_there
from .finder import Finder
from .uses import SiteMatch


class Driver:
    """Rewrites the graphs of one model, one after the other."""

    def __init__(self, plan: Plan, around: ModuleIndex | None = None) -> None:
        self._plan = plan
        self._find = Finder(plan, around, _takes_stream(plan), FUSIONS.values())

    def __call__(self, graph: Graph, number: int, readers: Sequence[Reader] = READERS) -> GraphRecord:
        """Rewrite a graph in place. `number`: graphs that came before; `readers`: of the products of linears."""
        drop_answered_checks(graph)
        found = self._find(graph)
        moved: dict[Node, Node] = {}
        uses = [self._fuse(use, moved) for use in found.in_order]
        # What quantises for a linear may be another op by now.
        linears = self._find.linears(graph, readers)
        uses += [self._fuse(use, moved) for use in linears.uses]
        others = (self._fuse(use, moved).form for use in linears.others)
        return GraphRecord(
            graph=number,
            uses=tuple(uses),
            others=tuple(filter(None, others)),
            unattributed=tuple(found.loose),
            strange=found.strange,
            bodies=bodies_with_norms(graph),
        )

    def _fuse(self, use: SiteMatch, moved: dict[Node, Node]) -> Use:
        fused: str | None = None
        form = left = None
        count = None if use.first is None else use.tokens
        tokens = count if isinstance(count, int) else None
        missed = dict(self._missed_by_siblings(use, tokens, moved))
        for fusion, decisions in self._candidates(use, tokens):
            problem = use.problem or _outside(fusion, decisions, use)
            if problem is None:
                try:
                    form, left = replace(fusion, use, self._plan, moved)
                except Unmatched as reason:
                    problem = str(reason)
                else:
                    fused = fusion.name
                    break
            if any(decision.kind == "expected" for decision in decisions):
                missed[fusion.name] = problem
        return Use(
            site=use.site.name,
            fused=fused,
            missed=missed,
            form=None if form is None else form.op.name,
            tokens=tokens,
            left=left,
            how=use.how,
            weights=use.weights,
            whole=use.whole,
        )

    def _missed_by_siblings(
        self, use: SiteMatch, tokens: int | None, moved: dict[Node, Node]
    ) -> Iterator[tuple[str, str]]:
        """What is expected of sibling layers that run the same graph, not of this one, and is not there -> why."""
        if use.whole or use.first is None:
            return
        asked = {decision.fusion for decision in self._plan.at(use.site.name) if decision.applies}
        for site in self._plan.like(use.site):
            for decision in self._plan.at(site.name):
                if (
                    decision.kind == "expected"
                    and decision.fusion not in asked
                    and (tokens is None or tokens in decision.tokens)
                ):
                    asked.add(decision.fusion)
                    as_theirs = attrs.evolve(use, site=site)
                    why = why_not_there(FUSIONS[decision.fusion], as_theirs, self._plan, moved)
                    if why is not None:
                        yield decision.fusion, why

    def _candidates(self, use: SiteMatch, tokens: int | None) -> list[tuple[Fusion, list[Decision]]]:
        """What the plan allows here for the graph's number of tokens, longest chain first."""
        found: dict[str, list[Decision]] = {}
        for decision in self._plan.at(use.site.name):
            if decision.kind in ("expected", "fallback") and (tokens is None or tokens in decision.tokens):
                found.setdefault(decision.fusion, []).append(decision)
        pairs = [(FUSIONS[name], decisions) for name, decisions in found.items()]
        return sorted(pairs, key=lambda pair: -len(pair[0].chain))


def _takes_stream(plan: Plan) -> bool:
    """Whether a fusion of the residual stream is on, for such ranks as the model is over."""
    sharded = any(not isinstance(spec, FinalNormSpec | KernelSpec) and spec.parallel.size > 1 for _, spec in plan.specs)
    return any(
        not set(STREAM).isdisjoint(fusion.roles)
        and (sharded or not fusion.across_ranks)
        and plan.config.why_off(fusion, plan.engine) is None
        for fusion in FUSIONS.values()
    )


def _outside(fusion: Fusion, decisions: list[Decision], use: SiteMatch) -> str | None:
    """Why decisions for ranges of tokens do not hold in a graph for any number of them, or None where they do."""
    if fusion.takes_any_number or isinstance(use.tokens, int):
        return None
    first: int | None = 1
    for tokens in sorted((decision.tokens for decision in decisions), key=lambda tokens: tokens.first):
        if tokens.first == first:
            first = None if tokens.last is None else tokens.last + 1
    if first is None:
        return None
    planned = " and ".join(str(decision.tokens) for decision in decisions)
    return f"the graph is for any number of tokens, and {fusion.name} is planned {planned}"
