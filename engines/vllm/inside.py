"""Block fp8 linears that quantise inside of their op: the quantisation is taken out for as long as fusions look for theirs.

Where FlashInfer is, vLLM on Hopper multiplies by one op that takes bfloat16 (kernels/linear/scaled_mm/flashinfer.py of 0.26 and 0.33): by
FlashInfer's kernel below 32 tokens, else by a quantisation and DeepGEMM. What a fused op has quantised goes to the same two, as both take
it, or, with few tokens, to a kernel of layerfuse's (`fusion.ops.linear` says up to how many, and of which weights): such a product waits for
its weights, and that kernel waits less (bench/results/few_token_gemm-nvidia-h100.json). Where no fusion has taken a quantisation it is put
back, and few tokens go to a kernel that quantises inside as FlashInfer does.

Both read values in e4m3 and float32 scales that lie column by column, each column from 16 bytes on. vLLM's default rounds scales to
powers of two in front of it, and FlashInfer does not round them. What is taken out rounds for any number of tokens, as vLLM does where it
multiplies by DeepGEMM alone: models are trained with such scales (DeepSeek-V3.1), and one that is not loses no more than it does with 32
tokens.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...adapters.errors import FOREIGN
from ...fusion.linear_ops import BLOCK_SCALED_LINEAR, GROUP_QUANT_LINEAR, LARGE_BLOCKS
from ...fusion.match.calls import Call
from ...fusion.match.linears import FoundLinear, Reader
from ...fusion.match.values import value
from ...fusion.ops.linear import scales_shape
from ..native import NotNativeError, native_function
from ..ops import define_op
from ..placement import is_looked_at
from .hooks import INSIDE

KERNELS = INSIDE.module
"""vLLM's module that defines the op."""
NAME = "dynamic_flashinfer_deepgemm_blockscale_gemm"
ARGUMENTS = INSIDE.takes
GROUP = 128


FLASHINFER_BELOW = 32
"""Tokens from which vLLM's op leaves FlashInfer's kernel."""


def deep_gemm(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, powers_of_two: bool) -> Tensor:
    """What vLLM's op computes behind its quantisation where there are many tokens.

    Args:
        values: (tokens, depth), float8_e4m3fn.
        scales: (tokens, depth / 128), float32, column-major and TMA-aligned.
        weight: (columns, depth), float8_e4m3fn.
        weight_scale: (columns / 128 rounded up, depth / 128), float32.
        powers_of_two: whether all scales are.

    Returns:
        (tokens, columns), bfloat16.
    """
    out = values.new_empty((len(values), len(weight)), dtype=torch.bfloat16)
    sys.modules[KERNELS].fp8_gemm_nt(
        (values, scales), (weight, weight_scale), out, is_deep_gemm_e8m0_used=powers_of_two
    )
    return out


def multiply(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, powers_of_two: bool) -> Tensor:
    """As `deep_gemm`, by FlashInfer's kernel where vLLM's op takes it."""
    if len(values) >= FLASHINFER_BELOW:
        return deep_gemm(values, scales, weight, weight_scale, powers_of_two)
    product: Tensor = sys.modules[KERNELS].flashinfer_fp8_blockscale_gemm(
        input=values, weight=weight, input_scale=scales, weight_scale=weight_scale, out_dtype=torch.bfloat16
    )
    return product


def _fake(values: Tensor, _scales: Tensor, weight: Tensor, _weight_scale: Tensor, _powers_of_two: bool) -> Tensor:
    return values.new_empty((values.shape[0], weight.shape[0]), dtype=torch.bfloat16)


define_op(
    "layerfuse_vllm",
    "block_product(Tensor values, Tensor scales, Tensor weight, Tensor weight_scale, bool powers_of_two) -> Tensor",
    multiply,
    _fake,
)
PRODUCT = torch.ops.layerfuse_vllm.block_product.default
QUANTISE = torch.ops.layerfuse.quantise_group.default


def _own(x: Tensor, weight: Tensor, weight_scale: Tensor, powers_of_two: bool) -> Tensor:
    found: Tensor = getattr(torch.ops.vllm, NAME)(x, weight, weight_scale, GROUP, powers_of_two)
    return found


