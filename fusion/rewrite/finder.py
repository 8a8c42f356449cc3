"""From the norms and products of a graph to the uses of a plan's sites in it.

A norm is known by its weight, the product of a gated MLP by that of the down projection which reads it; else by the module path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, permutations
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from ...adapters.errors import FOREIGN, said
from ...adapters.specs import GQASpec, MLASpec
from ..match.found import FoundNorm, PartialMatch
from ..match.gates import find_gated_norms
from ..match.index import GraphIndex
from ..match.latents import base_of, why_unpaired
from ..match.linears import Reader, products_in, read
from ..match.norms import find_norms
from ..match.products import FoundProduct, find_products
from ..match.values import same, value
from ..sites import ACTIVATION, INPUT, LINEAR, OUTPUT, Site
from .attribution import Attribution, Location, ModuleIndex
from .linears import UNREAD
from .missing import why_missing
from .unknown_norms import UnknownNormFinder
from .uses import Found, SiteMatch, use_at

if TYPE_CHECKING:
    from ..chain import Fusion
    from ..planning import Plan


@frozen(kw_only=True, eq=False)
class _Part:
    """A norm or a product, and the sites that it may be of."""

    found: Any
    "A FoundNorm or a FoundProduct."
    where: Location
    places: dict[tuple[str, int], Site]
    "By the name of a site and which of its norms it would be; 0 for a product."

    @property
    def owners(self) -> dict[str, Site]:
        """The sites by their names."""
        return {site.name: site for site in self.places.values()}


class Finder:
    """Finds the uses of a plan's sites. Counts them, so that what cannot be told apart is handed out in turn."""

    def __init__(self, plan: Plan, around: ModuleIndex | None, stream: bool, fusions: Iterable[Fusion]) -> None:
        """Args: stream: whether a fusion of the stream is on. fusions: whose norms may be there."""
        self._wanted = {decision.site for decision in plan.decisions if decision.kind in ("expected", "fallback")}
        wanted = [site for site in plan.sites if site.name in self._wanted]
        self._gated = any(site.role == OUTPUT for site in wanted)
        self._multiplied = any(site.role == ACTIVATION for site in wanted)
        around = ModuleIndex() if around is None else around
        self._of_norms = Attribution([site for site in plan.sites if site.norms], around)
        self._of_products = Attribution([site for site in plan.sites if site.role == ACTIVATION], around)
        self._linears = {site.name: site for site in plan.sites if site.linear is not None}
        self._of_linears = Attribution(self._linears.values(), around)
        forms = {fusion.name: [form.op.name for form in fusion.forms] for fusion in fusions if LINEAR in fusion.roles}
        self._few: dict[str, set[str]] = {name: set() for name in self._linears}
        for each in plan.expected() if self._linears else ():
            if each.site in self._few:
                self._few[each.site].update(forms[each.fusion])
        self._unknown_norms = UnknownNormFinder(plan, self._of_norms, around, stream)
        self._visits: Counter[str] = Counter()
        kinds = {type(norm) for site in wanted for norm in site.norms}
        # Of each kind by whoever brings it: several chains may hold one step.
        self._others = {
            type(step): (step, fusion.owner)
            for fusion in fusions
            for step in fusion.norms
            if not step.is_ours and step.norm in kinds
        }

    def __call__(self, graph: Graph) -> Found:
        """What a graph holds of the plan."""
        found, index = Found(), GraphIndex(graph)
        if self._wanted or self._unknown_norms.asked:
            self._find_norms(index, found)
        if self._multiplied:
            self._find_products(index, found)
        return found

    # ---- norms

    def _find_norms(self, index: GraphIndex, found: Found) -> None:
        norms, near = self._norms(index)
        for step, owner in self._others.values():
            try:
                norms += step.find_norms(index.graph)
            except FOREIGN as error:
                found.loose.append(f"{type(step).__name__} of {owner} raised {said(error)}")
        parts = [self._part(norm, (norm.weight,), self._of_norms) for norm in norms]
        for part in parts:
            if part.places:
                continue
            site = self._only(part.where)
            if site is not None and len(site.norms) == 1:
                # A norm that reads a site's weight, or stands in its module, and is not what the spec says.
                found.uses.append(use_at(site, (part.where,), problem=part.found.why_not(site)))
            else:
                near.append(PartialMatch.of(part.found))
        self._hand_out(parts, found, near)
        self._add_near(near, found)
        self._add_unnormed(index.graph, found)
        first = [norm for use in found.uses if _starts(use.site) for norm in use.norms]
        found.strange = self._unknown_norms(index.graph, near, map(PartialMatch.of, first))

    def _norms(self, index: GraphIndex) -> tuple[list[FoundNorm], list[PartialMatch]]:
        """The norms of a graph, those of gated sites with their gates, and what resembles one."""
        norms, near = find_norms(index)
        if not self._gated:
            return norms, near
        found, reasons = find_gated_norms(index, norms)
        gated = [norm for norm in found if self._part(norm, (norm.weight,), self._of_norms).places]
        inside = {node for norm in gated for node in norm.nodes}
        plain = [norm for norm in norms if norm.out not in inside]
        near = [attrs.evolve(n, ungated=reasons.get(n.root)) for n in near if n.root not in inside]
        return sorted([*plain, *gated], key=lambda norm: norm.out), near

    # ---- products

    def _find_products(self, index: GraphIndex, found: Found) -> None:
        taken = {node for use in found.uses for norm in use.norms for node in norm.nodes}
        several, near = find_products(index)
        # A gated norm ends in a product too.
        parts = [self._part(each, each.weights, self._of_products) for each in several if each.out not in taken]
        self._hand_out(parts, found, ())
        used = {use.site.name for use in found.uses}
        missed: dict[str, SiteMatch] = {}
        misfits: list[tuple[Any, Location]] = [(part.found, part.where) for part in parts if not part.places]
        others = [(each, self._of_products.locate(each.weights, each.out)) for each in near if each.out not in taken]
        for each, where in (*misfits, *others):
            # Of several in one MLP the last is what its down projection reads.
            site = self._only(where)
            if site is not None and site.name not in used:
                missed[site.name] = use_at(site, (where,), problem=each.why_not(site))
        found.uses += missed.values()

    # ---- linears

    def linears(self, graph: Graph, readers: Sequence[Reader]) -> Found:
        """The products of a graph that linears of the plan may take a fusion at, as they are now."""
        found, anywhere = Found(), set().union(*self._few.values())
        for node, several in products_in(GraphIndex(graph), readers) if anywhere else ():
            where = self._of_linears.locate(node.all_input_nodes, node)
            if where.how != "parameter":
                # LoRA puts a module of its own in a linear's place, and the linear inside of that.
                places = next(filter(None, self._of_linears.outwards(node)), ())
                where = Location(places=places, how="module path")
            elif not where.places:
                continue  # a head, which no spec lists, keeps its own
            site = where.places[0][0] if len(where.places) == 1 else None
            wanted = anywhere if site is None else self._few[site.name]
            asked = [reader for reader in several if not wanted.isdisjoint(reader.gives)]
            product = read(node, asked)
            if site is not None and asked:
                problem = UNREAD if product is None else None
                found.uses.append(use_at(site, (where,), linear=product, problem=problem))
            elif product is not None:
                like = next(name for name, ops in self._few.items() if not ops.isdisjoint(product.ways))
                found.others.append(SiteMatch(site=self._linears[like], linear=product))
        return found

    # ---- whose they are

    def _part(self, found: FoundNorm | FoundProduct, weights: Iterable[Node], attribution: Attribution) -> _Part:
        where = attribution.locate(weights, found.out)
        certain = where.how != "structure"
        # Sites of which nothing is expected too: a graph may serve siblings of which something is.
        places = {(site.name, i): site for site, i in where.places if found.why_not(site, i, certain) is None}
        return _Part(found=found, where=where, places=places)

    def _only(self, where: Location) -> Site | None:
        """The site that something certainly stands at, where something is expected there."""
        if where.how == "structure" or len(where.places) != 1:
            return None
        ((site, _),) = where.places
        return site if site.name in self._wanted else None

    def _hand_out(self, parts: Iterable[_Part], found: Found, near: Iterable[PartialMatch]) -> None:
        """Put parts together to uses of sites, first those whose site is certain. What is left over of such a site is a use that is missed."""
        certain: dict[str, list[_Part]] = {}
        unsure: dict[Node, list[_Part]] = {}
        for part in parts:
            owners = part.owners
            if len(owners) == 1:
                certain.setdefault(next(iter(owners)), []).append(part)
            elif owners:
                pairs = any(len(site.norms) > 1 for site in owners.values())
                unsure.setdefault(base_of(part.found) if pairs else part.found.out, []).append(part)
        _join_partners(certain, unsure)
        for group in certain.values():
            (site,) = group[0].owners.values()
            has = {i for part in group for _, i in part.places}
            reasons: list[str] = []
            left = self._taken(group, found, reasons)
            if left and site.name in self._wanted:
                both = "one norm was found where two are needed"
                why = [*reasons, both][0] if len(has) > 1 else why_missing(site, has, self._around(site, near))
                # As few uses as these can be of: one that is of either place stands for both.
                alone = Counter(place for part in left if len(part.places) == 1 for _, place in part.places)
                missed = max([-(-len(left) // 2), *alone.values()])
                found.uses += [use_at(site, (part.where,), problem=why) for part in left[:missed]]
        for group in unsure.values():
            reasons = []
            left = self._taken(group, found, reasons)
            single = [f"{part.found.out} norms width {part.found.width} and has no partner" for part in left]
            found.loose += (reasons or single) if left else []

    def _taken(self, group: list[_Part], found: Found, reasons: list[str]) -> list[_Part]:
        """Add the uses that a group makes up, each of the site that was used least, in the plan's order. Returns what is left over."""
        left = list(group)
        while (use := self._next(left, reasons)) is not None:
            site, parts = use
            self._visits[site.name] += 1
            where, several = tuple(part.where for part in parts), tuple(part.found for part in parts)
            what = {"norms": several} if site.norms else {"product": several[0]}
            found.uses.append(use_at(site, where, **what))
            left = [part for part in left if part not in parts]
        return left

    def _next(self, group: list[_Part], reasons: list[str]) -> tuple[Site, tuple[_Part, ...]] | None:
        for parts in chain(permutations(group, 2), zip(group)):
            sites = [
                site
                for (name, i), site in parts[0].places.items()
                if i == 0
                and len(parts) == max(1, len(site.norms))
                and all((name, place) in part.places for place, part in enumerate(parts))
            ]
            if sites:
                site = min(sites, key=lambda site: self._visits[site.name])
                why = _why_unpaired(site, *[part.found for part in parts]) if len(parts) > 1 else None
                if why is None:
                    return site, parts
                if why not in reasons:
                    reasons.append(why)
        return None

    # ---- what only resembles a norm

    def _around(self, site: Site, near: Iterable[PartialMatch]) -> list[PartialMatch]:
        """The norms that are assigned to a site, or, where there are none, those that are assigned to no site."""
        located = [(norm, self._of_norms.locate(norm.weights, norm.root)) for norm in near]
        own = [
            n for n, where in located if where.how != "structure" and any(s.name == site.name for s, _ in where.places)
        ]
        return own or [norm for norm, where in located if where.how == "structure"]

    def _add_near(self, near: Iterable[PartialMatch], found: Found) -> None:
        """A site whose norms are here in no known form is a use that is missed."""
        used = {use.site.name for use in found.uses}
        problems: dict[str, tuple[Site, list[PartialMatch], Location]] = {}
        for norm in near:
            where = self._of_norms.locate(norm.weights, norm.root)
            owners = {site.name: site for site, _ in where.places if site.name in self._wanted}
            if where.how == "structure" and where.places:
                if norm.width in {n.width for site, _ in where.places for n in site.norms}:
                    found.loose.append(norm.describe())
            elif owners:
                name, site = min(owners.items(), key=lambda item: self._visits[item[0]])
                if name not in used:
                    problems.setdefault(name, (site, [], where))[1].append(norm)
        for site, several, where in problems.values():
            found.uses.append(use_at(site, (where,), problem=why_missing(site, (), several)))

    def _add_unnormed(self, graph: Graph, found: Found) -> None:
        """A site whose weight is read here, and by nothing that resembles a norm, is a use that is missed."""
        used = {use.site.name for use in found.uses}
        for weight in graph.find_nodes(op="placeholder"):
            # What bodies of other ops hold is told with them.
            readers = [user for user in weight.users if not isinstance(user.target, HigherOrderOperator)]
            where = self._of_norms.locate((weight,), weight)
            # Of a norm without a path all parameters of the layer may be its weight.
            places = where.places if where.how == "parameter" and readers else ()
            owners = {site.name: site for site, norm in places if site.norms[norm].module is not None}
            if used.isdisjoint(owners) and not self._wanted.isdisjoint(owners):
                name, site = next((name, site) for name, site in owners.items() if name in self._wanted)
                used.add(name)
                problem = (
                    f"its weight is read by {' and '.join(map(str, readers))}, and no norm in a known form is there"
                )
                found.uses.append(use_at(site, (where,), problem=problem))


def _join_partners(certain: dict[str, list[_Part]], unsure: dict[Node, list[_Part]]) -> None:
    """Move a norm that several layers share to the one layer whose other norm stands beside it."""
    for base, group in unsure.items():
        beside: dict[str, set[int]] = {}
        for name, parts in certain.items():
            held = {
                i
                for part in parts
                if len(part.owners[name].norms) > 1 and base_of(part.found) is base
                for _, i in part.places
            }
            if held:
                beside[name] = held
        for part in list(group):
            wanted = {(name, i): site for (name, i), site in part.places.items() if i not in beside.get(name, {i})}
            if len(wanted) == 1:
                ((name, _),) = wanted
                group.remove(part)
                certain[name].append(attrs.evolve(part, places=wanted))


def _starts(site: Site) -> bool:
    """Whether a site is the entry of a residual stream."""
    return site.role == INPUT and not site.adds and site.no_sum is None


def _why_unpaired(site: Site, q: FoundNorm, kv: FoundNorm) -> str | None:
    if q.weight is kv.weight:
        return f"both norms share the weight {q.weight}, so they are not the two norms of one layer"
    if isinstance(site.spec, GQASpec):
        return _why_no_heads(site.spec, q, kv)
    return why_unpaired(site.spec, q, kv) if isinstance(site.spec, MLASpec) else None


def _why_no_heads(spec: GQASpec, q: FoundNorm, k: FoundNorm) -> str | None:
    heads = [value(norm.out).shape[-2] if value(norm.out).dim() > 2 else None for norm in (q, k)]
    wanted = [spec.num_local_heads, spec.num_local_kv_heads]
    if any(count is None or not same(count, want) for count, want in zip(heads, wanted, strict=True)):
        return f"{q.out} and {k.out} norm {heads[0]} and {heads[1]} heads; the spec says {wanted[0]} and {wanted[1]}"
    return None
