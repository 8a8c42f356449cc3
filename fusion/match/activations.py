"""Reading what a gate passes through, backwards from the activated gate: silu or sigmoid, as one op or as arithmetic.

Conversions among floats may stand anywhere: they are roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from .values import value

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


def operands(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """The operands of a call of a commutative op, in both orders; none where the node is another call."""
    if isinstance(node, Node) and node.target is target:
        a, b = node.args[:2]
        yield a, b
        yield b, a


def read_activation(node: Any) -> tuple[str, Node] | None:
    """Which of silu and sigmoid it is, and the gate, before it was widened; None where the node is neither."""
    node = unrounded(node)
    if not isinstance(node, Node):
        return None
    if node.target is aten.silu.default:
        return "silu", narrow(node.args[0])
    gate = _logistic(node)
    if gate is not None:
        return "sigmoid", gate
    if node.target is aten.div.Tensor:
        gate = _denominator(node.args[1])
        return ("silu", gate) if gate is not None and _are_one(node.args[0], gate) else None
    for factor, other in operands(node, aten.mul.Tensor):
        gate = _logistic(other)
        if gate is not None and _are_one(factor, gate):
            return "silu", gate
    return None


def _logistic(node: Any) -> Node | None:
    """The x of sigmoid(x)."""
    node = unrounded(node)
    for factor, other in operands(node, aten.mul.Tensor):
        if factor == 1 and not isinstance(factor, Node):  # 1 / (...) is traced as reciprocal * 1
            node = unrounded(other)
    if not isinstance(node, Node):
        return None
    if node.target is aten.sigmoid.default:
        found: Node = narrow(node.args[0])
        return found
    return _denominator(node.args[0]) if node.target is aten.reciprocal.default else None


def _denominator(node: Any) -> Node | None:
    """The x of 1 + exp(-x)."""
    for factor, one in operands(unrounded(node), aten.add.Tensor):
        exp = unrounded(factor)
        if one == 1 and not isinstance(one, Node) and isinstance(exp, Node) and exp.target is aten.exp.default:
            neg = unrounded(exp.args[0])
            if isinstance(neg, Node) and neg.target is aten.neg.default:
                found: Node = narrow(neg.args[0])
                return found
    return None


def _are_one(a: Any, b: Any) -> bool:
    return unrounded(a) is unrounded(b)


def what_is(node: Any) -> str:
    """A node and the op that makes it, for a reason."""
    node = unrounded(node)
    if not isinstance(node, Node) or node.op != "call_function":
        return str(node)
    return f"{node} ({node.target})"


def between(out: Node, stops: set[Node]) -> list[Node]:
    """The calls that compute a node from others, itself included and those excluded."""
    found = [out]
    for node in found:
        found += [
            each
            for each in node.all_input_nodes
            if each not in stops and each.op == "call_function" and each not in found
        ]
    return found
