"""Checks of dtypes in a graph that what was traced answers already.

`torch.export` leaves one behind every `.to(dtype)`. Each is one more reader of an intermediate that a fused op does not compute.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..match.calls import call_of
from ..match.values import value

_CHECK = torch.ops.aten._assert_tensor_metadata.default


def drop_answered_checks(graph: Graph) -> None:
    """Erase checks of a dtype, a device or a layout that holds as traced; those of sizes and strides stay."""
    for node in graph.find_nodes(op="call_function", target=_CHECK):
        if _holds(node):
            graph.erase_node(node)


def _holds(check: Node) -> bool:
    given = call_of(check).given
    traced = value(given["a"])
    if not isinstance(traced, torch.Tensor) or given["size"] is not None or given["stride"] is not None:
        return False
    found = {"dtype": traced.dtype, "device": traced.device, "layout": traced.layout}
    return all(given[name] in (None, held) for name, held in found.items())
