"""fp8 products with scales of whole rows in vLLM's graphs, by CUTLASS: few tokens are multiplied by layerfuse where that is asked for.

On Hopper vLLM takes CUTLASS for weights with a scale per channel or per tensor (kernels/linear/scaled_mm of 0.33; FlashInfer's kernel is for
Blackwell): compressed-tensors' w8a8, and fp8 with static or dynamic activations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...fusion.catalog.few_token_linear import ROWS
from ...fusion.linear_ops import LARGE
from ...fusion.match.calls import Call, call_of, name_of_op
from ...fusion.match.values import is_contiguous, same_shape, value
from ..linears import Linears
from .products import put_in_place, turned

aten = torch.ops.aten
CUTLASS = "_C::cutlass_scaled_mm"
"""(out, a, b, a_scales, b_scales, bias); b is (depth, columns), column by column."""
LINEAR = torch.ops.layerfuse.scaled_linear.default


def _cutlass(
    dtype: torch.dtype, values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    out = values.new_empty((len(values), len(weight)), dtype=dtype)
    torch.ops._C.cutlass_scaled_mm(out, values, weight.t(), scales, weight_scale, bias)
    return out


_LIBRARY = torch.library.Library("layerfuse_vllm", "FRAGMENT")
BEYOND: dict[torch.dtype, str] = {}
"""The op that takes more tokens than few, by the dtype of its result."""
for _dtype, _name in ((torch.bfloat16, "scaled_product_bfloat16"), (torch.float16, "scaled_product_float16")):
    _LIBRARY.define(
        f"{_name}(Tensor values, Tensor scales, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor"
    )
    _LIBRARY.impl(_name, partial(_cutlass, _dtype), "CompositeExplicitAutograd")
    BEYOND[_dtype] = f"layerfuse_vllm::{_name}"


def put_in(graph: Graph, linears: Linears) -> None:
    """Let few tokens be multiplied by layerfuse where linears expect that, in place. Products with scales of blocks, and by what is written to, stay."""
    for node in list(graph.nodes) if ROWS in linears.fusions else ():
        if name_of_op(node) == CUTLASS:
            call = call_of(node)
            if linears.replaces(node, ROWS, LINEAR._opname if _fits(call) else None):
                _replace(graph, call)


def _fits(call: Call) -> bool:
    """Whether layerfuse's kernel reads all of it, and gives what it gives."""
    parameters = [each for each in (_held(call[2]), call[4], call[5]) if each is not None]
    if not all(isinstance(each, Node) and each.op in ("placeholder", "get_attr") for each in parameters):
        return False
    values, turned_weight, scales, weight_scale = (value(call[place]) for place in (1, 2, 3, 4))
    every, result = (values, turned_weight, scales, weight_scale), value(call.results.get(0))
    if call.parts or not all(isinstance(each, Tensor) for each in (*every, result)):
        return False
    # One of so many tokens is another activation.
    if not all(type(size) is int for each in parameters for size in value(each).shape):
        return False
    if values.dim() != 2 or turned_weight.dim() != 2:
        return False
    (tokens, depth), columns, bias = values.shape, turned_weight.shape[1], value(call[5])
    return (
        depth * columns < LARGE
        and values.dtype == turned_weight.dtype == torch.float8_e4m3fn
        and turned_weight.shape[0] == depth
        and values.stride(1) == turned_weight.stride(0) == 1
        and (_is_one(scales) or same_shape(scales.shape, (tokens, 1)))
        and (_is_one(weight_scale) or tuple(weight_scale.shape) in ((columns,), (columns, 1), (1, columns)))
        and scales.dtype == weight_scale.dtype == torch.float32
        and is_contiguous(weight_scale)
        and result.dtype in BEYOND
        and same_shape(result.shape, (tokens, columns))
        and (bias is None or (bias.dtype == result.dtype and tuple(bias.shape) == (columns,) and bias.stride(0) == 1))
    )


def _held(weight: Any) -> Any:
    """The parameter that a turned weight is: vLLM turns it once, when it is loaded, or in the graph."""
    before = turned(weight)
    return weight if before is None else before


def _is_one(scales: Tensor) -> bool:
    return all(type(size) is int and size == 1 for size in scales.shape)


def _replace(graph: Graph, call: Call) -> None:
    weight = turned(call[2])
    if weight is None:
        with graph.inserting_before(call.node), torch.no_grad():
            weight = graph.call_function(aten.permute.default, (call[2], [1, 0]))
            weight.meta["val"] = value(call[2]).permute(1, 0)
    dtype = value(call.results[0]).dtype
    given = call[1], call[3], weight, call[4], call[5], dtype, True, BEYOND[dtype]
    put_in_place(graph, call, call.results[0], LINEAR, given)
