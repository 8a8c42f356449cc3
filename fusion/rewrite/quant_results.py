"""Putting the results of a fused op where a graph has those of a quantisation, in whatever shape and layout it has them.

The elements are the same in the same order, so only views are needed, and they are planned before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from ...adapters.activation_quant import ActivationQuant
from ..formats import FORMATS
from ..match.errors import Unmatched
from ..match.layouts import ROWS, Layout, laid_out, layout_of, lie_alike
from ..match.quants import FoundQuant, reshapes_of
from ..match.values import is_contiguous, same, same_shape, value
from ..target import Target
from .layouts import Size, sizes_of, view

aten = torch.ops.aten
Plans: TypeAlias = "list[tuple[Node, tuple[Size, ...] | None]]"
"""The nodes that are read from outside, each with the sizes of the view that it needs; None: none."""


class Results:
    """The two results of one quantisation, and how those of a fused op take their place.

    Raises:
        Unmatched: a result has a shape or layout that no view of the new one has.
    """

    def __init__(self, site: FoundQuant, like: torch.Tensor, sources: Sequence[Node]) -> None:
        """Plan it, given the normed tensor's traced value, and what of the graph has its sizes. Nothing changes yet."""
        self._site = site
        self._inside = set(site.nodes)
        whole = site.layout is not None
        if not whole:
            self._inside.update(reshapes_of(site.values))
        self._anew: list[list[Node]] = []
        self._scales: Plans = []
        self.layout = ROWS if site.layout is None else site.layout
        "How all that reads the scales has them."
        self.shape = (*like.shape[:-1], like.shape[-1] // site.columns)
        "Of the scales."
        if site.scales is not None:
            if not whole:
                self._inside.update(reshapes_of(site.scales))
                self._anew = _laid_out_anew(site.scales, self._inside, self.shape)
            if site.swizzled:  # of rows in one dimension, whatever those of the norm
                self._scales = [(site.scales, None)]
            elif self._anew:
                self.layout = _common_layout(self._anew)
                # Their rows are in one dimension or in those of the norm: in order either way.
                self._scales = [_plan(chain[-1], self.shape, sources) for chain in self._anew]
            else:
                self._scales = plan_views(site.scales, self.shape, self._inside, whole, sources)
        packed = 1 if site.fixed is None else FORMATS[site.fixed].packed
        self._values = plan_views(
            site.values, (*like.shape[:-1], like.shape[-1] // packed), self._inside, whole, sources
        )

    def lies(self, layout: Layout) -> bool:
        """Whether all that reads the scales has them in a layout."""
        return self.layout == layout or lie_alike(self.shape, self.layout, layout)

    def replace(self, values: Node, scales: Node | None) -> list[Node]:
        """Let all readers read these instead. Returns the nodes that may now be unread."""
        unread = [*self._inside, *self._site.aside]
        if self._site.echo is not None and self._site.scale is not None:
            self._site.echo.replace_all_uses_with(self._site.scale)
        for chain in self._anew:
            unread += chain
        put(values, self._values, self._inside)
        if scales is not None:
            put(scales, self._scales, self._inside)
        return unread


def _laid_out_anew(scales: Node, inside: set[Node], shape: tuple[Any, ...]) -> list[list[Node]]:
    """The chains of nodes that lay the scales out anew, if that is all that is done with them; else none."""
    chains: list[list[Node]] = []
    for each in reshapes_of(scales):
        for user in each.users:
            if user in inside:
                continue
            chain = laid_out(user, each, shape)
            if chain is None:
                return []
            chains.append(chain)
    return chains


def _common_layout(chains: list[list[Node]]) -> Layout:
    found = {chain[-1]: layout_of(value(chain[-1])) for chain in chains}
    for last, layout in found.items():
        if layout is None:
            strides = tuple(value(last).stride())
            raise Unmatched(f"the scales {last} have strides {strides}, neither row by row nor column by column")
    if len({*found.values()}) > 1:
        raise Unmatched(f"the scales are laid out in {len(chains)} ways: {', '.join(map(str, found.values()))}")
    return next(layout for layout in found.values() if layout is not None)


def plan_views(result: Node, shape: tuple[Any, ...], inside: set[Node], whole: bool, sources: Sequence[Node]) -> Plans:
    """What of a result is read from outside. `whole`: an op made the result, in the layout that it was asked for."""
    if whole and same_shape(value(result).shape, shape):
        return [(result, None)]
    plans: Plans = []
    for node in [result] if whole else reshapes_of(result):
        if all(user in inside for user in node.users):
            continue
        val = value(node)
        # Column-major scales whose rows are in other dimensions are views of each other, in the order of the rows.
        if not is_contiguous(val) and not (whole and same(val.shape[-1], shape[-1])):
            raise Unmatched(
                f"the quantisation's result {node} has strides {tuple(val.stride())}, and is not contiguous"
            )
        plans.append(_plan(node, shape, sources))
    return plans


def _plan(node: Node, shape: tuple[Any, ...], sources: Iterable[Node]) -> tuple[Node, tuple[Size, ...] | None]:
    wanted = value(node).shape
    return node, None if same_shape(wanted, shape) else sizes_of(wanted, *sources, before=node)


def put(result: Node, plans: Plans, inside: set[Node]) -> None:
    """Let what reads these nodes from outside read a result, in the views that it needs."""
    for node, sizes in plans:
        viewed = result
        if sizes is not None:
            val = aten.view.default(value(result), list(value(node).shape))
            with node.graph.inserting_before(node):
                viewed = view(node.graph, result, sizes, {**node.meta, "val": val})
        dtype = value(node).dtype
        if value(viewed).dtype != dtype:  # bytes that an engine hands on as another type
            with node.graph.inserting_before(node):
                val = aten.view.dtype(value(viewed), dtype)
                viewed = node.graph.call_function(aten.view.dtype, (viewed, dtype))
                viewed.meta = {**node.meta, "val": val}
        node.replace_all_uses_with(viewed, delete_user_cb=lambda user: user not in inside)


def why_not_as_planned(
    found: FoundQuant, result: Results, width: int, quant: ActivationQuant, target: Target
) -> str | None:
    """How a quantisation of a graph differs from what the plan says, or None."""
    if found.fixed != (None if quant.fixed is None or FORMATS[quant.fixed].is_plain else quant.fixed):
        return f"the graph quantises to {found.fixed or found.dtype}, the plan says {quant}"
    if found.fixed is not None:
        laid_out = {True: "in tiles of 128 x 4", False: "row by row"}
        if found.swizzled != quant.swizzled:
            return f"the graph has the scales {laid_out[found.swizzled]}, the plan {laid_out[quant.swizzled]}"
        return None
    if found.scale is not None and quant.fixed is None:
        return f"the scale {found.scale} is static: it does not come from the values, and the plan says {quant}"
    if found.scale is None and (quant.fixed is not None or found.columns != (quant.group_size or width)):
        graph = "with one scale per token" if found.columns == width else f"groups of {found.columns}"
        planned = quant.group_size or (str(quant) if quant.fixed else "one scale per token")
        return f"the graph quantises {graph}, the plan says {planned}"
    if str(found.dtype) != f"torch.float8_{target.fp8}":
        return f"the graph quantises to {found.dtype}, and {target} takes {target.fp8}"
    if found.scale is not None:
        return None
    if found.use_ue8m0 != quant.use_ue8m0:
        graph, planned = ("powers of two" if each else "not rounded" for each in (found.use_ue8m0, quant.use_ue8m0))
        return f"the graph's scales are {graph}, the plan's {planned}"
    planned_layout = Layout(quant.column_major, quant.tma_aligned)
    if not result.lies(planned_layout):
        return f"the graph has the scales {result.layout}, the plan {planned_layout}"
    return None
