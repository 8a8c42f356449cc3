"""Putting the results of a fused op where a graph has those of a quantisation, in whatever shape and layout it has them.

The elements are the same in the same order, so only views are needed, and they are planned before anything changes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.fx import Node

from ...adapters.activation_quant import ActivationQuant
from ..match.errors import Unmatched
from ..match.layouts import ROWS, Layout, laid_out, layout_of, lie_alike
from ..match.quant_forms import MX
from ..match.quants import FoundQuant, reshapes_of
from ..match.values import is_contiguous, same, same_shape, value
from ..target import Target

aten = torch.ops.aten
Size: TypeAlias = int | Node | tuple[str, int]
"""A size of a view: a number, -1, a node that holds it, or ("dim", i) for that of the result's dimension i."""
_Plan = list[tuple[Node, "list[Size] | None"]]


class Results:
    """The two results of one quantisation, and how those of a fused op take their place.

    Raises:
        Unmatched: a result has a shape or layout that no view of the new one has.
    """

    def __init__(self, site: FoundQuant, like: torch.Tensor) -> None:
        """Plan it, given the normed tensor's traced value. Nothing changes yet."""
        self._site = site
        self._inside = set(site.nodes)
        whole = site.layout is not None
        if not whole:
            self._inside.update(reshapes_of(site.values))
        self._anew: list[list[Node]] = []
        self._scales: _Plan = []
        self.layout = ROWS if site.layout is None else site.layout
        "How all that reads the scales has them."
        self.shape = (*like.shape[:-1], like.shape[-1] // site.columns)
        "Of the scales."
        if site.scales is not None:
            if not whole:
                self._inside.update(reshapes_of(site.scales))
                self._anew = _laid_out_anew(site.scales, self._inside, self.shape)
            if self._anew:
                self.layout = _common_layout(self._anew)
                # Their rows are in one dimension or in those of the norm: in order either way.
                self._scales = [_plan(chain[-1], self.shape) for chain in self._anew]
            else:
                self._scales = plan_views(site.scales, self.shape, self._inside, whole)
        width = like.shape[-1] // 2 if site.mx == "mxfp4" else like.shape[-1]
        self._values = plan_views(site.values, (*like.shape[:-1], width), self._inside, whole)

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
        for result, plans in ((values, self._values), (scales, self._scales)):
            for node, sizes in plans:
                viewed = result if sizes is None else view_of(result, sizes, node)
                node.replace_all_uses_with(viewed, delete_user_cb=self._is_reader)
        return unread

    def _is_reader(self, user: Node) -> bool:
        return user not in self._inside


def _laid_out_anew(scales: Node, inside: set[Node], shape: tuple[Any, ...]) -> list[list[Node]]:
    """The chains of nodes that lay the scales out anew, if that is all that is done with them; else none."""
    chains: list[list[Node]] = []
    for view in reshapes_of(scales):
        for user in view.users:
            if user in inside:
                continue
            chain = laid_out(user, view, shape)
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


def plan_views(result: Node, shape: tuple[Any, ...], inside: set[Node], whole: bool) -> _Plan:
    """The nodes of a result that are read from outside, each with the sizes of the view it needs (None: none).

    `whole`: an op made the result, in the layout that it was asked for.
    """
    if whole and same_shape(value(result).shape, shape):
        return [(result, None)]
    plans: _Plan = []
    for node in [result] if whole else reshapes_of(result):
        if all(user in inside for user in node.users):
            continue
        val = value(node)
        # Column-major scales whose rows are in other dimensions are views of each other, in the order of the rows.
        if not is_contiguous(val) and not (whole and same(val.shape[-1], shape[-1])):
            raise Unmatched(
                f"the quantisation's result {node} has strides {tuple(val.stride())}, and is not contiguous"
            )
        plans.append(_plan(node, shape))
    return plans


def _plan(node: Node, shape: tuple[Any, ...]) -> tuple[Node, list[Size] | None]:
    wanted = value(node).shape
    return node, None if same_shape(wanted, shape) else _sizes(node, wanted, shape)


def _sizes(node: Node, wanted: Any, given: tuple[Any, ...]) -> list[Size]:
    sizes: list[Size] = []
    for i, size in enumerate(wanted):
        if isinstance(size, int):
            sizes.append(size)
        elif i < len(given) and same(size, given[i]):
            sizes.append(("dim", i))
        else:
            sizes.append(-1)
    if sizes.count(-1) > 1:
        # Where rows were joined, what split them in the graph has their numbers.
        sizes = [_holder(node, wanted[i]) if size == -1 else size for i, size in enumerate(sizes)]
    if sizes.count(-1) > 1:
        raise Unmatched(
            f"the quantisation's result {node} has a shape {tuple(wanted)} that cannot be told from {given}"
        )
    return sizes


def _holder(before: Node, size: Any) -> Size:
    """The first node that holds a size, among those in front of one; -1 where there is none."""
    for node in before.graph.nodes:
        if node is before:
            break
        if isinstance(value(node), torch.SymInt) and same(value(node), size):
            return node
    return -1


def view_of(result: Node, sizes: list[Size], at: Node) -> Node:
    """A view of a result with these sizes, behind the node whose place it takes."""
    graph = at.graph
    with graph.inserting_after(at):
        view = graph.call_function(aten.view.default, (result, []))
    with graph.inserting_before(view):
        known: list[Any] = []
        for size in sizes:
            if isinstance(size, tuple):
                node = graph.call_function(aten.sym_size.int, (result, size[1]))
                node.meta["val"] = value(result).shape[size[1]]
                known.append(node)
            else:
                known.append(size)
    view.args = (result, known)
    view.meta = {**at.meta, "val": aten.view.default(value(result), list(value(at).shape))}
    return view


def why_not_as_planned(
    found: FoundQuant, result: Results, width: int, quant: ActivationQuant, target: Target
) -> str | None:
    """How a quantisation of a graph differs from what the plan says, or None."""
    if found.mx != (quant.fixed if quant.fixed in MX else None):
        return f"the graph quantises to {found.mx or found.dtype}, the plan says {quant}"
    if found.mx is not None:
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
