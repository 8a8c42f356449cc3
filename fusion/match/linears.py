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

from ..linear_ops import FEW_TOKEN_LINEAR, LARGE, SCALED_LINEAR, WIDEST
from ..ops.linear import SCALED_MM
from .calls import Call, call_of, name_of_op
from .index import GraphIndex
from .values import is_contiguous, same_shape, value

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


def scaled_product(
    x: Any, x_scale: Any, weight: Any, weight_val: Any, weight_scale: Any, bias: Any, out: Any, **others: Any
) -> dict[str, dict[str, Any]] | None:
    """As `FoundLinear.ways`, of fp8 activations and weights with scales of whole rows; None where the kernel does not read all of it.

    Args:
        x: the node of (tokens, depth).
        x_scale: that of (tokens, 1), or one number.
        weight: what is or becomes (columns, depth).
        weight_val: the same as a traced tensor.
        weight_scale: a parameter, one number for each column of the product, or one.
        bias: a parameter, or None.
        out: the node of the product.
        others: arguments of the op.
    """
    every = [value(x), value(x_scale), weight_val, value(weight_scale)]
    if not all(isinstance(each, Tensor) for each in every) or not every[0].dim() == every[2].dim() == 2:
        return None
    if not all(map(is_parameter, (weight_scale, bias)[: 1 if bias is None else 2])):
        return None
    values, scales, held, of_columns = every
    (tokens, depth), columns, added, result = values.shape, held.shape[0], value(bias), value(out)
    fits = (
        depth * columns < LARGE
        and values.dtype == held.dtype == torch.float8_e4m3fn
        and held.shape[1] == depth
        and values.stride(1) == held.stride(1) == 1
        and (_is_one(scales) or same_shape(scales.shape, (tokens, 1)))
        and (_is_one(of_columns) or tuple(of_columns.shape) in ((columns,), (columns, 1), (1, columns)))
        and scales.dtype == of_columns.dtype == torch.float32
        and is_contiguous(of_columns)
        and result.dtype in (torch.bfloat16, torch.float16)
        and same_shape(result.shape, (tokens, columns))
        and (
            bias is None or (added.dtype == result.dtype and tuple(added.shape) == (columns,) and added.stride(0) == 1)
        )
    )
    given = {
        "x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale, "bias": bias, "out_dtype": result.dtype, **others,
    }  # fmt: skip
    return {SCALED_LINEAR.name: given} if fits else None


def _is_one(scales: Tensor) -> bool:
    return all(type(size) is int and size == 1 for size in scales.shape)


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


def _scaled_mm(call: Call) -> FoundLinear | None:
    """aten::_scaled_mm(self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum), as torchao calls it."""
    x, turned_weight, x_scale, weight_scale, bias, of_result, _, fast = (call[place] for place in range(8))
    weight = turned(turned_weight)
    before = turned(weight_scale)  # torchao turns its tensor, and with it both
    scales = weight_scale if before is None else before
    if of_result is not None or not is_parameter(weight):
        return None
    beyond = SCALED_MM.get((value(call.node).dtype, fast), "")
    ways = scaled_product(x, x_scale, weight, value(weight), scales, bias, call.node, steady=False, beyond=beyond)
    return (
        None if ways is None else FoundLinear(out=call.node, ways=ways, nodes=(call.node, turned_weight, weight_scale))
    )


READERS = [
    Reader(op="aten::_scaled_mm", gives=(SCALED_LINEAR.name,), read=_scaled_mm),
    Reader(op="aten::mm", gives=(FEW_TOKEN_LINEAR.name,), read=_mm),
    Reader(op="aten::addmm", gives=(FEW_TOKEN_LINEAR.name,), read=_addmm),
]
"""Of the products that torch has; an engine whose models `fusion.compile` compiles adds its own."""
