"""Putting a padded norm where a graph pads it, and columns of it where the graph reads the norm without its padding.

The columns are no contiguous tensor: views of them are traced anew, and what needs the strides that it was traced with
reads a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node, map_arg

from ..match.pads import FoundPads
from ..match.quants import reshapes_of
from ..match.values import value
from .quant_results import plan_views, put

aten = torch.ops.aten


class PaddedResults:
    """How the readers of a norm and of its paddings read one padded tensor.

    Raises:
        Unmatched: a padding has a layout that no view of the new one has.
    """

    def __init__(self, found: FoundPads, normed: Node, sources: Sequence[Node]) -> None:
        """Plan it. `sources`: what of the graph has the norm's sizes. Nothing changes yet."""
        self._normed = normed
        self._nodes = [*found.nodes, *reshapes_of(normed)]
        shape = (*value(normed).shape[:-1], found.width)
        self._inside = {each for pad in found.pads for each in reshapes_of(pad)}
        self._plans = [plan for pad in found.pads for plan in plan_views(pad, shape, self._inside, False, sources)]

    def replace(self, padded: Node) -> list[Node]:
        """Let all readers read the padded tensor. Returns the nodes that may now be unread."""
        put(padded, self._plans, self._inside)
        unread = [*self._inside, *self._nodes]
        for node in sorted({*unread}, reverse=True):
            if not node.users and node is not self._normed:
                node.graph.erase_node(node)
        if self._normed.users:
            width = value(self._normed).shape[-1]
            with padded.graph.inserting_after(padded):
                columns = padded.graph.call_function(aten.slice.Tensor, (padded, -1, 0, width))
            columns.meta = {**self._normed.meta, "val": aten.slice.Tensor(value(padded), -1, 0, width)}
            self._normed.replace_all_uses_with(columns)
            _trace_views(columns)
        return [self._normed]


def _trace_views(node: Node) -> None:
    """Work out the strides of everything that is a view of a node whose strides have changed."""
    for user in list(node.users):
        if user.op == "output":
            user.replace_input_with(node, _copied(node))
        elif _is_view(user):
            try:
                args = map_arg(user.args, value)
                user.meta["val"] = user.target(*args, **map_arg(user.kwargs, value))
            except (RuntimeError, ValueError):
                user.replace_input_with(node, _copied(node))
            else:
                _trace_views(user)


def _is_view(node: Node) -> bool:
    target = node.target
    if target in (operator.getitem, aten.reshape.default, aten._unsafe_view.default):
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return any(each.alias_info is not None for each in target._schema.returns)


def _copied(node: Node) -> Node:
    kind = torch.contiguous_format
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,), {"memory_format": kind})
    copy.meta = {**node.meta, "val": aten.clone.default(value(node), memory_format=kind)}
    return copy
