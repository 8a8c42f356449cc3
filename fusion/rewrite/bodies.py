"""Parts of a graph that are graphs themselves: the bodies of compile regions and of `torch.cond`, which are not rewritten.

One body may serve several layers, and tracing leaves the names of the first one's modules on it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from ..match.index import GraphIndex
from ..match.norms import find_norms


def bodies_with_norms(graph: Graph) -> tuple[str, ...]:
    """The higher-order ops of a graph whose bodies hold norms: `invoke_subgraph`, `cond`."""
    held = {} if graph.owning_module is None else dict(graph.owning_module.named_modules())
    found: dict[str, None] = {}
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            outer = [held.get(str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
            bodies = [body for module in outer if isinstance(module, GraphModule) for body in module.modules()]
            if any(any(find_norms(GraphIndex(body.graph))) for body in bodies if isinstance(body, GraphModule)):
                found[node.target.name()] = None
    return tuple(found)
