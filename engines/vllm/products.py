"""Block fp8 products behind a quantisation that vLLM's graphs show, by DeepGEMM or CUTLASS: few tokens are multiplied by layerfuse there too.

Both read values in e4m3 and float32 scales, CUTLASS of a weight that is turned. What is anything else is left as it is: other scales, such as
the exponents that DeepGEMM packs on Blackwell, a bias in the product, a weight that something writes to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...fusion.linear_ops import BLOCK_SCALED_LINEAR
from ...fusion.match.calls import Call
from ...fusion.match.linears import FoundLinear, Reader, turned
from ...fusion.match.values import same_shape, value
from ...fusion.ops.linear import BLOCK
from ..native import NotNativeError, native_function
from ..ops import define_op
from ..whose import module_of
from . import hooks, inside
from .readers import PRODUCT

_KERNELS = "vllm.model_executor.kernels.linear.scaled_mm"
DEEP_GEMM = hooks.DEEP_GEMM.module
"""vLLM's module that defines the op."""


def cutlass(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """CUTLASS's product, as vLLM calls it, of what `inside.deep_gemm` takes, in bfloat16."""
    out = values.new_empty((len(values), len(weight)), dtype=torch.bfloat16)
    torch.ops._C.cutlass_scaled_mm(out, values, weight.t(), scales, weight_scale.t(), None)
    return out


BEYOND_BY_CUTLASS = define_op(
    "layerfuse_vllm",
    "block_product_cutlass(Tensor values, Tensor scales, Tensor weight, Tensor weight_scale) -> Tensor",
    cutlass,
)


def _by_deep_gemm(call: Call) -> FoundLinear | None:
    """vllm::fp8_gemm_nt_op(q_input, input_scale, weight, weight_scale, output, use_deep_gemm_e8m0)."""
    if type(call[5]) is not bool:
        return None
    return _product(call, call[0], call[1], call[2], call[3], inside.BEYOND_BY_DEEP_GEMM[call[5]], call.results.get(4))


def _by_cutlass(call: Call) -> FoundLinear | None:
    """_C::cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias)."""
    if call[5] is not None:
        return None
    turned_back = turned(call[2]), turned(call[4])
    return _product(call, call[1], call[3], *turned_back, BEYOND_BY_CUTLASS, call.results.get(0))


def _product(
    call: Call, values: Any, scales: Any, weight: Any, weight_scale: Any, beyond: str, out: Node | None
) -> FoundLinear | None:
    """What layerfuse's kernel is given; None where it does not read all of it, or does not give what the call gives."""
    every, result = [value(each) for each in (values, scales, weight, weight_scale)], value(out)
    if call.parts or out is None or not all(isinstance(each, Tensor) and each.dim() == 2 for each in every):
        return None
    rows, of_rows, held, _ = every
    (tokens, depth), columns = rows.shape, held.shape[0]
    fits = (
        rows.dtype == torch.float8_e4m3fn
        and rows.stride(-1) == 1
        and held.shape[1] == depth
        and of_rows.dtype == torch.float32
        and same_shape(of_rows.shape, (tokens, -(-depth // BLOCK)))
        and inside.is_layerfuses(weight, weight_scale)
        and result.dtype == torch.bfloat16
        and same_shape(result.shape, (tokens, columns))
    )
    ways = inside.quantised_way(values, scales, weight, weight_scale, beyond)
    return FoundLinear(out=out, ways=ways, nodes=(*call.nodes, *call.buffers)) if fits else None


READERS = tuple(
    Reader(op=op, gives=(BLOCK_SCALED_LINEAR.name,), read=read)
    for op, read in (("vllm::fp8_gemm_nt_op", _by_deep_gemm), ("_C::cutlass_scaled_mm", _by_cutlass))
)


def why_not() -> str | None:
    """Why vLLM's products stay as they are, as a sentence; None where few tokens may be layerfuse's."""
    try:
        for name in ("_fp8_gemm_nt_op", "fp8_gemm_nt"):
            native_function(DEEP_GEMM, name)
    except NotNativeError as error:
        return str(error)
    except KeyError as error:
        return f"{DEEP_GEMM} has no {error}, or is not loaded"
    return None


def why_not_by(kernel: Any) -> str | None:
    """The same of the product of one of vLLM's kernels."""
    cls: Any = type(kernel)
    if cls.__module__ not in (DEEP_GEMM, f"{_KERNELS}.cutlass"):
        return f"no product of {cls.__qualname__} is known here"
    name = PRODUCT if hasattr(cls, PRODUCT) else "apply_scaled_mm"
    owner = module_of(getattr(cls, name))
    if owner != cls.__module__:
        return f"{name} of {cls.__qualname__} is from {owner}"
    return why_not() if name == PRODUCT else None
