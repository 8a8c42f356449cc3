"""Putting the results of a fused op where a graph has those of a quantisation, in whatever shape and layout it has them.

The elements are the same in the same order, so only views are needed, and they are planned before anything changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...adapters.activation_quant import ActivationQuant
from ..match.errors import Unmatched
from ..match.quants import FoundQuant, reshapes_of
from ..match.values import is_contiguous, same, same_shape, value
from ..ops.quantisation import scale_strides
from ..target import Target

aten = torch.ops.aten
Size = int | tuple[str, int]
"""A size of a view: a number, -1, or ("dim", i) for that of the result's dimension i."""
_Plan = list[tuple[Node, "list[Size] | None"]]


class Results:
    """The two results of one quantisation, and how those of a fused op take their place.

    Raises:
        Unmatched: a result has a shape or layout that no view of the new one has.
    """

    def __init__(self, site: FoundQuant, like: torch.Tensor) -> None:
        """Plan it, given the normed tensor's traced value. Nothing changes yet."""
        leading = tuple(like.shape[:-1])
        self._inside = set(site.nodes)
        if site.column_major is None:
            self._inside.update(reshapes_of(site.values), reshapes_of(site.scales))
        self._columns = _columns(site, self._inside, leading)
        self.column_major = bool(self._columns) if site.column_major is None else site.column_major
        "Whether all that reads the scales has them column by column."
        whole = site.column_major is not None
        self._values = _plan_views(site.values, tuple(like.shape), self._inside, whole)
        shape = (*leading, like.shape[-1] // site.columns)
        self.in_either_layout = _lie_alike(shape)
        "Whether row by row and column by column are the same, as for a single token."
        self._scales = [] if self._columns else _plan_views(site.scales, shape, self._inside, whole)

    def replace(self, values: Node, scales: Node) -> list[Node]:
        """Let all readers read these instead. Returns the nodes that may now be unread."""
        unread = [*self._inside]
        for chain in self._columns:
            chain[-1].replace_all_uses_with(scales)
            unread += chain
        for result, plans in ((values, self._values), (scales, self._scales)):
            for node, sizes in plans:
                viewed = result if sizes is None else _view(result, sizes, node)
                node.replace_all_uses_with(viewed, delete_user_cb=self._is_reader)
        return unread

    def _is_reader(self, user: Node) -> bool:
        return user not in self._inside


def _columns(site: FoundQuant, inside: set[Node], leading: tuple[Any, ...]) -> list[list[Node]]:
    """The chains of nodes that lay the scales out column by column, if that is all that is done with them; else none."""
    if site.column_major is not None:
        return []
    chains: list[list[Node]] = []
    for user in (user for view in reshapes_of(site.scales) for user in view.users if user not in inside):
        chain = _transposed(user)
        if chain is None:
            return []
        chains.append(chain)
    for *_, last in chains:
        val = value(last)
        shape = (*leading, val.shape[-1])
        if not same_shape(val.shape, shape) or not _same_strides(val, scale_strides(shape, True)):
            raise Unmatched(
                f"the scales {last} have strides {tuple(val.stride())}, neither row by row nor column by column"
            )
    return chains


def _transposed(node: Node) -> list[Node] | None:
    """Transpose, copy, transpose: the way to lay a tensor out column by column. None for anything else."""
    chain: list[Node] = []
    for target in (aten.permute.default, aten.clone.default, aten.permute.default):
        if chain:
            if len(chain[-1].users) != 1:
                return None
            node = next(iter(chain[-1].users))
        if node.target is not target or (target is aten.permute.default and not _swaps_the_last_two(node)):
            return None
        chain.append(node)
    return chain


def _swaps_the_last_two(node: Node) -> bool:
    order = list(node.args[1])
    count = len(order)
    return [i % count for i in order] == [*range(count - 2), count - 1, count - 2] if count > 1 else False


def _lie_alike(shape: tuple[Any, ...]) -> bool:
    if any(same(size, 0) for size in shape):
        return True
    rows, columns = (scale_strides(shape, column_major) for column_major in (False, True))
    return all(same(size, 1) or same(a, b) for size, a, b in zip(shape, rows, columns, strict=True))


def _same_strides(tensor: torch.Tensor, strides: tuple[Any, ...]) -> bool:
    return all(
        same(size, 1) or same(stride, wanted)
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def _plan_views(result: Node, shape: tuple[Any, ...], inside: set[Node], whole: bool) -> _Plan:
    """The nodes of a result that are read from outside, each with the sizes of the view it needs (None: none).

    `whole`: an op made the result, in the layout that it was asked for.
    """
    if whole and same_shape(value(result).shape, shape):
        return [(result, None)]
    plans: _Plan = []
    for node in reshapes_of(result):
        if all(user in inside for user in node.users):
            continue
        val = value(node)
        if not is_contiguous(val):
            raise Unmatched(
                f"the quantisation's result {node} has strides {tuple(val.stride())}, and is not contiguous"
            )
        plans.append((node, None if same_shape(val.shape, shape) else _sizes(node, val.shape, shape)))
    return plans


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
        raise Unmatched(
            f"the quantisation's result {node} has a shape {tuple(wanted)} that cannot be told from {given}"
        )
    return sizes


def _view(result: Node, sizes: list[Size], at: Node) -> Node:
    graph = at.graph
    with graph.inserting_after(at):
        view = graph.call_function(aten.view.default, (result, []))
    with graph.inserting_before(view):
        known: list[Any] = []
        for size in sizes:
            if isinstance(size, int):
                known.append(size)
            else:
                node = graph.call_function(aten.sym_size.int, (result, size[1]))
                node.meta["val"] = value(result).shape[size[1]]
                known.append(node)
    view.args = (result, known)
    view.meta = {**at.meta, "val": aten.view.default(value(result), list(value(at).shape))}
    return view


def why_not_as_planned(
    found: FoundQuant, result: Results, width: int, quant: ActivationQuant, target: Target
) -> str | None:
    """How a quantisation of a graph differs from what the plan says, or None."""
    if found.columns != (width if quant.group_size is None else quant.group_size):
        graph = "with one scale per token" if found.columns == width else f"groups of {found.columns}"
        return f"the graph quantises {graph}, the plan says {quant.group_size or 'one scale per token'}"
    if str(found.dtype) != f"torch.float8_{target.fp8}":
        return f"the graph quantises to {found.dtype}, and {target} takes {target.fp8}"
    if found.use_ue8m0 != quant.use_ue8m0:
        graph, planned = ("powers of two" if each else "not rounded" for each in (found.use_ue8m0, quant.use_ue8m0))
        return f"the graph's scales are {graph}, the plan's {planned}"
    if result.column_major != quant.column_major and not result.in_either_layout:
        graph, planned = ("column" if each else "row" for each in (result.column_major, quant.column_major))
        return f"the graph has the scales {graph} by {graph}, the plan {planned} by {planned}"
    return None
