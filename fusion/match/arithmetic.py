"""Plain torch as graphs hold it: roundings, reshapes and products, and what is before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from .values import value

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ADDS = (aten.add.Tensor, aten.add.Scalar)
CLAMPS = (aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default)


def is_rounding(node: Node) -> bool:
    """Whether a node converts floats to floats."""
    return node.target is convert and node.args[1] in FLOATS and value(node.args[0]).dtype in FLOATS


def unrounded(node: Any) -> Any:
    """What is before all conversions among floats."""
    while isinstance(node, Node) and is_rounding(node):
        node = node.args[0]
    return node


def narrow(node: Any) -> Any:
    """What is before all widening: the same numbers."""
    while isinstance(node, Node) and is_rounding(node):
        before: Any = node.args[0]
        if value(before).dtype.itemsize >= value(node).dtype.itemsize:
            break
        node = before
    return node


def rounded_to(dtype: torch.dtype, node: Node) -> Node | None:
    """What has this dtype: a node itself, or its only reader where that rounds it; None where neither has."""
    if value(node).dtype == dtype:
        return node
    readers = [user for user in node.users if len(node.users) == 1 and is_rounding(user)]
    return readers[0] if readers and value(readers[0]).dtype == dtype else None


def operands(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """The operands of a call of a commutative op, in both orders; none where the node is another call."""
    if isinstance(node, Node) and node.target is target:
        a, b = node.args[:2]
        yield a, b
        yield b, a


def squared(node: Any) -> Any | None:
    """The x of x * x; None where the node is no square."""
    if not isinstance(node, Node) or node.target not in (aten.pow.Tensor_Scalar, aten.mul.Tensor):
        return None
    x, by = node.args
    is_square = by == 2 if node.target is aten.pow.Tensor_Scalar else unrounded(x) is unrounded(by)
    return x if is_square else None


def bounds_of(clamp: Node) -> tuple[Any, Any]:
    """The least and the largest value that one of `CLAMPS` leaves; None where it has no such bound."""
    if clamp.target is aten.clamp_max.default:
        return None, clamp.args[1]
    given = dict(zip(("min", "max"), clamp.args[1:], strict=False)) | clamp.kwargs
    return given.get("min"), given.get("max")


def between(out: Node, stops: set[Node]) -> tuple[Node, ...]:
    """The calls that compute a node from others, itself included as the last and those excluded."""
    found = [out]
    for node in found:
        found += [
            each
            for each in node.all_input_nodes
            if each not in stops and each.op == "call_function" and each not in found
        ]
    return tuple(reversed(found))


def what_is(node: Any) -> str:
    """A node and the op that makes it, for a reason."""
    node = unrounded(node)
    if not isinstance(node, Node) or node.op != "call_function":
        return str(node)
    return f"{node} ({node.target})"
