"""fp8 products with scales of whole rows in vLLM's graphs, by CUTLASS: few tokens are multiplied by layerfuse where that is asked for.

On Hopper vLLM takes CUTLASS for weights with a scale per channel or per tensor (kernels/linear/scaled_mm of 0.33; FlashInfer's kernel is for
Blackwell): compressed-tensors' w8a8, and fp8 with static or dynamic activations.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...fusion.linear_ops import SCALED_LINEAR
from ...fusion.match.calls import Call
from ...fusion.match.linears import FoundLinear, Reader, is_parameter, scaled_product, turned
from ...fusion.match.values import value
from ...fusion.rewrite.layouts import Made
from ..ops import define_op


def _cutlass(
    dtype: torch.dtype, values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    out = values.new_empty((len(values), len(weight)), dtype=dtype)
    torch.ops._C.cutlass_scaled_mm(out, values, weight.t(), scales, weight_scale, bias)
    return out


_SCHEMA = "(Tensor values, Tensor scales, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor"
BEYOND = {
    dtype: define_op("layerfuse_vllm", f"scaled_product_{name}{_SCHEMA}", partial(_cutlass, dtype))
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"))
}
"""The op that takes more tokens than few, by the dtype of its result."""


def _read(call: Call) -> FoundLinear | None:
    """What layerfuse's kernel is given; None where it does not read all of it, or does not give what the call gives."""
    before = turned(call[2])  # vLLM turns the weight once, when it is loaded, or in the graph
    out, turned_weight = call.results.get(0), value(call[2])
    if call.parts or out is None or not is_parameter(call[2] if before is None else before):
        return None
    if not isinstance(turned_weight, Tensor) or turned_weight.dim() != 2:
        return None
    held = turned_weight.permute(1, 0)
    weight = Made(of=call[2], turned=True, val=held) if before is None else before
    beyond = BEYOND.get(value(out).dtype, "")
    ways = scaled_product(call[1], call[3], weight, held, call[4], call[5], out, steady=True, beyond=beyond)
    return None if ways is None else FoundLinear(out=out, ways=ways, nodes=(*call.nodes, *call.buffers))


READERS = (Reader(op="_C::cutlass_scaled_mm", gives=(SCALED_LINEAR.name,), read=_read),)
"""(out, a, b, a_scales, b_scales, bias); b is (depth, columns), column by column."""
