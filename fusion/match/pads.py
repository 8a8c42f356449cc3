"""Finding columns of zeros behind a normed tensor, as kernels ask for that take only certain widths."""

from __future__ import annotations

import operator
from typing import Any

import torch
from attrs import frozen
from torch.fx import Node

from .errors import Unmatched
from .provenance import ROW_PRESERVING
from .quants import reshapes_of
from .values import last_width, same, value

aten = torch.ops.aten
_PADS = (aten.constant_pad_nd.default, aten.cat.default)
_ZEROS = {aten.zeros.default: 0.0, aten.new_zeros.default: 0.0, aten.zeros_like.default: 0.0}
_FULL = {aten.full.default: 1, aten.new_full.default: 2, aten.full_like.default: 1}


@frozen(kw_only=True, eq=False)
class FoundPads:
    """Every padding of one tensor: all to one width."""

    width: int
    pads: tuple[Node, ...]
    "The padded tensors, in whatever leading dimensions."
    nodes: tuple[Node, ...]
    "What computes them and may be unread without them."


def find_pads(normed: Node) -> FoundPads:
    """The paddings of a tensor.

    Raises:
        Unmatched: nothing pads it, or not with zeros behind its columns, or to several widths.
    """
    views, pads = _readers(normed)
    if not pads:
        raise Unmatched(f"nothing pads the normed tensor {normed}")
    nodes: list[Node] = [*pads]
    for pad in pads:
        nodes += _check_pad(pad) if pad.target is aten.constant_pad_nd.default else _check_cat(pad, views)
    widths = sorted({str(value(pad).shape[-1]) for pad in pads})
    padded = last_width(pads[0])
    if len(widths) > 1 or padded is None:
        raise Unmatched(f"the norm is padded to {' and to '.join(widths)} columns, and one width is needed")
    return FoundPads(width=padded, pads=tuple(pads), nodes=tuple(dict.fromkeys(nodes)))


def is_padded(normed: Node) -> bool:
    """Whether anything pads a tensor, with whatever and wherever; a tensor that is joined with others is not padded."""
    return any(
        pad.target is not aten.cat.default or any(_filled(part) is not None for part in _first(pad))
        for pad in _readers(normed)[1]
    )


def _readers(normed: Node) -> tuple[list[Node], list[Node]]:
    """A tensor in its leading dimensions, and what may pad it."""
    width = last_width(normed)
    views = [view for view in reshapes_of(normed) if width is not None and same(last_width(view), width)]
    return views, [user for view in views for user in view.users if user.target in _PADS and view in _first(user)]


def _first(pad: Node) -> list[Any]:
    """What a node pads: its first argument, or every tensor that is joined."""
    given: Any = pad.args[0]
    return [*given] if pad.target is aten.cat.default else [given]


def _check_pad(pad: Node) -> list[Node]:
    amounts: Any = pad.args[1]
    fill = (*pad.args[2:3], pad.kwargs.get("value", 0.0))[0]
    if not all(isinstance(amount, int) for amount in amounts):
        raise Unmatched(f"{pad} pads by a number that varies")
    if any(amount < 0 for amount in amounts):
        raise Unmatched(f"{pad} cuts columns or rows off")
    if any(amounts[i] for i in range(len(amounts)) if i != 1):
        raise Unmatched(f"{pad} pads in front of the columns, or rows")
    if fill != 0:
        raise Unmatched(f"{pad} pads with {fill}, and the fused op with zeros")
    return []


def _check_cat(pad: Node, views: list[Node]) -> list[Node]:
    parts = _first(pad)
    dim = pad.args[1] if len(pad.args) > 1 else pad.kwargs.get("dim", 0)
    if dim not in (-1, value(pad).dim() - 1):
        raise Unmatched(f"{pad} joins along dimension {dim}, not along the last")
    if parts[0] not in views or any(part in views for part in parts[1:]):
        raise Unmatched(f"{pad} has something in front of the normed tensor, or has it twice")
    other = next((part for part in parts[1:] if not _is_zero(part)), None)
    if other is not None:
        raise Unmatched(f"{pad} joins the normed tensor and {other}, which is not of zeros")
    return [part for part in parts[1:] if isinstance(part, Node)]


def _is_zero(node: Any) -> bool:
    node = _filled(node)
    return node is not None and (node.target in _ZEROS or operator.eq(node.args[_FULL[node.target]], 0))


def _filled(node: Any) -> Node | None:
    """What fills a tensor with one number."""
    while isinstance(node, Node) and node.target in ROW_PRESERVING | {aten.expand.default}:
        node = node.args[0]
    return node if isinstance(node, Node) and (node.target in _ZEROS or node.target in _FULL) else None
