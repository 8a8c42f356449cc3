"""Finding the products of activations and linears' weights: what ops of layerfuse are given in their place.

Which ops of a graph are such products, tables of readers say: torch's own here, an engine's where its ops are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.fx import Node

from ..linear_ops import FEW_TOKEN_LINEAR, WIDEST
from .calls import Call, call_of, name_of_op
from .index import GraphIndex
from .values import value

aten = torch.ops.aten


@frozen(kw_only=True, eq=False)
class FoundLinear:
    """One product that ops of layerfuse can take."""

    out: Node
    "The product, row by row."
    ways: Mapping[str, Mapping[str, Any]] = field(repr=False)
    "Op -> its arguments by name: nodes, numbers, or views that are still to be made. One that is left out has its default."
    nodes: tuple[Node, ...]
    "All that computes it, and what may be unread then."


@frozen(kw_only=True, eq=False)
class Reader:
    """Reads the calls of one op as products."""

    op: str
    "Its qualified name, as `aten::mm`."
    gives: tuple[str, ...]
    "The ops of layerfuse that may take its place."
    read: Callable[[Call], FoundLinear | None]
    "None: none of them reads what it is given."


def products_in(index: GraphIndex, readers: Sequence[Reader]) -> Iterator[tuple[Node, list[Reader]]]:
    """The calls that readers read, in the graph's order."""
    by_op: dict[str, list[Reader]] = {}
    for reader in readers:
        by_op.setdefault(reader.op, []).append(reader)
    for node in index.calls(by_op):
        yield node, by_op[name_of_op(node) or ""]


def read(node: Node, readers: Sequence[Reader]) -> FoundLinear | None:
    """What the first of these readers says of a call."""
    call = call_of(node)
    return next(filter(None, (reader.read(call) for reader in readers)), None)


def is_parameter(node: Any) -> bool:
    """Whether a node is an input of the graph that has the same size for every number of tokens: others are activations."""
    if not isinstance(node, Node) or node.op not in ("placeholder", "get_attr"):
        return False
    val = value(node)
    return isinstance(val, Tensor) and all(type(size) is int for size in val.shape)


def turned(node: Any) -> Any:
    """What a node is the transpose of; None where it is none."""
    if not isinstance(node, Node):
        return None
    dims = [*node.args[1]] if node.target is aten.permute.default else [*node.args[1:]]
    wanted = {aten.t.default: ([],), aten.permute.default: ([1, 0],), aten.transpose.int: ([0, 1], [1, 0])}
    return node.args[0] if dims in wanted.get(node.target, ()) else None


# ---- torch's


def _mm(call: Call) -> FoundLinear | None:
    """aten::mm(self, mat2)."""
    return _plain(call, call[0], call[1], None)


def _addmm(call: Call) -> FoundLinear | None:
    """aten::addmm(self, mat1, mat2, beta, alpha)."""
    return _plain(call, call[1], call[2], call[0]) if call[3] == call[4] == 1 else None


def _plain(call: Call, x: Any, turned_weight: Any, bias: Any) -> FoundLinear | None:
    weight = turned(turned_weight)
    if not is_parameter(weight) or not (bias is None or is_parameter(bias)):
        return None
    rows, held, added = value(x), value(weight), value(bias)
    if not isinstance(rows, Tensor) or rows.dtype.itemsize != 2 or rows.dtype != held.dtype or held.dim() != 2:
        return None
    if rows.stride(-1) != 1 or held.stride(-1) != 1 or len(held) > WIDEST:
        return None
    if bias is not None and (added.dtype != held.dtype or added.shape != held.shape[:1] or added.stride(0) != 1):
        return None
    given = {"x": x, "weight": weight, "bias": bias, "steady": False}
    return FoundLinear(out=call.node, ways={FEW_TOKEN_LINEAR.name: given}, nodes=(call.node, turned_weight))


READERS = [
    Reader(op=op, gives=(FEW_TOKEN_LINEAR.name,), read=read_it)
    for op, read_it in (("aten::mm", _mm), ("aten::addmm", _addmm))
]
"""Of the products that torch has; an engine whose models `fusion.compile` compiles adds its own."""
