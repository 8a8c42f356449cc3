"""A graph's calls by the op that they call: read once, and asked by everything that looks for ops of a table."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from .calls import name_of_op


class GraphIndex:
    """A graph as it was when it was read. What calls an aten op by itself the graph's own `find_nodes` tells."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._calls: dict[str, list[Node]] = {}
        for node in graph.nodes:
            name = name_of_op(node) if node.op == "call_function" else None
            if name is not None:
                self._calls.setdefault(name, []).append(node)

    def calls(self, names: Iterable[str]) -> list[Node]:
        """The calls of ops with these qualified names, in the graph's order, functionalised ones too."""
        return sorted(node for name in names for node in self._calls.get(name, ()))
