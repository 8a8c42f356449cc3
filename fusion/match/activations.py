"""Reading what a gate passes through, backwards from the activated gate: silu or sigmoid, as one op or as arithmetic.

Conversions among floats may stand anywhere: they are roundings.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .arithmetic import aten, narrow, operands, unrounded


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
