"""Block fp8 linears that quantise inside of their op: the quantisation is taken out for as long as fusions look for theirs.

Where FlashInfer is, vLLM on Hopper multiplies by one op that takes bfloat16 (kernels/linear/scaled_mm/flashinfer.py of 0.26 and 0.33): by
FlashInfer's kernel below 32 tokens, else by a quantisation and DeepGEMM. Both kernels read values in e4m3 and float32 scales that lie
column by column, each column from 16 bytes on. So what a fused op has quantised goes to an op of ours that asks the same two. Where no
fusion has taken a quantisation, vLLM's own op is put back.

vLLM's default rounds scales to powers of two in front of DeepGEMM, and FlashInfer does not round them. What is taken out rounds in front of
both, as vLLM does at every size where it multiplies by DeepGEMM alone: models are trained with such scales (DeepSeek-V3.1), and one that is
not loses no more than it does with 32 tokens.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...adapters.errors import FOREIGN
from ...fusion.match.values import value
from ..native import NotNativeError, native_function

KERNELS = "vllm.model_executor.kernels.linear.scaled_mm.flashinfer"
"""vLLM's module that defines the op."""
NAME = "dynamic_flashinfer_deepgemm_blockscale_gemm"
ARGUMENTS = ("input", "weight", "weight_scale", "group_size", "use_deep_gemm_e8m0")
GROUP = 128
FEW = 32
"""Fewer tokens than these go to FlashInfer."""


def multiply(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, powers_of_two: bool) -> Tensor:
    """What vLLM's op computes behind its quantisation.

    Args:
        values: (tokens, depth), float8_e4m3fn.
        scales: (tokens, depth / 128), float32, column-major and TMA-aligned.
        weight: (columns, depth), float8_e4m3fn.
        weight_scale: (columns / 128 rounded up, depth / 128), float32.
        powers_of_two: whether all scales are.

    Returns:
        (tokens, columns), bfloat16.
    """
    if len(values) < FEW:
        return _few(values, weight, scales, weight_scale)
    out = values.new_empty((len(values), len(weight)), dtype=torch.bfloat16)
    _many((values, scales), (weight, weight_scale), out, powers_of_two)
    return out


def _few(values: Tensor, weight: Tensor, scales: Tensor, weight_scale: Tensor) -> Tensor:
    found: Tensor = sys.modules[KERNELS].flashinfer_fp8_blockscale_gemm(
        input=values, weight=weight, input_scale=scales, weight_scale=weight_scale, out_dtype=torch.bfloat16
    )
    return found


def _many(rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], out: Tensor, powers_of_two: bool) -> None:
    sys.modules[KERNELS].fp8_gemm_nt(rows, weight, out, is_deep_gemm_e8m0_used=powers_of_two)


def _fake(values: Tensor, _scales: Tensor, weight: Tensor, _weight_scale: Tensor, _powers_of_two: bool) -> Tensor:
    return values.new_empty((values.shape[0], weight.shape[0]), dtype=torch.bfloat16)


_LIBRARY = torch.library.Library("layerfuse_vllm", "FRAGMENT")
_LIBRARY.define(
    "block_product(Tensor values, Tensor scales, Tensor weight, Tensor weight_scale, bool powers_of_two) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("block_product", multiply, "CompositeExplicitAutograd")
torch.library.register_fake("layerfuse_vllm::block_product", _fake, lib=_LIBRARY)
PRODUCT = torch.ops.layerfuse_vllm.block_product.default


def why_not() -> str | None:
    """Why vLLM's op stays as it is, as a sentence; None where its quantisation can be taken out."""
    try:
        module = importlib.import_module(KERNELS)
        taken = tuple(inspect.signature(getattr(module, f"_{NAME}_impl")).parameters)
        if taken != ARGUMENTS:
            return f"{NAME} takes {', '.join(taken)}, and not {', '.join(ARGUMENTS)}"
        for name in (f"_{NAME}_impl", "fp8_gemm_nt"):
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
        both = self._call(torch.ops.layerfuse.quantise_group.default, x, torch.float8_e4m3fn, GROUP, True, True, rounds)
        values, scales = (self._call(operator.getitem, both, at) for at in (0, 1))
        return values, scales

    def _call(self, target: Any, *args: Any) -> Node:
        node = self._graph.call_function(target, args)
        with torch.no_grad():
            node.meta["val"] = target(*torch.fx.map_arg(args, value))
        return node

    def put_back(self) -> None:
        """Let vLLM's op do again what no fusion has taken."""
        op = getattr(torch.ops.vllm, NAME).default
        ours = {values for values, _ in self._quantised.values()}
        for product in self._products:
            values, _, weight, weight_scale, rounds = product.args
            if values in ours:
                x = values.args[0].args[0]  # of a fusion that quantises nothing, where one stands in front
                with self._graph.inserting_before(product):
                    again = self._graph.call_function(op, (x, weight, weight_scale, GROUP, rounds))
                again.meta = dict(product.meta)
                product.replace_all_uses_with(again)
                self._graph.erase_node(product)
        for both in self._quantised.values():
            for node in (*both, both[0].args[0]):
                if isinstance(node, Node) and not node.users and not node._erased:
                    self._graph.erase_node(node)
