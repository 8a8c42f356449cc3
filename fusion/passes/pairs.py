"""What the passes on an MLA layer's two latent norms share: finding the pair, and tying it to its layer.

A pair is handed on only where both inputs lie where the spec says (`ties`) and one op may take both. The ops write
nothing but their results, so other readers of the projection, such as the rope part of the keys, keep what they read.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from torch.fx import Graph, Node

from ...adapters.specs import MLASpec, NormSpec
from .. import ops as _ops  # noqa: F401  (registers the ops that rewritten graphs hold)
from ..plan import Plan
from ..report import GraphRecord, Match, Report
from .base import FusionPass
from .diagnose import NearNorm, near_norms, why_missing
from .motion import hoist, mutation_between
from .norm_sites import NormSite, find_norm_sites, same, value
from .owners import Owners
from .ties import base_of, why_not_tied

_COPIED_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "from_node", "seq_nr")


class LatentPairPass(FusionPass):
    """Pairs the two latent norms of each MLA layer that the plan expects its fusion for, or lets fall back to it."""

    def __init__(self, plan: Plan, report: Report | None = None) -> None:
        super().__init__(plan, report)
        self._specs: dict[str, MLASpec] = dict((*plan.expected_specs(self.fusion), *plan.fallback_specs(self.fusion)))
        self._expected = {layer for layer, _ in plan.expected_specs(self.fusion)}
        self._visits = dict.fromkeys(self._specs, 0)
        self._owners = Owners(layer for layer, _ in plan.specs)

    def rewrite(self, graph: Graph, number: int) -> GraphRecord:
        """Fuse what can be fused, and say what could not."""
        norms = {(norm.width, norm.epsilon) for spec in self._specs.values() for norm in _norms(spec)}
        sites: dict[str | None, list[NormSite]] = {}
        found: dict[str, Match] = {}
        for site in find_norm_sites(graph, norms) if norms else ():
            held = self._owners.of_parameter(site.weight)
            layer, frame = (self._owners.of_path(site.out), "") if held is None else held
            sites.setdefault(layer, []).append(site)
            if layer is not None:
                found[layer] = Match(layer=layer, how="module path" if held is None else "parameter", frame=frame)
        near: dict[str | None, list[NearNorm]] = {}
        for norm in near_norms(graph) if norms else ():
            near.setdefault(self._owners.of_path(norm.root), []).append(norm)

        matched: list[Match] = []
        missed: dict[str, str] = {}
        for layer in self._specs:
            # A layer whose part of this graph holds no norm at all was cut in two; the other graph has them.
            if layer in sites or layer in near:
                # After a graph break module paths are relative, and may tie a near norm to no layer.
                reason = self._fuse_layer(layer, sites.get(layer, []), near.get(layer) or near.get(None, []))
                if reason is None:
                    self._visits[layer] += 1
                    matched.append(found[layer])
                elif layer in self._expected:
                    missed[layer] = reason
        loose: list[str] = []
        matched += self._fuse_by_structure(sites.get(None, []), near.get(None, []), loose)
        return GraphRecord(
            fusion=self.fusion, graph=number, matched=tuple(matched), missed=missed, unattributed=tuple(loose)
        )

    def _fuse_layer(self, layer: str, sites: list[NormSite], near: list[NearNorm]) -> str | None:
        """Fuse one layer's pair. None when done, else the reason why not."""
        spec = self._specs[layer]
        queries, keys = _candidates(spec, sites)
        if not queries or not keys:
            return why_missing(spec, bool(queries), bool(keys), near)
        return self._fuse_any(spec, queries, keys)[1]

    def _fuse_by_structure(self, sites: list[NormSite], near: list[NearNorm], loose: list[str]) -> list[Match]:
        """Pair sites that carry no layer, and give each pair to the next layer that it fits, in the plan's order."""
        groups: dict[Node, list[NormSite]] = {}
        for site in sites:
            groups.setdefault(base_of(site), []).append(site)
        kinds: dict[Any, list[str]] = {}
        for layer, spec in self._specs.items():
            kinds.setdefault((_norms(spec), spec.split_sizes), []).append(layer)
        matched: list[Match] = []
        left: list[NormSite] = []
        for group in groups.values():
            reasons: list[str] = []
            while (name := self._fuse_one_of(group, kinds.values(), reasons)) is not None:
                matched.append(Match(layer=name, how="structure"))
            loose += reasons
            left += () if reasons else group
        loose += self._strangers(left)
        if not sites:
            loose += [norm.describe() for norm in near if norm.width in self._widths()]
        return matched

    def _fuse_one_of(self, group: list[NormSite], kinds: Iterable[list[str]], reasons: list[str]) -> str | None:
        """Fuse one pair of a group and take it out, for the layer that is next among those it fits; None at the end."""
        reasons.clear()
        for layers in kinds:
            layer = min(layers, key=self._visits.__getitem__)
            pair, reason = self._fuse_any(self._specs[layer], *_candidates(self._specs[layer], group))
            if pair is not None:
                group[:] = [site for site in group if site not in pair]
                self._visits[layer] += 1
                return layer
            if reason is not None:
                reasons.append(reason)
        return None

    def _fuse_any(
        self, spec: MLASpec, queries: list[NormSite], keys: list[NormSite]
    ) -> tuple[tuple[NormSite, NormSite] | None, str | None]:
        """Fuse the first pair that is tied and safe: that pair, or else the first reason met (None without candidates)."""
        first: str | None = None
        for q, kv in product(queries, keys):
            # With equal widths and epsilons a norm is a candidate for both sides.
            if q is not kv:
                reason = why_not_tied(spec, q, kv) or _why_unsafe(q, kv) or self.fuse(q, kv)
                if reason is None:
                    return (q, kv), None
                first = first or reason
        return None, first or ("one norm was found where two are needed" if queries and keys else None)

    @abstractmethod
    def fuse(self, q: NormSite, kv: NormSite) -> str | None:
        """Replace a tied pair by one op. None when done, else why not; then the graph is as it was."""

    def _strangers(self, left: list[NormSite]) -> list[str]:
        """Sentences on norms that share no origin with a partner."""
        for spec in self._specs.values():
            queries, keys = _candidates(spec, left)
            pairs = [(q, kv) for q, kv in zip(queries, keys, strict=False) if q is not kv]
            if pairs:
                return [why for q, kv in pairs if (why := why_not_tied(spec, q, kv)) is not None]
        return [f"{site.out} norms width {site.width} and has no partner" for site in left]

    def _widths(self) -> set[int]:
        return {norm.width for spec in self._specs.values() for norm in _norms(spec)}


