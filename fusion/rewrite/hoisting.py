"""Moving what one node needs ahead of another node, where that is safe.

A fused op runs where the first of its parts ran, so the inputs of the later part must be computed by then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._inductor.pattern_matcher import is_mutation_op
from torch.fx import Node

from ..match.errors import Unmatched


def hoist(needed: Iterable[Node], before: Node) -> str | None:
    """Move `needed` and their ancestors ahead of `before`, keeping their order.

    Only pure nodes move, and never past a node that writes in place.

    Returns:
        None when done, or the reason why not as a sentence; then nothing has moved.
    """
    moving: set[Node] = set()
    stack = [node for node in needed if before < node or node is before]
    while stack:
        node = stack.pop()
        if node is before:
            return f"the second norm's input depends on the first norm's result ({before})"
        if node in moving:
            continue
        # is_impure covers in-place and random ops.
        if node.op != "call_function" or node.is_impure():
            return f"{node}, which one of the inputs needs, is random or has side effects and cannot be moved"
        moving.add(node)
        stack += [source for source in node.all_input_nodes if before < source or source is before]
    for node in sorted(moving):
        before.prepend(node)
    return None


def check_writes(first: Node, last: Node) -> None:
    """Check that one op may stand for two nodes and all between them.

    Raises:
        Unmatched: something there writes in place, before or after what the op would read.
    """
    writer = mutation_between(first, last)
    if writer is not None:
        raise Unmatched(f"{writer} writes in place between {first} and {last}, which would become one op")


def mutation_between(first: Node, last: Node) -> Node | None:
    """The first node that writes in place strictly between two nodes of one graph, or None."""
    node = last if first is last else first.next
    while node is not last and node.op != "root":
        if node.op == "call_function" and isinstance(
            node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator
        ):
            if is_mutation_op(node):
                return node
        elif node.op == "call_method" and is_mutation_op(node):
            return node
        node = node.next
    return None
