"""Block fp8 products behind a quantisation that vLLM's graphs show, by DeepGEMM or CUTLASS: few tokens are multiplied by layerfuse there too.

Both read values in e4m3 and float32 scales, CUTLASS of a weight that is turned. What is anything else is left as it is: other scales, such as
the exponents that DeepGEMM packs on Blackwell, a bias in the product, a weight that something writes to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.fx import Graph, Node

from ...fusion.catalog.few_token_linear import BLOCKS
from ...fusion.match.calls import Call, call_of, name_of_op
from ...fusion.match.values import same_shape, value
from ...fusion.ops.linear import BLOCK
from ..linears import Linears
from ..native import NotNativeError, native_function
from ..whose import module_of
from . import inside
from .readers import PRODUCT

_KERNELS = "vllm.model_executor.kernels.linear.scaled_mm"
DEEP_GEMM = f"{_KERNELS}.deep_gemm"
"""vLLM's module that defines the op."""

aten = torch.ops.aten


def cutlass(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """CUTLASS's product, as vLLM calls it, of what `inside.multiply` takes, in bfloat16."""
    out = values.new_empty((len(values), len(weight)), dtype=torch.bfloat16)
    torch.ops._C.cutlass_scaled_mm(out, values, weight.t(), scales, weight_scale.t(), None)
    return out


_LIBRARY = torch.library.Library("layerfuse_vllm", "FRAGMENT")
_LIBRARY.define("block_product_cutlass(Tensor values, Tensor scales, Tensor weight, Tensor weight_scale) -> Tensor")
_LIBRARY.impl("block_product_cutlass", cutlass, "CompositeExplicitAutograd")


@frozen
class Product:
    """What one of vLLM's products is given, and the op that takes more tokens than few."""

    values: Any
    scales: Any
    weight: Any
    weight_scale: Any
    beyond: str
    out: int
    "Which of its arguments it writes."


def _by_deep_gemm(call: Call) -> Product | None:
    """vllm::fp8_gemm_nt_op(q_input, input_scale, weight, weight_scale, output, use_deep_gemm_e8m0)."""
    rounds = call[5]
    if type(rounds) is not bool:
        return None
    return Product(call[0], call[1], call[2], call[3], inside.BEYOND[rounds][0], 4)


def _by_cutlass(call: Call) -> Product | None:
    """_C::cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias)."""
    if call[5] is not None:
        return None
    return Product(call[1], call[3], turned(call[2]), turned(call[4]), "layerfuse_vllm::block_product_cutlass", 0)


READ: dict[str, Callable[[Call], Product | None]] = {
    "vllm::fp8_gemm_nt_op": _by_deep_gemm,
    "_C::cutlass_scaled_mm": _by_cutlass,
}


def turned(node: Any) -> Any:
    """What a node is the transpose of; None where it is none."""
    if not isinstance(node, Node):
        return None
    dims = [*node.args[1]] if node.target is aten.permute.default else [*node.args[1:]]
    wanted = {aten.t.default: ([],), aten.permute.default: ([1, 0],), aten.transpose.int: ([0, 1], [1, 0])}
    return node.args[0] if dims in wanted.get(node.target, ()) else None


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


def put_in(graph: Graph, linears: Linears) -> None:
    """Let few tokens be multiplied by layerfuse in a graph, in place, where its linears expect that."""
    for node in list(graph.nodes) if BLOCKS in linears.fusions else ():
        read = READ.get(name_of_op(node) or "")
        if read is not None:
            call = call_of(node)
            product = read(call)
            op = inside.BLOCK_LINEAR._opname if product is not None and _fits(call, product) else None
            if linears.replaces(call.node, BLOCKS, op) and product is not None:
                _replace(graph, call, product)


def _fits(call: Call, product: Product) -> bool:
    """Whether layerfuse's kernel reads all of it, and gives what it gives."""
    every = value(product.values), value(product.scales), value(product.weight), value(product.weight_scale)
    result = value(call.results.get(product.out))
    if call.parts or result is None or not all(isinstance(each, Tensor) and each.dim() == 2 for each in every):
        return False
    values, scales, weight, _ = every
    (tokens, depth), columns = values.shape, weight.shape[0]
    return (
        values.dtype == weight.dtype == torch.float8_e4m3fn
        and values.stride(-1) == 1
        and weight.shape[1] == depth
        and scales.dtype == torch.float32
        and same_shape(scales.shape, (tokens, -(-depth // BLOCK)))
        and inside.is_layerfuses(product.weight, product.weight_scale)
        and result.dtype == torch.bfloat16
        and same_shape(result.shape, (tokens, columns))
    )


def _replace(graph: Graph, call: Call, product: Product) -> None:
    given = product.values, product.scales, product.weight, product.weight_scale
    result = call.results[product.out]
    put_in_place(graph, call, result, inside.BLOCK_LINEAR, (*given, torch.bfloat16, True, product.beyond))


def put_in_place(graph: Graph, call: Call, result: Node, op: Any, given: tuple[Any, ...]) -> None:
    """Let an op give what a call gives as its only result."""
    with graph.inserting_before(call.node):
        node = graph.call_function(op, given)
    node.meta = dict(result.meta)
    result.replace_all_uses_with(node)
    for each in (*reversed(call.nodes), *call.buffers):
        if not each.users and not each._erased:
            graph.erase_node(each)
