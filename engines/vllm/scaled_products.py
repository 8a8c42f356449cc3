"""fp8 products with scales of whole rows in vLLM's graphs, by CUTLASS: few tokens are multiplied by layerfuse where that is asked for.

On Hopper vLLM takes CUTLASS for weights with a scale per channel or per tensor (kernels/linear/scaled_mm of 0.33; FlashInfer's kernel is for
Blackwell): compressed-tensors' w8a8, and fp8 with static or dynamic activations.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...fusion.linear_ops import LARGE, SCALED_LINEAR
from ...fusion.match.calls import Call
from ...fusion.match.linears import FoundLinear, Reader, is_parameter, turned
from ...fusion.match.values import is_contiguous, same_shape, value
from ...fusion.rewrite.layouts import Made


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


def _read(call: Call) -> FoundLinear | None:
    """What layerfuse's kernel is given; None where it does not read all of it, or does not give what the call gives."""
    before = turned(call[2])  # vLLM turns the weight once, when it is loaded, or in the graph
    parameters = [call[2] if before is None else before, *(each for each in (call[4], call[5]) if each is not None)]
    out = call.results.get(0)
    every = [value(call[place]) for place in (1, 2, 3, 4)]
    if call.parts or out is None or not all(map(is_parameter, parameters)):
        return None
    if not all(isinstance(each, Tensor) for each in every) or not every[0].dim() == every[1].dim() == 2:
        return None
    values, turned_weight, scales, weight_scale = every
    (tokens, depth), columns, bias, result = values.shape, turned_weight.shape[1], value(call[5]), value(out)
    fits = (
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
    if not fits:
        return None
    weight = Made(of=call[2], turned=True, val=turned_weight.permute(1, 0)) if before is None else before
    given = {
        "x": call[1], "x_scale": call[3], "weight": weight, "weight_scale": call[4], "bias": call[5], "out_dtype": result.dtype,
        "steady": True, "beyond": BEYOND[result.dtype],
    }  # fmt: skip
    return FoundLinear(out=out, ways={SCALED_LINEAR.name: given}, nodes=(*call.nodes, *call.buffers))


def _is_one(scales: Tensor) -> bool:
    return all(type(size) is int and size == 1 for size in scales.shape)


READERS = (Reader(op="_C::cutlass_scaled_mm", gives=(SCALED_LINEAR.name,), read=_read),)
"""(out, a, b, a_scales, b_scales, bias); b is (depth, columns), column by column."""
