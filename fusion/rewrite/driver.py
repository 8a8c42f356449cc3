"""The one driver: finds the uses of a plan's sites in a graph, and puts at each the longest chain that is there.

A shorter chain that the plan allows at the site is the fallback. Every use that is expected to fuse and does not is
recorded with its reason.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from .. import ops as _ops  # noqa: F401  (registers the ops that rewritten graphs hold)
from ..catalog import FUSIONS
from ..chain import Fusion
from ..match.errors import Unmatched
from ..plan import Decision, Plan
from ..report import GraphRecord, Use
from .emit import replace
from .ownership import Ownership, Surroundings
from .product_uses import ProductFinder
from .uses import SiteUse, UseFinder


class Driver:
    """Rewrites the graphs of one model, one after the other."""

    def __init__(self, plan: Plan, around: Surroundings | None = None) -> None:
        self._plan = plan
        self._find = UseFinder(plan, Ownership([site for site in plan.sites if site.norms], around))
        self._find_products = ProductFinder(plan, around)

    def __call__(self, graph: Graph, number: int) -> GraphRecord:
        """Rewrite a graph in place. `number`: graphs that came before."""
        found = self._find(graph)
        found.uses += self._find_products(
            graph, {node for use in found.uses for norm in use.norms for node in norm.nodes}
        )
        moved: dict[Node, Node] = {}
        uses = tuple(self._fuse(use, moved) for use in found.in_order)
        return GraphRecord(graph=number, uses=uses, unattributed=tuple(found.loose))

    def _fuse(self, use: SiteUse, moved: dict[Node, Node]) -> Use:
        missed: dict[str, str] = {}
        fused: str | None = None
        form = left = None
        for fusion, decision in self._candidates(use):
            problem = use.problem or _outside(decision, use)
            if problem is None:
                try:
                    form, left = replace(fusion, use, self._plan, moved)
                except Unmatched as reason:
                    problem = str(reason)
                else:
                    fused = fusion.name
                    break
            if decision.kind == "expected":
                missed[fusion.name] = problem
        return Use(
            site=use.site.name,
            fused=fused,
            missed=missed,
            form=None if form is None else form.op.name,
            left=left,
            how=use.how,
            weights=use.weights,
            whole=use.whole,
        )

    def _candidates(self, use: SiteUse) -> list[tuple[Fusion, Decision]]:
        """What the plan allows here, longest chain first."""
        allowed = [d for d in self._plan.at(use.site.name) if d.kind in ("expected", "fallback")]
        pairs = [(FUSIONS[decision.fusion], decision) for decision in allowed]
        return sorted(pairs, key=lambda pair: -len(pair[0].chain))


def _outside(decision: Decision, use: SiteUse) -> str | None:
    """Why a decision for a range of tokens does not hold in a graph, or None where it does."""
    if decision.tokens.first == 1 and decision.tokens.last is None:
        return None
    count = use.tokens
    if not isinstance(count, int):
        return f"the graph is for any number of tokens, and {decision.fusion} is planned {decision.tokens}"
    return None if count in decision.tokens else f"{count} tokens; {decision.fusion} is planned {decision.tokens}"
