"""From the products of a graph to the uses of a plan's gated MLPs in it.

An MLP has no norm to know it by: the weight of the down projection that reads the product tells it, else the module path.
"""

from __future__ import annotations

import math
from collections import Counter

from torch.fx import Graph, Node

from ...adapters.specs import GatedMLPSpec
from ..match.products import FoundProduct, NearProduct, find_products, weights_of
from ..planning import Plan
from ..sites import ACTIVATION, Site
from .attribution import Attribution, Location, ModuleIndex
from .uses import SiteMatch, use_at


class ProductFinder:
    """Finds the uses of a plan's activation sites. Counts them, so that what cannot be told apart is handed out in turn."""

    def __init__(self, plan: Plan, around: ModuleIndex | None) -> None:
        sites = [site for site in plan.sites if site.role == ACTIVATION]
        names = {site.name for site in sites}
        self._wanted = {d.site for d in plan.decisions if d.site in names and d.kind in ("expected", "fallback")}
        self._ownership = Attribution(sites, around)
        self._visits: Counter[str] = Counter()

    def __call__(self, graph: Graph, taken: set[Node]) -> list[SiteMatch]:
        """The uses in a graph. `taken`: nodes that are part of something else, as a gated norm also ends in a product."""
        if not self._wanted:
            return []
        products, near = find_products(graph)
        uses: list[SiteMatch] = []
        missed: dict[str, SiteMatch] = {}
        for product in products:
            if product.out in taken:
                continue
            where = self._locate(product)
            fitting = [site for site, _ in where.places if _misfit(product, site) is None]
            if fitting:
                least = min(fitting, key=lambda site: self._visits[site.name])
                self._visits[least.name] += 1
                uses.append(use_at(least, (where,), product=product))
            elif (site := self._only(where)) is not None:
                missed[site.name] = use_at(site, (where,), problem=_misfit(product, site))
        found = {use.site.name for use in uses}
        for each in near:
            # Of several in one MLP the last is what its down projection reads.
            where = self._locate(each)
            if each.out not in taken and (site := self._only(where)) is not None:
                missed[site.name] = use_at(site, (where,), problem=each.reason)
        return uses + [use for name, use in missed.items() if name not in found]

    def _locate(self, product: FoundProduct | NearProduct) -> Location:
        return self._ownership.locate(weights_of(product.out), product.out)

    def _only(self, where: Location) -> Site | None:
        """The site that something certainly stands at, where something is expected there."""
        if where.how == "structure" or len(where.places) != 1:
            return None
        ((site, _),) = where.places
        return site if site.name in self._wanted else None


def _misfit(product: FoundProduct, site: Site) -> str | None:
    """How a product differs from what a spec describes, as a sentence; None where it does not."""
    spec = site.spec
    if not isinstance(spec, GatedMLPSpec):
        return f"{site} is of no gated MLP"
    if product.width != spec.local_intermediate_size:
        return f"the product {product.out} has width {product.width}; the spec says {spec.local_intermediate_size}"
    limit = math.inf if spec.swiglu_limit is None else spec.swiglu_limit
    if product.limit != limit:
        found, said = ("no clamp" if each == math.inf else f"a clamp at {each:g}" for each in (product.limit, limit))
        return f"the product {product.out} has {found}; the spec says {said}"
    return None
