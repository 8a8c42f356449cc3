"""Where a tensor comes from: which columns of which projection's output, and what that projection reads.

Splits, slices and views in between are followed; anything that computes is an origin of its own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from attrs import frozen
from torch.fx import Node

from .values import last_width, same, value

aten = torch.ops.aten

ROW_PRESERVING = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
}
"""Ops that keep the order of rows; they are followed where the last dimension stays as it is."""


def unshaped(node: Node) -> Node:
    """What is before all reshaping: the same elements in the same order."""
    while node.target in ROW_PRESERVING and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


PROJECTIONS: dict[Any, int] = {
    aten.mm.default: 0,
    aten.addmm.default: 1,
    aten.linear.default: 0,
    aten.bmm.default: 0,
    aten._scaled_mm.default: 0,
}
"""Matrix products, with the position of the activations among their arguments; an engine adds those of its own."""


@frozen(kw_only=True)
class Columns:
    """Columns `start` to `stop` of `root`, which is `width` wide."""

    root: Node
    start: int
    stop: int
    width: int

    def __str__(self) -> str:
        return f"columns {self.start}:{self.stop} of {self.root} ({self.width} wide)"


def columns_of(node: Node) -> Columns | None:
    """The origin of a tensor's last dimension, or None where that dimension is not static."""
    width = last_width(node)
    if width is None:
        return None
    start = 0
    while True:
        step = step_back(node)
        if step is None:
            break
        node, offset = step
        start += offset
    whole = last_width(node)
    return None if whole is None else Columns(root=node, start=start, stop=start + width, width=whole)


def source_of(projection: Node) -> Columns | None:
    """What a projection reads, or None where the node is no projection."""
    position = PROJECTIONS.get(projection.target)
    if projection.op != "call_function" or position is None or position >= len(projection.args):
        return None
    activations = projection.args[position]
    return columns_of(activations) if isinstance(activations, Node) else None


def step_back(node: Node) -> tuple[Node, int] | None:
    """One step towards the origin: the node before, and the columns skipped."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    before = node.args[0]
    if node.target is operator.getitem:
        return _split(before, node.args[1])
    if node.target is aten.slice.Tensor:
        return _slice(node, before)
    if _writes_its_input(node.target):
        return before, 0
    if node.target in ROW_PRESERVING and last_width(before) is not None and same(last_width(before), last_width(node)):
        return before, 0
    return None


def _writes_its_input(target: Any) -> bool:
    """Whether an op returns its first argument, written in place: the same memory, so the same columns."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or not target._schema.returns:
        return False
    argument, result = target._schema.arguments[0].alias_info, target._schema.returns[0].alias_info
    return argument is not None and result is not None and argument.is_write and result.is_write


def _split(split: Node, index: Any) -> tuple[Node, int] | None:
    if (
        split.target not in (aten.split_with_sizes.default, aten.split.Tensor)
        or not isinstance(index, int)
        or index < 0
    ):
        return None
    before, sizes = split.args[0], split.args[1]
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    if not isinstance(before, Node) or not _is_last(dim, before):
        return None
    if isinstance(sizes, int):
        return before, sizes * index
    # FX holds the sizes as a list; a symbolic one among them cannot be summed here.
    known = [size for size in sizes[:index] if isinstance(size, int)] if isinstance(sizes, list | tuple) else []
    return (before, sum(known)) if len(known) == index else None


def _slice(node: Node, before: Node) -> tuple[Node, int] | None:
    given = dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False)) | node.kwargs
    dim, start, step = given.get("dim", 0), given.get("start"), given.get("step", 1)
    width = last_width(before)
    if not _is_last(dim, before) or step != 1 or width is None:
        return None
    start = 0 if start is None else start
    if not isinstance(start, int):
        return None
    return before, min(max(start + width if start < 0 else start, 0), width)


def _is_last(dim: Any, tensor: Node) -> bool:
    val = value(tensor)
    return isinstance(val, torch.Tensor) and dim in (-1, val.dim() - 1)
