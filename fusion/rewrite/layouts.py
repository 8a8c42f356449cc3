"""Inputs of a fused op in the shape that it takes, as views of what the graph has.

The copies that a graph makes to flatten a strided tensor are looked through. Nothing enters the graph before `emit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from attrs import frozen
from torch.fx import Graph, Node

from ..match.errors import Unmatched
from ..match.provenance import ROW_PRESERVING
from ..match.values import is_contiguous, same, same_shape, value

aten = torch.ops.aten
Size: TypeAlias = "int | Node | tuple[Node, int]"
"""A size of a view: a number, -1, a node that holds it, or that of a node's dimension."""


@frozen(kw_only=True, eq=False)
class Made:
    """A node that is made of others once every check has passed: columns of one, a view of those, and what is added to it."""

    of: Node
    val: torch.Tensor
    turned: bool = False
    "Whether the two dimensions of `of` are exchanged."
    columns: tuple[int, int] | None = None
    sizes: tuple[Size, ...] | None = None
    plus: tuple[Made, ...] = ()

    @property
    def needed(self) -> tuple[Node, ...]:
        """The nodes that it is made of."""
        sizes = (size[0] if isinstance(size, tuple) else size for size in self.sizes or ())
        return (
            self.of,
            *(size for size in sizes if isinstance(size, Node)),
            *(node for other in self.plus for node in other.needed),
        )

    def emit(self, graph: Graph, meta: dict[str, Any]) -> Node:
        """Make it where the graph inserts."""
        made = self.of
        if self.turned:
            made = graph.call_function(aten.permute.default, (made, [1, 0]))
            made.meta = {**meta, "val": self.val}
        if self.columns is not None:
            made = graph.call_function(aten.slice.Tensor, (made, value(made).dim() - 1, *self.columns))
            made.meta = {**meta, "val": aten.slice.Tensor(value(self.of), -1, *self.columns)}
        if self.sizes is not None:
            made = view(graph, made, self.sizes, {**meta, "val": self.val})
        for other in self.plus:
            made = graph.call_function(aten.add.Tensor, (made, other.emit(graph, meta)))
            made.meta = {**meta, "val": self.val}
        return made


def _known(graph: Graph, sizes: Sequence[Size], meta: dict[str, Any]) -> list[Any]:
    """Sizes as arguments of a call, put where the graph inserts."""
    known: list[Any] = []
    for size in sizes:
        if isinstance(size, tuple):
            node = graph.call_function(aten.sym_size.int, size)
            node.meta = {**meta, "val": value(size[0]).shape[size[1]]}
            known.append(node)
        else:
            known.append(size)
    return known


def view(graph: Graph, of: Node, sizes: Sequence[Size], meta: dict[str, Any]) -> Node:
    """A view with these sizes, put where the graph inserts."""
    made = graph.call_function(aten.view.default, (of, _known(graph, sizes, meta)))
    made.meta = meta
    return made


def lay_out(tensors: Sequence[Node], *tails: tuple[int, ...]) -> list[Node | Made]:
    """Tensors as views (..., *tail) with the same leading dimensions, whose last stride is 1; one tail for all, or one for each.

    Raises:
        Unmatched: no such views of all of them.
    """
    ends = tails * len(tensors) if len(tails) == 1 else tails
    chains = [list(sources_of(tensor)) for tensor in tensors]
    # What lies furthest back is wanted: a strided tensor before the copy that flattens it.
    depth = max(map(len, chains))
    both = list(zip(chains, ends, strict=True))
    for like, tail in [(chain[i], tail) for i in range(depth) for chain, tail in both if i < len(chain)]:
        leading = _leading(like, tail)
        if leading is not None:
            made = [next(filter(None, (_as(node, leading, end, like) for node in chain)), None) for chain, end in both]
            if None not in made:
                return [each for each in made if each is not None]
    shapes = " and ".join(f"{tensor} {tuple(value(tensor).shape)}" for tensor in tensors)
    wanted = " and ".join(f"(..., {', '.join(map(str, tail))})" for tail in tails)
    raise Unmatched(f"{shapes} have no views {wanted} of one shape with a last stride of 1")


def sizes_of(shape: Sequence[Any], *nodes: Node, before: Node | None = None) -> tuple[Size, ...]:
    """A shape as sizes of a view, with those that vary taken from nodes, or from what holds them in front of another.

    Raises:
        Unmatched: more than one varies and is no size of a node.
    """
    sizes: list[Size] = []
    for size in shape:
        known = ((node, i) for node in nodes for i, other in enumerate(value(node).shape) if same(size, other))
        sizes.append(size if isinstance(size, int) else next(known, -1))
    if sizes.count(-1) > 1 and before is not None:
        # Where rows were joined, what split them in the graph has their numbers.
        sizes = [_holder(before, size) if known == -1 else known for known, size in zip(sizes, shape, strict=True)]
    if sizes.count(-1) > 1:
        raise Unmatched(f"the shape {tuple(shape)} cannot be told from {', '.join(map(str, nodes))}")
    return tuple(sizes)


def _holder(before: Node, size: Any) -> Size:
    """The first node that holds a size, among those in front of one; -1 where there is none."""
    held = (node for node in before.graph.nodes if isinstance(value(node), torch.SymInt) and same(value(node), size))
    return next((node for node in held if node < before), -1)


def sources_of(node: Node) -> Iterator[Node]:
    """A tensor and those before it with the same elements in the same order, the furthest back first."""
    before = node.args[0] if node.target in ROW_PRESERVING else None
    if isinstance(before, Node) and not any(same(stride, 0) for stride in value(before).stride()):
        yield from sources_of(before)
    yield node


def _leading(node: Node, tail: tuple[int, ...]) -> tuple[Any, ...] | None:
    """The dimensions of a tensor before the tail, which may be joined."""
    shape = value(node).shape
    if same_shape(shape[-len(tail) :], tail):
        return tuple(shape[: -len(tail)])
    if same(shape[-1], math.prod(tail)):
        return tuple(shape[:-1])
    if len(shape) == 2 and same(shape[-1], tail[-1]):  # heads are rows
        rows, heads = shape[0], math.prod(tail[:-1])
        return (rows // heads,) if not isinstance(rows, int) or rows % heads == 0 else None
    return None


def _as(node: Node, leading: tuple[Any, ...], tail: tuple[int, ...], like: Node) -> Node | Made | None:
    """A tensor as a view of this shape; None where it has none."""
    val = value(node)
    shape = (*leading, *tail)
    joined = same_shape(val.shape, (*leading, math.prod(tail)))
    if not same(val.stride(-1), 1) and not same(val.shape[-1], 1):
        return None
    if same_shape(val.shape, shape):
        return node
    if not joined and not is_contiguous(val):
        return None
    strides = list(val.stride()[:-1]) if joined else []
    for i in range(len(strides), len(shape)):
        strides.append(math.prod(shape[i + 1 :]))
    try:
        return Made(of=node, val=val.as_strided(shape, strides), sizes=sizes_of(shape, node, like))
    except Unmatched:
        return None
