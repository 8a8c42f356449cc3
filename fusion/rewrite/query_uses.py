"""From the joined columns of a graph to the uses of a plan's query sites in it.

A query has no norm to know it by: the weight that absorbs the key's projection into it tells it, else the module path, else
its widths alone.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Graph, Node

from ...adapters.specs import MLASpec
from ..match.activations import aten
from ..match.cache_writes import joined_columns
from ..match.errors import Unmatched
from ..match.provenance import columns_of
from ..match.ropes import FoundRope, find_rope
from ..match.values import last_width, same, value
from ..plan import Plan
from ..sites import QUERY, Site
from .ownership import Ownership, Surroundings
from .roped import why_not_as_said
from .uses import FoundQuery, SiteUse, use_at


class QueryFinder:
    """Finds the uses of a plan's query sites. Counts them, so that what cannot be told apart is handed out in turn."""

    def __init__(self, plan: Plan, around: Surroundings | None) -> None:
        sites = [site for site in plan.sites if site.role == QUERY]
        names = {site.name for site in sites}
        self._wanted = {d.site for d in plan.decisions if d.site in names and d.kind in ("expected", "fallback")}
        self._ownership = Ownership(sites, around)
        self._visits: Counter[str] = Counter()

    def __call__(self, graph: Graph, normed: set[Node]) -> list[SiteUse]:
        """The uses in a graph. `normed`: results of norms: what is joined with one of them is an entry of a cache."""
        uses: list[SiteUse] = []
        if not self._wanted:
            return uses
        for node in graph.find_nodes(op="call_function", target=aten.cat.default):
            latent, rope = joined_columns(node)
            if latent is None or columns_of(latent) is None or _source(latent) in normed:
                continue
            where = self._ownership.locate(weights_of(latent), node)
            sites = {site.name: site for site, _ in where.places if _fits(latent, rope, site)}
            if not sites:
                continue
            problem: str | None = None
            found: dict[str, FoundRope] = {}
            for site in sites.values():
                try:
                    turned = find_rope(rope, last_width(rope) or 0, value(latent).shape[:-1])
                except Unmatched as reason:
                    problem = problem or str(reason)
                    continue
                assert isinstance(site.spec, MLASpec)
                wrong = why_not_as_said(turned, site.spec)
                if wrong is None:
                    found[site.name] = turned
                problem = problem or wrong
            names = [name for name in (found or sites) if found or name in self._wanted]
            if not names:
                continue
            least = min(names, key=lambda name: self._visits[name])
            self._visits[least] += 1
            if found:
                query = FoundQuery(latent=latent, rope=found[least], out=node)
                uses.append(use_at(sites[least], (where,), query=query))
            else:
                uses.append(use_at(sites[least], (where,), problem=problem))
        return uses


def _fits(latent: Node, rope: Node, site: Site) -> bool:
    spec, val = site.spec, value(latent)
    if not isinstance(spec, MLASpec) or val.dim() < 3:
        return False
    widths = (last_width(latent), last_width(rope))
    return widths == (spec.kv_lora_rank, spec.qk_rope_head_dim) and same(val.shape[-2], spec.num_local_heads)


def _source(node: Node) -> Node:
    found = columns_of(node)
    return node if found is None else found.root


def weights_of(latent: Node) -> list[Node]:
    """What the matrix product takes that gives a tensor: inputs of the graph, before views."""
    node = latent
    while node.op == "call_function" and node.target is not aten.bmm.default:
        before = node.args[0] if node.args else None
        if not isinstance(before, Node) or len(node.all_input_nodes) != 1:
            return []
        node = before
    found = []
    for source in node.all_input_nodes:
        each = source
        while each.op == "call_function" and len(each.all_input_nodes) == 1:
            (each,) = each.all_input_nodes
        if each.op in ("placeholder", "get_attr") and isinstance(value(each), torch.Tensor):
            found.append(each)
    return found
