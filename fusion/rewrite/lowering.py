"""Lowering: a canonical norm or quantisation that no fusion took becomes plain arithmetic again.

Left as an opaque op it would stop Inductor from fusing around it. The arithmetic is that of the op's reference, traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .. import ops as _ops  # noqa: F401  (registers the ops)
from ..match.values import value
from ..ops.norm import accumulator
from ..ops.quantisation import LARGEST, SMALLEST_AMAX, round_up_to_power_of_two


def lower_canonical(graph: Graph) -> None:
    """Rewrite every canonical op of a graph in place. This comes last, after all fusions."""
    for op, plain in LOWERED.items():
        for node in graph.find_nodes(op="call_function", target=op):
            if plain is not _quantise_group or _has_plain_groups(*node.args):
                _replace(graph, node, plain)


def _replace(graph: Graph, node: Node, plain: Callable[..., Any]) -> None:
    """Put what a function does with the arguments of a node in its place, with the node's provenance."""
    sources = [arg for arg in node.args if isinstance(arg, Node)]

    def run(*given: Tensor) -> Any:
        tensors = iter(given)
        return plain(*(next(tensors) if isinstance(arg, Node) else arg for arg in node.args))

    with torch.no_grad():
        traced = make_fx(run, select_decomp_table())(*map(value, sources)).graph
    meta = {key: each for key, each in node.meta.items() if key not in ("val", "tensor_meta")}
    known = dict(zip(traced.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(traced, known)
    for each in known.keys() - set(sources):
        if each.op != "placeholder":
            known[each].meta = {**meta, "val": value(each)}
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Tensor:
    wide = x.to(accumulator(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    factor = weight.to(wide.dtype)
    # The op promises a contiguous result; downstream views were traced on it.
    return (normed * (factor + weight_offset if weight_offset else factor)).to(x.dtype).contiguous()


def _quantise_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = LARGEST[dtype]
    return (x.contiguous().float() * scale.reciprocal().reshape(())).clamp(-largest, largest).to(dtype)


def _quantise_per_token(x: Tensor, dtype: torch.dtype, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    return _quantise_group(x, dtype, x.shape[-1], False, False, use_ue8m0)


def _has_plain_groups(x: Any, _: Any, group_size: Any, column_major: Any, tma_aligned: Any, __: Any) -> bool:
    """Not with padded columns of scales, a short last group, or rows in several dimensions laid out column by column: the op says it best."""
    shape = value(x).shape
    several = column_major and len(shape) != 2
    return isinstance(shape[-1], int) and not (tma_aligned or shape[-1] % group_size or several)


def _quantise_group(
    x: Tensor, dtype: torch.dtype, group_size: int, column_major: bool, _: bool, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    largest = LARGEST[dtype]
    wide = x.float().contiguous().unflatten(-1, (-1, group_size))
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX) / largest
    if use_ue8m0:
        scale = round_up_to_power_of_two(scale)
    quantised = (wide * scale.reciprocal()).clamp(-largest, largest).flatten(-2).to(dtype)
    scales = scale.squeeze(-1)
    return quantised, scales.t().contiguous().t() if column_major else scales


LOWERED: dict[Any, Callable[..., Any]] = {
    torch.ops.layerfuse.rms_norm.default: _rms_norm,
    torch.ops.layerfuse.quantise_per_token.default: _quantise_per_token,
    torch.ops.layerfuse.quantise_group.default: _quantise_group,
    torch.ops.layerfuse.quantise_static.default: _quantise_static,
}
"""The canonical ops, and each as plain arithmetic."""
