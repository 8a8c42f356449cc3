"""Linears with few tokens in an engine: which of a plan's a product in a graph is, and what became of it; and those that no graph shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from attrs import define, field
from torch.fx import Node

from ..fusion.planning import Plan
from ..fusion.report import Use
from ..fusion.rewrite.attribution import Attribution, ModuleIndex

UNREAD = "its kernel does not read this weight, its scales or what is multiplied with it as they lie in memory"


class Linears:
    """The linears of a plan in one graph."""

    def __init__(self, plan: Plan, around: ModuleIndex | None) -> None:
        sites = [site for site in plan.sites if site.linear is not None]
        names = {site.name for site in sites}
        self._attribution = Attribution(sites, around)
        self._expected = {(each.site, each.fusion) for each in plan.expected() if each.site in names}
        self.fusions = frozenset(fusion for _, fusion in self._expected)
        "Those that are expected somewhere."
        self.uses: list[Use] = []
        self.others: list[str] = []
        "As `GraphRecord.others`."

    def replaces(self, product: Node, fusion: str, op: str | None) -> bool:
        """Whether a product becomes an op of layerfuse's, which is taken down: where its linear's site expects that, or where it has none.

        Args:
            product: in the graph, where the engine's own code left the modules around it.
            fusion: of the op.
            op: None: the op takes no such product.
        """
        site = self._site(product)
        if site is None:
            taken = op is not None and fusion in self.fusions
            self.others += [op] if op is not None and taken else []
            return taken
        if (site, fusion) not in self._expected:
            return False
        missed = {fusion: UNREAD} if op is None else {}
        fused = None if op is None else fusion
        self.uses.append(Use(site=site, fused=fused, form=op, missed=missed, how="module path"))
        return op is not None

    def _site(self, product: Node) -> str | None:
        # LoRA puts a module of its own in a linear's place, and the linear inside of that.
        places = next(filter(None, self._attribution.outwards(product)), ())
        return places[0][0].name if len(places) == 1 else None


@define(kw_only=True)
class AtSeams:
    """Linears that no graph shows, with layerfuse's product at a seam of each."""

    fusion: str
    calls: Callable[[], Mapping[str, Counter[str]]] = field(repr=False)
    "Site -> op -> calls so far."
    left: Mapping[str, str] = field(factory=dict)
    "Site -> why nothing of layerfuse's stands there after all."
    ran: dict[str, Counter[str]] = field(factory=dict)
    "The same of the first run."

    def uses(self, run: str) -> Iterator[Use]:
        """What that run was; `run`: as `CompiledModule.run`."""
        for site, calls in self.ran.items():
            yield from (Use(site=site, fused=self.fusion, form=op, how="module") for op in calls.elements())
            if not calls.total():
                why = self.left.get(site) or f"the {run} did not come to its product, or {UNREAD}"
                yield Use(site=site, fused=None, missed={self.fusion: why}, how="module")