def _beyond(name: str, given: str, function: Callable[..., Tensor]) -> dict[bool, str]:
    """An op for more tokens than few, by whether DeepGEMM's scales are rounded to powers of two."""
    schema = f"({given}, Tensor weight, Tensor weight_scale) -> Tensor"
    return {
        rounds: define_op("layerfuse_vllm", f"{name}_{how}{schema}", partial(function, powers_of_two=rounds))
        for rounds, how in ((False, "exact"), (True, "rounded"))
    }


BEYOND = _beyond("block_product", "Tensor values, Tensor scales", multiply)
BEYOND_BY_DEEP_GEMM = _beyond("block_product_deep_gemm", "Tensor values, Tensor scales", deep_gemm)
"""The same where vLLM multiplies by DeepGEMM alone."""
_BEYOND_INSIDE = _beyond("block_linear", "Tensor x", _own)

LINEAR = torch.ops.layerfuse.group_quant_linear.default
BLOCK_LINEAR = torch.ops.layerfuse.block_scaled_linear.default


ran: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""Kernel of vLLM's whose few tokens are layerfuse's where no graph shows its product -> op -> calls."""


def product(
    place: Any, values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, powers_of_two: bool
) -> Tensor:
    """As `multiply`, by layerfuse's kernel where there are few tokens and the plan expects that. `place`: vLLM's kernel."""
    if place not in ran or not is_layerfuses(weight, weight_scale):
        return multiply(values, scales, weight, weight_scale, powers_of_two)
    ran[place][BLOCK_LINEAR._opname] += is_looked_at()
    found: Tensor = BLOCK_LINEAR(values, scales, weight, weight_scale, torch.bfloat16, True, BEYOND[powers_of_two])
    return found


def linear(place: Any, x: Tensor, weight: Tensor, weight_scale: Tensor, powers_of_two: bool) -> Tensor:
    """As vLLM's op, by layerfuse's kernel where there are few tokens. Weights are as `is_layerfuses` takes them, `place` is vLLM's kernel."""
    ran[place][LINEAR._opname] += is_looked_at()
    found: Tensor = LINEAR(x, weight, weight_scale, False, True, _BEYOND_INSIDE[powers_of_two])
    return found


def why_not() -> str | None:
    """Why vLLM's op stays as it is, as a sentence; None where its quantisation can be taken out."""
    try:
        module = importlib.import_module(KERNELS)
        taken = tuple(inspect.signature(getattr(module, f"_{NAME}_impl")).parameters)
        if taken != ARGUMENTS:
            return f"{NAME} takes {', '.join(taken)}, and not {', '.join(ARGUMENTS)}"
        for name in (f"_{NAME}_impl", "fp8_gemm_nt", "flashinfer_fp8_blockscale_gemm"):
            native_function(KERNELS, name)
        if module.envs.VLLM_BATCH_INVARIANT:
            return "VLLM_BATCH_INVARIANT multiplies by DeepGEMM at every size"
    except NotNativeError as error:
        return str(error)
    except (*FOREIGN, ImportError) as error:
        return f"{KERNELS} has no {NAME} as it is known: {error}"
    return None


