"""From the norms of a graph to the uses of a plan's sites in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define, field
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from ...adapters.errors import FOREIGN, said
from ...adapters.specs import GatedNormSpec, MLASpec, NormSpec
from ..match.found import FoundNorm, PartialMatch
from ..match.gates import FoundGatedNorm, find_gated_norms
from ..match.latents import base_of, why_unpaired
from ..match.norms import find_norms
from ..match.products import FoundProduct
from ..match.values import value
from ..sites import OUTPUT, Site
from .attribution import Attribution, Location, ModuleIndex, Place, differs, fits
from .missing import why_missing
from .unknown_norms import UnknownNorm, UnknownNormFinder

if TYPE_CHECKING:
    from ..chain import Fusion
    from ..planning import Plan


@define(kw_only=True, eq=False)
class SiteMatch:
    """One use of a site in a graph: its norms or its product, or why it has none that can be replaced."""

    site: Site
    norms: tuple[FoundNorm, ...] = ()
    "In the order of the site's; empty where `problem` says why."
    product: FoundProduct | None = None
    "In place of norms: that of a gated MLP."
    problem: str | None = None
    how: str = "structure"
    weights: tuple[tuple[int, tuple[str, ...]], ...] = ()
    "As in `report.Use`."
    whole: bool = True
    "Whether the weights are always these: see `Parameter.whole`."

    @property
    def tokens(self) -> Any:
        """How many rows of the whole layer there are: a number, or one that varies."""
        rows = value(self.norms[0].x if self.product is None else self.product.out)
        heads = bool(self.norms) and isinstance(self.norms[0], FoundGatedNorm)
        return rows.numel() // (self.site.quantised_width if heads else rows.shape[-1])

    @property
    def first(self) -> Node | None:
        """What places it among the uses of its graph: a result that it replaces."""
        if self.product is not None:
            return self.product.out
        return self.norms[0].out if self.norms else None


@define(kw_only=True)
class Found:
    """What a graph holds of a plan."""

    uses: list[SiteMatch] = field(factory=list)
    loose: list[str] = field(factory=list)
    "Sentences on norms that look like a site's and could be assigned to none."
    strange: tuple[UnknownNorm, ...] = ()
    "Norms of the residual stream that belong to no layer that was read."

    @property
    def in_order(self) -> list[SiteMatch]:
        """The uses in graph order, those that cannot be replaced last."""
        placed = sorted((first, i) for i, use in enumerate(self.uses) if (first := use.first) is not None)
        return [*(self.uses[i] for _, i in placed), *(use for use in self.uses if use.first is None)]


class UseFinder:
    """Finds the uses of a plan's sites. Counts them, so that what cannot be told apart is handed out in turn."""

    def __init__(self, plan: Plan, around: ModuleIndex | None, stream: bool, fusions: Iterable[Fusion]) -> None:
        """Args: stream: whether a fusion of the stream is on. fusions: whose norms may be there."""
        wanted = {decision.site for decision in plan.decisions if decision.kind in ("expected", "fallback")}
        self._wanted = wanted
        self._gated = any(site.role == OUTPUT and site.name in wanted for site in plan.sites)
        around = ModuleIndex() if around is None else around
        self._ownership = Attribution([site for site in plan.sites if site.norms], around)
        self._strangers = UnknownNormFinder(plan, self._ownership, around, stream)
        self._visits: Counter[str] = Counter()
        kinds = {type(norm) for site in plan.sites if site.name in wanted for norm in site.norms}
        # Of each kind by whoever brings it: several chains may hold one step.
        self._others = {
            type(step): (step, fusion.owner)
            for fusion in fusions
            for step in fusion.norms
            if not step.is_ours and step.norm in kinds
        }

    def __call__(self, graph: Graph) -> Found:
        """The uses of sites that have norms."""
        if not (self._wanted or self._strangers.asked):
            return Found()
        norms, near = self._norms(graph)
        found = Found()
        for step, owner in self._others.values():
            try:
                norms += step.find_norms(graph)
            except FOREIGN as error:
                found.loose.append(f"{type(step).__name__} of {owner} raised {said(error)}")
        pairs: dict[str, list[tuple[FoundNorm, int, Location]]] = {}
        sites: dict[str, Site] = {}
        unsure: list[tuple[FoundNorm, Location]] = []
        for norm in norms:
            where = self._ownership.locate((norm.weight,), norm.out)
            fitting = self._fitting(norm, where)
            owners = list(dict.fromkeys(site.name for site, _ in fitting))
            if len(owners) == 1:
                site = fitting[0][0]
                sites[site.name] = site
                if len(site.norms) > 1:
                    pairs.setdefault(site.name, []).extend((norm, i, where) for _, i in fitting)
                else:
                    found.uses.append(_use(site, (norm,), (where,)))
                    self._visits[site.name] += 1
            elif fitting:
                unsure.append((norm, where))
            elif (misfit := self._misfit(norm, where)) is not None:
                found.uses.append(misfit)
            else:
                near.append(PartialMatch.of(norm))
        for name, several in pairs.items():
            found.uses += self._paired(sites[name], several, near)
        self._hand_out(unsure, found)
        self._add_near(near, found)
        self._add_unnormed(graph, found)
        found.strange = self._strangers(graph, near)
        return found

    def _norms(self, graph: Graph) -> tuple[list[FoundNorm], list[PartialMatch]]:
        """The norms of a graph, those of gated sites with their gates, and what resembles one."""
        norms, near = find_norms(graph)
        if not self._gated:
            return norms, near
        found, reasons = find_gated_norms(graph, norms)
        gated = [norm for norm in found if self._fitting(norm, self._ownership.locate((norm.weight,), norm.out))]
        inside = {node for norm in gated for node in norm.nodes}
        plain = [norm for norm in norms if norm.out not in inside]
        near = [attrs.evolve(n, ungated=reasons.get(n.root)) for n in near if n.root not in inside]
        return sorted([*plain, *gated], key=lambda norm: norm.out), near

    def _fitting(self, norm: FoundNorm, where: Location) -> list[Place]:
        # Sites of which nothing is expected too: a graph may serve siblings of which something is.
        return [
            (site, i)
            for site, i in where.places
            if fits(norm, site.norms[i]) and _is_of_kind(norm, site.norms[i], where)
        ]

    def _misfit(self, norm: FoundNorm, where: Location) -> SiteMatch | None:
        """A norm that reads a site's weight, or stands in its module, and is not what the spec says."""
        if where.how == "structure" or len(where.places) != 1:
            return None
        ((site, i),) = where.places
        if site.name not in self._wanted or len(site.norms) != 1:
            return None
        return _missed(site, differs(norm, site.norms[i]), (where,))

    # ---- two norms of one site

    def _paired(
        self, site: Site, several: list[tuple[FoundNorm, int, Location]], near: list[PartialMatch]
    ) -> Iterator[SiteMatch]:
        """The pairs of one site, each norm once; what is left is a use that is missed."""
        firsts, seconds = ([(n, where) for n, i, where in several if i == side] for side in (0, 1))
        taken: set[FoundNorm] = set()
        reason: str | None = None
        for (q, q_where), (kv, kv_where) in product(firsts, seconds):
            if q in taken or kv in taken or q is kv:
                continue
            why = _why_unpaired(site, q, kv)
            if why is None:
                taken |= {q, kv}
                self._visits[site.name] += 1
                yield _use(site, (q, kv), (q_where, kv_where))
            else:
                reason = reason or why
        if firsts and seconds:
            left_q, left_kv = ({norm for norm, _ in side} - taken for side in (firsts, seconds))
            # With equal norms on both sides each norm stands on both.
            missed = -(-len(left_q) // 2) if left_q == left_kv else max(len(left_q), len(left_kv))
            problem = reason or "one norm was found where two are needed"
            if site.name in self._wanted:
                yield from (_missed(site, problem, (firsts[0][1],)) for _ in range(missed))
        if not (firsts and seconds):
            problem = why_missing(site, bool(firsts), bool(seconds), self._around(site, near))
            for _, where in (firsts or seconds) if site.name in self._wanted else ():
                yield _missed(site, problem, (where,))

    # ---- norms that several sites may own

    def _hand_out(self, unsure: list[tuple[FoundNorm, Location]], found: Found) -> None:
        """Give each norm, or pair of norms, to the site that was used least among those it fits, in the plan's order."""
        groups: dict[Node, list[tuple[FoundNorm, Location]]] = {}
        for norm, where in unsure:
            if any(len(site.norms) > 1 for site, _ in self._fitting(norm, where)):
                groups.setdefault(base_of(norm), []).append((norm, where))
        done: set[FoundNorm] = set()
        reasons: list[str] = []
        for group in groups.values():
            while (use := self._next_pair(group, reasons)) is not None:
                found.uses.append(use)
                done.update(use.norms)
                group[:] = [(norm, where) for norm, where in group if norm not in done]
        left: list[FoundNorm] = []
        for norm, where in unsure:
            if norm in done:
                continue
            single = [site for site, _ in self._fitting(norm, where) if len(site.norms) == 1]
            if single:
                site = min(single, key=lambda site: self._visits[site.name])
                self._visits[site.name] += 1
                found.uses.append(_use(site, (norm,), (where,)))
            else:
                left.append(norm)
        found.loose += reasons or [f"{norm.out} norms width {norm.width} and has no partner" for norm in left]

    def _next_pair(self, group: list[tuple[FoundNorm, Location]], reasons: list[str]) -> SiteMatch | None:
        for (q, q_where), (kv, kv_where) in product(group, group):
            if q is kv:
                continue
            first = {site.name: site for site, i in self._fitting(q, q_where) if i == 0 and len(site.norms) > 1}
            second = {site.name for site, i in self._fitting(kv, kv_where) if i == 1}
            sites = [site for name, site in first.items() if name in second]
            for site in sorted(sites, key=lambda site: self._visits[site.name]):
                why = _why_unpaired(site, q, kv)
                if why is None:
                    self._visits[site.name] += 1
                    return _use(site, (q, kv), (q_where, kv_where))
                if why not in reasons:
                    reasons.append(why)
                break
        return None

    # ---- what only resembles a norm

    def _around(self, site: Site, near: list[PartialMatch]) -> list[PartialMatch]:
        """The norms that are assigned to a site, or, where there are none, those that are assigned to no site."""
        located = [(norm, self._ownership.locate(norm.weights, norm.root)) for norm in near]
        own = [
            n for n, where in located if where.how != "structure" and any(s.name == site.name for s, _ in where.places)
        ]
        return own or [norm for norm, where in located if where.how == "structure"]

    def _add_near(self, near: list[PartialMatch], found: Found) -> None:
        """A site whose norms are here in no known form is a use that is missed."""
        used = {use.site.name for use in found.uses}
        problems: dict[str, tuple[Site, list[PartialMatch], Location]] = {}
        for norm in near:
            where = self._ownership.locate(norm.weights, norm.root)
            owners = {site.name: site for site, _ in where.places if site.name in self._wanted}
            if where.how == "structure" and where.places:
                if norm.width in {n.width for site, _ in where.places for n in site.norms}:
                    found.loose.append(norm.describe())
            elif owners:
                name, site = min(owners.items(), key=lambda item: self._visits[item[0]])
                if name not in used:
                    problems.setdefault(name, (site, [], where))[1].append(norm)
        for site, several, where in problems.values():
            found.uses.append(_missed(site, why_missing(site, False, False, several), (where,)))

    def _add_unnormed(self, graph: Graph, found: Found) -> None:
        """A site whose weight is read here, and by nothing that resembles a norm, is a use that is missed."""
        used = {use.site.name for use in found.uses}
        for weight in graph.find_nodes(op="placeholder"):
            # What bodies of other ops hold is told with them.
            readers = [user for user in weight.users if not isinstance(user.target, HigherOrderOperator)]
            where = self._ownership.locate((weight,), weight)
            # Of a norm without a path all parameters of the layer may be its weight.
            places = where.places if where.how == "parameter" and readers else ()
            owners = {site.name: site for site, norm in places if site.norms[norm].module is not None}
            if used.isdisjoint(owners) and not self._wanted.isdisjoint(owners):
                name, site = next((name, site) for name, site in owners.items() if name in self._wanted)
                used.add(name)
                problem = (
                    f"its weight is read by {' and '.join(map(str, readers))}, and no norm in a known form is there"
                )
                found.uses.append(_missed(site, problem, (where,)))


def _is_of_kind(norm: FoundNorm, spec: NormSpec, where: Location) -> bool:
    """Whether a norm is of the spec's kind; a site's own norm without a known gate is one that is missed."""
    ungated = norm.kind is NormSpec and isinstance(spec, GatedNormSpec)
    return norm.kind is type(spec) or (ungated and where.how != "structure")


def _missed(site: Site, problem: str, where: tuple[Location, ...]) -> SiteMatch:
    return _use(site, (), where, problem)


def _use(
    site: Site, norms: tuple[FoundNorm, ...], where: tuple[Location, ...], problem: str | None = None
) -> SiteMatch:
    return use_at(site, where, norms=norms, problem=problem)


def use_at(site: Site, where: tuple[Location, ...], **what: Any) -> SiteMatch:
    """A use of a site, from where its parts were found. `what`: the other fields of `SiteMatch`."""
    parameters = [each.parameter for each in where]
    known = [parameter for parameter in parameters if parameter is not None]
    return SiteMatch(
        site=site,
        **what,
        how=where[0].how,
        weights=tuple((parameter.position, parameter.names) for parameter in known),
        whole=all(parameter.whole for parameter in known),
    )


def _why_unpaired(site: Site, q: FoundNorm, kv: FoundNorm) -> str | None:
    if q.weight is kv.weight:
        return f"both norms share the weight {q.weight}, so they are not an MLA layer's two latent norms"
    return why_unpaired(site.spec, q, kv) if isinstance(site.spec, MLASpec) else None
