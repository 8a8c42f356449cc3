"""Lowering: a canonical `layerfuse::rms_norm` that no fusion took becomes plain arithmetic again.

Left as an opaque op it would stop Inductor from fusing around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from .. import ops as _ops  # noqa: F401  (registers the op)
from .base import source_hash

aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default


class LowerCanonicalPass(CustomGraphPass):  # type: ignore[misc]
    """Runs last, after every fusion had its chance."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite every canonical op of the graph in place."""
        for node in graph.find_nodes(op="call_function", target=torch.ops.layerfuse.rms_norm.default):
            node.replace_all_uses_with(_lower(graph, node))
            graph.erase_node(node)

    def uuid(self) -> Any:
        """Changes with the source."""
        return f"{type(self).__name__}-{source_hash()}"


def _lower(graph: Graph, node: Node) -> Node:
    x, weight, epsilon, weight_offset = node.args
    if not isinstance(x, Node) or not isinstance(weight, Node):
        raise TypeError(f"{node}: expected two tensors first, got {node.args}")
    dtype = x.meta["val"].dtype
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def emit(target: Any, *args: Any) -> Node:
        result = graph.call_function(target, args)
        result.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
        result.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
        return result

    def to(source: Node, wanted: torch.dtype) -> Node:
        return source if source.meta["val"].dtype == wanted else emit(_convert, source, wanted)

    with graph.inserting_before(node):
        wide = to(x, wide_dtype)
        mean = emit(aten.mean.dim, emit(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
        normed = emit(aten.mul.Tensor, wide, emit(aten.rsqrt.default, emit(aten.add.Tensor, mean, epsilon)))
        factor = to(weight, wide_dtype)
        if weight_offset:
            factor = emit(aten.add.Tensor, factor, weight_offset)
        scaled = to(emit(aten.mul.Tensor, normed, factor), dtype)
        # The op promises a contiguous result; downstream views were traced on it.
        if scaled.meta["val"].is_contiguous():
            return scaled
        clone = emit(aten.clone.default, scaled)
        clone.kwargs = {"memory_format": torch.contiguous_format}
        clone.meta["val"] = node.meta["val"]
        return clone