class TakenOut:
    """The quantisations of one graph, outside of their products."""

    def __init__(self, graph: Graph) -> None:
        """Take each of them out, in place."""
        self._graph = graph
        self._quantised: dict[tuple[Node, bool], tuple[Node, Node]] = {}
        self._products: list[Node] = []
        for node in list(graph.nodes):
            if node.op == "call_function" and getattr(node.target, "_name", "") == f"vllm::{NAME}":
                given = dict(zip(ARGUMENTS, node.args, strict=False)) | node.kwargs
                if given["group_size"] == GROUP and type(given["use_deep_gemm_e8m0"]) is bool:
                    self._take_out(node, given)

    def _take_out(self, node: Node, given: dict[str, Any]) -> None:
        read = x, rounds = given["input"], given["use_deep_gemm_e8m0"]
        with self._graph.inserting_before(node):
            if read not in self._quantised:
                self._quantised[read] = self._quantise(x, rounds)
            product = self._call(PRODUCT, *self._quantised[read], given["weight"], given["weight_scale"], rounds)
        product.meta = {**node.meta, **product.meta}
        node.replace_all_uses_with(product)
        self._graph.erase_node(node)
        self._products.append(product)

    def _quantise(self, x: Node, rounds: bool) -> tuple[Node, Node]:
        both = self._call(QUANTISE, x, torch.float8_e4m3fn, GROUP, True, True, rounds)
        values, scales = (self._call(operator.getitem, both, at) for at in (0, 1))
        return values, scales

    def _call(self, target: Any, *args: Any) -> Node:
        node = self._graph.call_function(target, args)
        with torch.no_grad():
            node.meta["val"] = target(*torch.fx.map_arg(args, value))
        return node

    def put_back(self) -> None:
        """What no fusion has taken, and whose few tokens are vLLM's too, is its op again."""
        for product in self._products:
            x = None if product._erased else _unquantised(product.args[0])
            if x is None:
                continue
            _, _, weight, weight_scale, rounds = product.args
            with self._graph.inserting_before(product):
                given = x, weight, weight_scale, GROUP, rounds
                node = self._graph.call_function(getattr(torch.ops.vllm, NAME).default, given)
            node.meta = dict(product.meta)
            product.replace_all_uses_with(node)
            self._graph.erase_node(product)
        for both in self._quantised.values():
            for node in (*both, both[0].args[0]):
                if isinstance(node, Node) and not node.users and not node._erased:
                    self._graph.erase_node(node)


def _unquantised(values: Any) -> Any:
    """What a quantisation takes that was taken out and that no fusion has replaced; None where one has."""
    both = values.args[0] if isinstance(values, Node) and values.target is operator.getitem else None
    return both.args[0] if isinstance(both, Node) and both.target is QUANTISE else None


def quantised_way(values: Any, scales: Any, weight: Any, weight_scale: Any, beyond: str) -> dict[str, dict[str, Any]]:
    """As `FoundLinear.ways`, of activations that are quantised in front."""
    given = {
        "x": values,
        "x_scale": scales,
        "weight": weight,
        "weight_scale": weight_scale,
        "out_dtype": torch.bfloat16,
    }
    return {BLOCK_SCALED_LINEAR.name: given | {"steady": True, "beyond": beyond}}


def _read(call: Call) -> FoundLinear | None:
    """layerfuse_vllm::block_product: few tokens are layerfuse's, and more `multiply`'s where a fusion has taken the quantisation, else vLLM's op's."""
    values, scales, weight, weight_scale, rounds = call.node.args
    x = _unquantised(values)
    if not is_layerfuses(weight, weight_scale, x):
        return None
    ways = quantised_way(values, scales, weight, weight_scale, BEYOND[rounds])
    if x is not None:
        given = {
            "x": x,
            "weight": weight,
            "weight_scale": weight_scale,
            "steady": True,
            "beyond": _BEYOND_INSIDE[rounds],
        }
        ways = {GROUP_QUANT_LINEAR.name: given}
    return FoundLinear(out=call.node, ways=ways, nodes=(call.node,))


READERS = (
    Reader(op="layerfuse_vllm::block_product", gives=(GROUP_QUANT_LINEAR.name, BLOCK_SCALED_LINEAR.name), read=_read),
)


def is_layerfuses(weight: Any, weight_scale: Any, x: Any = None) -> bool:
    """Whether few tokens may be layerfuse's: parameters, which nothing writes to, as its kernels read them. x: what is to be quantised, if it is."""
    scales, values = _tensor(weight_scale), _tensor(weight)
    written = any(
        isinstance(each, Node) and each.op not in ("placeholder", "get_attr") for each in (weight, weight_scale)
    )
    fits = scales_shape(values) == tuple(scales.shape) and scales.dtype == torch.float32 and scales.is_contiguous()
    held = values.dtype == torch.float8_e4m3fn and values.stride(-1) == 1 and values.numel() < LARGE_BLOCKS
    rows = x is None or (_tensor(x).dtype == torch.bfloat16 and _tensor(x).stride(-1) == 1)
    return not written and fits and held and rows


def _tensor(each: Any) -> Tensor:
    """Of a node, or itself."""
    found: Tensor = each if isinstance(each, Tensor) else value(each)
    return found