def _norms(spec: MLASpec) -> tuple[NormSpec, NormSpec]:
    if spec.q_norm is None:
        raise TypeError("a spec without q_norm is never expected to fuse")
    return spec.q_norm, spec.kv_norm


def _candidates(spec: MLASpec, sites: list[NormSite]) -> tuple[list[NormSite], list[NormSite]]:
    """The sites that may be the query's norm, and those that may be the key/value's."""
    q_norm, kv_norm = _norms(spec)
    queries = [site for site in sites if (site.width, site.epsilon) == (q_norm.width, q_norm.epsilon)]
    keys = [site for site in sites if (site.width, site.epsilon) == (kv_norm.width, kv_norm.epsilon)]
    return queries, keys


def _why_unsafe(q: NormSite, kv: NormSite) -> str | None:
    """Why a tied pair may not become one op, or None if it may."""
    q_in, kv_in, q_out, kv_out = (value(node) for node in (q.x, kv.x, q.out, kv.out))
    if q.weight is kv.weight:
        return f"both norms share the weight {q.weight}, so they are not an MLA layer's two latent norms"
    if q_in.dtype != kv_in.dtype or q_in.device != kv_in.device:
        return f"the inputs differ: {q_in.dtype} on {q_in.device} and {kv_in.dtype} on {kv_in.device}"
    if q_in.dim() != kv_in.dim() or not all(same(a, b) for a, b in zip(q_in.shape[:-1], kv_in.shape[:-1], strict=True)):
        return f"the leading dimensions differ: {tuple(q_in.shape[:-1])} and {tuple(kv_in.shape[:-1])}"
    if not is_contiguous(q_out) or not is_contiguous(kv_out):
        # Views that follow were traced on these strides; the op's results are contiguous.
        return "a norm's result is not contiguous, as its input is a transposed tensor"
    first, last = sorted((q.out, kv.out))
    writer = mutation_between(first, last)
    if writer is not None:
        return f"{writer} writes in place between the two norms"
    return None


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor is contiguous for every size it may have."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same(size, 1) and not same(stride, expected):
            return False
        expected = expected * size
    return True


def call_fused(op: Any, q: NormSite, kv: NormSite, options: tuple[Any, ...]) -> tuple[Node, ...] | str:
    """One call of an op on both norms' inputs, where the first of them ran: its results, or why the graph forbids it.

    The op takes (q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, *options) and returns a tuple.
    """
    first, last = (q, kv) if q.out < kv.out else (kv, q)
    reason = hoist((last.x, last.weight), before=first.out)
    if reason is not None:
        return reason
    graph = first.out.graph
    args = (q.x, kv.x, q.weight, kv.weight, q.epsilon, kv.epsilon, *options)
    with torch.no_grad():
        val = op(*(value(arg) if isinstance(arg, Node) else arg for arg in args))
    meta = {key: first.out.meta[key] for key in _COPIED_META if key in first.out.meta}
    with graph.inserting_before(first.out):
        fused = graph.call_function(op, args)
        results = [graph.call_function(operator.getitem, (fused, i)) for i in range(len(val))]
    fused.meta = {**meta, "val": val}
    for result, each in zip(results, val, strict=True):
        result.meta = {**meta, "val": each}
    return tuple(results)


def erase_unused(nodes: Iterable[Node]) -> None:
    """Take those of the nodes out of their graph that nothing reads."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            node.graph.erase_node(node)
