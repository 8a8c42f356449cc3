"""Lowering: a canonical norm or quantisation that no fusion took becomes plain arithmetic again.

Left as an opaque op it would stop Inductor from fusing around it. The arithmetic is that of the op's reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from .. import ops as _ops  # noqa: F401  (registers the ops)
from ..match.values import value
from ..ops.quantisation import LARGEST, SMALLEST_AMAX
from .identity import source_hash

aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default


class LowerCanonicalPass(CustomGraphPass):  # type: ignore[misc]
    """Runs last, after all fusions."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite every canonical op of the graph in place."""
        for op, lower in LOWERED.items():
            for node in graph.find_nodes(op="call_function", target=op):
                with graph.inserting_before(node):
                    lower(_Emitter(graph, node))

    def uuid(self) -> Any:
        """Changes with the source."""
        return f"{type(self).__name__}-{source_hash()}"


class _Emitter:
    """Writes nodes in the place of one, with its provenance."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph = graph
        self.node = node
        self.meta = {key: each for key, each in node.meta.items() if key not in ("val", "tensor_meta")}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Emit one call, and work out its value on fake tensors."""
        result = self.graph.call_function(target, args, kwargs)
        values = torch.fx.map_arg(args, value)
        with torch.no_grad():
            result.meta = {**self.meta, "val": target(*values, **kwargs)}
        return result

    def to(self, source: Node, wanted: torch.dtype) -> Node:
        """Emit a conversion where one is needed."""
        return source if value(source).dtype == wanted else self(_convert, source, wanted)

    def contiguous(self, source: Node) -> Node:
        """Emit a copy where the value is not contiguous."""
        if value(source).is_contiguous():
            return source
        return self(aten.clone.default, source, memory_format=torch.contiguous_format)

    def sizes(self, source: Node) -> list[Any]:
        """The sizes of a value: numbers, and nodes for those that vary."""
        shape = value(source).shape
        return [size if isinstance(size, int) else self(aten.sym_size.int, source, i) for i, size in enumerate(shape)]

    def replace(self, *results: Node) -> None:
        """Let the readers of the node read these: of the node itself, or of its parts where there are several."""
        if len(results) == 1:
            self.node.replace_all_uses_with(results[0])
        for user in list(self.node.users):
            user.replace_all_uses_with(results[user.args[1]])
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)


def _rms_norm(emit: _Emitter) -> None:
    x, weight, epsilon, weight_offset = emit.node.args
    if not isinstance(x, Node) or not isinstance(weight, Node):
        raise TypeError(f"{emit.node}: expected two tensors first, got {emit.node.args}")
    dtype = value(x).dtype
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    wide = emit.to(x, wide_dtype)
    mean = emit(aten.mean.dim, emit(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
    normed = emit(aten.mul.Tensor, wide, emit(aten.rsqrt.default, emit(aten.add.Tensor, mean, epsilon)))
    factor = emit.to(weight, wide_dtype)
    if weight_offset:
        factor = emit(aten.add.Tensor, factor, weight_offset)
    # The op promises a contiguous result; downstream views were traced on it.
    emit.replace(emit.contiguous(emit.to(emit(aten.mul.Tensor, normed, factor), dtype)))


def _quantise_per_token(emit: _Emitter) -> None:
    x, dtype, use_ue8m0 = emit.node.args
    _quantise(emit, x, dtype, None, False, use_ue8m0)


def _quantise_group(emit: _Emitter) -> None:
    x, dtype, group_size, column_major, tma_aligned, use_ue8m0 = emit.node.args
    if not tma_aligned:  # which no plain arithmetic can ask for: the op stays
        _quantise(emit, x, dtype, group_size, column_major, use_ue8m0)


def _quantise_static(emit: _Emitter) -> None:
    x, scale, dtype = emit.node.args
    if not isinstance(x, Node) or not isinstance(scale, Node) or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{emit.node}: expected rows, a scale and a dtype, got {emit.node.args}")
    largest = LARGEST[dtype]
    inverse = emit(aten.reshape.default, emit(aten.reciprocal.default, scale), [])
    scaled = emit(aten.mul.Tensor, emit.to(emit.contiguous(x), torch.float32), inverse)
    clamped = emit(aten.clamp_max.default, emit(aten.clamp_min.default, scaled, -largest), largest)
    emit.replace(emit(_convert, clamped, dtype))


def _quantise(emit: _Emitter, x: Any, dtype: Any, group_size: Any, column_major: Any, use_ue8m0: Any) -> None:
    width, leading = value(x).shape[-1], value(x).shape[:-1]
    columns = width if group_size is None else group_size
    if not isinstance(width, int) or width % columns or (column_major and len(leading) > 1):
        return  # a short last group, or rows in several dimensions laid out column by column: the op says it best
    largest, groups = LARGEST[dtype], width // columns
    sizes = emit.sizes(x)
    wide = emit(aten.reshape.default, emit.contiguous(emit.to(x, torch.float32)), [*sizes[:-1], groups, columns])
    amax = emit(aten.amax.default, emit(aten.abs.default, wide), [-1], True)
    scale = emit(aten.div.Tensor, emit(aten.clamp_min.default, amax, SMALLEST_AMAX), largest)
    if use_ue8m0:
        scale = _round_up_to_power_of_two(emit, scale)
    scaled = emit(aten.mul.Tensor, wide, emit(aten.reciprocal.default, scale))
    clamped = emit(aten.clamp_max.default, emit(aten.clamp_min.default, scaled, -largest), largest)
    scales = emit(aten.squeeze.dim, scale, -1)
    if column_major and len(leading) == 1:
        rows = emit(
            aten.clone.default, emit(aten.permute.default, scales, [1, 0]), memory_format=torch.contiguous_format
        )
        scales = emit(aten.permute.default, rows, [1, 0])
    emit.replace(emit(aten.reshape.default, emit(_convert, clamped, dtype), sizes), scales)


def _round_up_to_power_of_two(emit: _Emitter, scale: Node) -> Node:
    bits = emit(aten.add.Tensor, emit(aten.view.dtype, scale, torch.int32), 0x7FFFFF)
    rounded = emit(aten.view.dtype, emit(aten.bitwise_and.Scalar, bits, 0x7F800000), torch.float32)
    return emit(aten.where.self, emit(aten.isnan.default, scale), scale, rounded)


LOWERED: dict[Any, Callable[[_Emitter], None]] = {
    torch.ops.layerfuse.rms_norm.default: _rms_norm,
    torch.ops.layerfuse.quantise_per_token.default: _quantise_per_token,
    torch.ops.layerfuse.quantise_group.default: _quantise_group,
    torch.ops.layerfuse.quantise_static.default: _quantise_static,
}
"""The canonical ops, and what writes each as plain arithmetic."""
