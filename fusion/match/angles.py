"""Where the cos and sin of a rope come from: a table and positions, or one row for each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .arithmetic import aten, is_rounding
from .errors import Unmatched
from .provenance import ROW_PRESERVING, columns_of
from .values import last_width, same, same_shape, value


class Angles(NamedTuple):
    """Where cos or sin come from: columns of a table by positions, or of what was computed for each token."""

    table: Node
    start: int
    positions: Node | None


def angles_of(factors: Iterable[tuple[Node | None, int]], half: int, shape: Any, order: tuple[int, ...]) -> Angles:
    """Where the factors of both halves of a head come from.

    Args:
        factors: of the first and of the second half: the node, and its column that the first column is multiplied with.
        half: columns of a half.
        shape: (..., heads, width) of what is turned.
        order: its dimensions as they lie where it is multiplied.

    Raises:
        Unmatched: they are not those of one angle per pair and token.
    """
    (factor, first), (other, second) = factors
    if factor is None or factor is not other:
        raise Unmatched(f"the halves of a head are multiplied by {factor} and by {other}")
    columns = columns_of(factor)
    if columns is None:
        raise Unmatched(f"the width of {factor} is not static")
    root, start = columns.root, columns.start + first
    if second == first + half:
        if columns.start or columns.width != 2 * half or not _repeats(root, half):
            raise Unmatched(
                f"nothing tells that both halves of {factor}, by which the halves of a head are multiplied, are the same"
            )
    elif second != first:
        raise Unmatched(f"the halves of a head are multiplied by other columns of {factor}")
    # As the norm's dimensions, the last one aside: one factor for all heads of a token.
    sizes = [1] * (len(shape) - value(factor).dim()) + list(value(factor).shape[:-1])
    own = [size for _, size in sorted(zip(order[:-1], sizes, strict=True), key=lambda pair: pair[0])]
    tokens, given = list(shape[:-2]), own[:-1]
    laid = [dim for dim in order if dim < len(tokens)]
    if laid != sorted(laid) and sum(not same(size, 1) for size in given) > 1:
        raise Unmatched(f"the tokens of {factor} lie in another order than those of the norm")
    while given and same(given[0], 1) and not same(tokens[0], 1):
        tokens, given = tokens[1:], given[1:]
    if not same(own[-1], 1) or not same_shape(given, tokens):
        raise Unmatched(
            f"{factor} {tuple(value(factor).shape)} has no angles of its own for each token of {tuple(shape[:-2])}"
        )
    found = _looked_up(root)
    if found is not None and len(tokens) == len(shape) - 2:
        return Angles(found[0], start, found[1])
    return Angles(root, start, None)


def _looked_up(root: Node) -> tuple[Node, Node] | None:
    """The table and the positions where a node is rows of a table."""
    args: Any = root.args
    if root.target is aten.index.Tensor:
        table, indices = args
    elif root.target is aten.index_select.default and args[1] == 0:
        table, indices = args[0], [args[2]]
    else:
        return None
    known = len(indices) == 1 and isinstance(indices[0], Node) and value(table).dim() == 2
    return (table, indices[0]) if known and value(indices[0]).dtype in (torch.int32, torch.int64) else None


_EACH_FOR_ITSELF = (aten.cos.default, aten.sin.default, aten.neg.default)


def _repeats(node: Node, half: int) -> bool:
    """Whether columns i and half + i of a tensor that is twice as wide are the same."""
    while node.op == "call_function":
        args: Any = node.args
        scaled = node.target is aten.mul.Tensor and isinstance(args[1], float | int)
        if scaled or node.target in _EACH_FOR_ITSELF or is_rounding(node):
            node = args[0]
        elif node.target is aten.cat.default:
            dim = args[1] if len(args) > 1 else node.kwargs.get("dim", 0)
            twice = len(args[0]) == 2 and args[0][0] is args[0][1] and last_width(node) == 2 * half
            return twice and dim in (-1, value(node).dim() - 1)
        elif node.target is aten.expand.default:  # (..., 1, half) to (..., 2, half), which a reshape joins
            source = value(args[0]).shape
            return len(source) > 1 and same(source[-2], 1) and same_shape(value(node).shape[-2:], (2, half))
        elif node.target in ROW_PRESERVING:
            node = args[0]
        else:
            return False
    return False
