"""Scales that a graph lays out anew: column by column, with rows in between or without.

Transposing, copying into another layout, padding and cutting the padding off are followed, as long as the elements stay
those of the scales in the order of rows and groups.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..ops.quantisation import scale_strides, up_to_4
from .values import same, same_shape, value

aten = torch.ops.aten


class Layout(NamedTuple):
    """How scales lie in memory; see `ops.quantisation.scale_strides`."""

    column_major: bool = False
    tma_aligned: bool = False

    def __str__(self) -> str:
        if not self.column_major:
            return "row by row"
        return "column by column" + (", TMA-aligned" if self.tma_aligned else "")


ROWS, COLUMNS, ALIGNED = Layout(), Layout(True), Layout(True, True)
LAYOUTS = (ROWS, COLUMNS, ALIGNED)


ROUNDINGS = (up_to_4, lambda count: -(count // -4) * 4)
"""How graphs write the next multiple of 4: as we do, and as vLLM does. Nothing proves that they are the same."""


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """The layout that a traced tensor of scales has, the simplest of several; None where it has none of them."""
    return next((layout for layout in LAYOUTS if lies(tensor, layout)), None)


def lies(tensor: torch.Tensor, layout: Layout) -> bool:
    """Whether a traced tensor of scales lies like that, for every size it may have."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return any(_alike(shape, strides, scale_strides(shape, *layout, up)) for up in ROUNDINGS)


def lie_alike(shape: tuple[Any, ...], one: Layout, other: Layout) -> bool:
    """Whether two layouts of scales of a shape are the same, as for a single token."""
    return _alike(shape, scale_strides(shape, *one), scale_strides(shape, *other))


def _alike(shape: Any, one: Any, other: Any) -> bool:
    if any(same(size, 0) for size in shape):
        return True
    return all(same(size, 1) or same(a, b) for size, a, b in zip(shape, one, other, strict=True))


def laid_out(node: Node, view: Node, shape: tuple[Any, ...]) -> list[Node] | None:
    """The nodes from a reader of a view of the scales to the first that holds them in a layout of their own.

    Args:
        node: the reader.
        view: what it reads: the scales, row by row, in whatever shape.
        shape: (..., groups), that of the scales.

    Returns:
        The nodes, each read by the next only; None where they do anything else. The last one is of that shape, or has
        all rows in one dimension.
    """
    flat = (math.prod(shape[:-1]), shape[-1])
    return _laid_out(node, view, shape) or (None if same_shape(flat, shape) else _laid_out(node, view, flat))


def _laid_out(node: Node, view: Node, shape: tuple[Any, ...]) -> list[Node] | None:
    dims = _dims(value(view).shape, shape)
    padded, moved, chain = False, False, [view]
    while dims is not None:
        step = _step(node, chain[-1], dims, padded, shape)
        if step is None:
            return None
        dims, padded = step
        chain.append(node)
        moved = moved or node.target in _MOVES
        if moved and not padded and dims == [*range(len(shape))]:
            return chain[1:] if same_shape(value(node).shape, shape) else None
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))
    return None


def _dims(sizes: Any, shape: tuple[Any, ...]) -> list[int | None] | None:
    """Which dimension of the scales each dimension of a view is, None for further ones of size 1."""
    dims: list[int | None] = []
    left = [*range(len(shape))]
    for size in reversed(sizes):
        if left and same(size, shape[left[-1]]):
            dims.append(left.pop())
        elif same(size, 1):
            dims.append(None)
        else:
            return None
    return None if left else dims[::-1]


_MOVES = (aten.clone.default, aten.copy.default, aten.constant_pad_nd.default, aten.slice_scatter.default)


def _step(
    node: Node, before: Node, dims: list[int | None], padded: bool, shape: Any
) -> tuple[list[int | None], bool] | None:
    """Which dimension of the scales each dimension of a node is, and whether there are rows behind the last one."""
    target, rows = node.target, len(shape) - 2
    args: Any = node.args
    if rows < 0 or before not in args[:2]:
        return None
    if target is aten.permute.default:
        return [dims[i] for i in args[1]], padded
    if target is aten.clone.default or (target is aten.copy.default and args[1] is before):
        return dims, padded
    if target is aten.unsqueeze.default:
        at = args[1] % (len(dims) + 1)
        return [*dims[:at], None, *dims[at:]], padded
    if target is aten.squeeze.dim:
        left = [*dims]
        return (left, padded) if left.pop(args[1]) is None else None
    if target is aten.constant_pad_nd.default:
        behind = len(args[1]) == 2 and same(_size(args[1][0]), 0)
        return (dims, True) if behind and dims[-1] == rows else None
    if target is aten.slice_scatter.default and args[1] is before:
        return (dims, True) if _from_the_first(node, 2, dims, rows, shape) else None
    if target is aten.slice.Tensor and args[0] is before:
        return (dims, False) if padded and _from_the_first(node, 1, dims, rows, shape) else None
    return None


def _from_the_first(node: Node, position: int, dims: list[int | None], rows: int, shape: Any) -> bool:
    """Whether a slice is of all rows of the scales: `dim`, `start` and `end` lie at a position of the arguments."""
    given = node.args[position:]
    known: tuple[Any, ...] = (*given, *(0, None, None, 1)[len(given) :])
    dim, start, end, step = known
    if node.kwargs or step != 1 or start not in (0, None) or dims[dim] != rows:
        return False
    return same(_size(end), shape[rows])


def _size(given: Any) -> Any:
    return value(given) if isinstance(given, Node) else given
