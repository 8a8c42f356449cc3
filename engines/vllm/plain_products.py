"""Linears of 16 bits in vLLM's graphs, which Inductor gives to cuBLAS: few tokens are multiplied by layerfuse where that is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...fusion.catalog.few_token_linear import PLAIN
from ...fusion.linear_ops import WIDEST
from ...fusion.match.values import value
from ..linears import Linears
from .products import turned

aten = torch.ops.aten
LINEAR = torch.ops.layerfuse.few_token_linear.default


def put_in(graph: Graph, linears: Linears) -> None:
    """Let few tokens be multiplied by layerfuse where linears expect that, in place. Products of two activations, and by what is written to, stay."""
    for node in list(graph.nodes) if PLAIN in linears.fusions else ():
        if node.target is aten.mm.default:
            given: tuple[Any, ...] = (*node.args, None)
        elif node.target is aten.addmm.default and not node.kwargs:
            given = (*node.args[1:], node.args[0])
        else:
            continue
        x, weight, bias = given[0], turned(given[1]), given[2]
        if linears.replaces(node, PLAIN, LINEAR._opname if _fits(x, weight, bias) else None):
            with graph.inserting_before(node):
                made = graph.call_function(LINEAR, (x, weight, bias, False))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            if not given[1].users:
                graph.erase_node(given[1])


def _fits(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the kernel reads them: parameters of the dtype of the activations, row by row."""
    every = [each for each in (weight, bias) if each is not None]
    if weight is None or not all(isinstance(each, Node) and each.op in ("placeholder", "get_attr") for each in every):
        return False
    rows, held, added = value(x), value(weight), value(bias)
    if not isinstance(held, Tensor) or not all(type(size) is int for size in held.shape):
        return False  # of so many tokens: it is another activation
    if not isinstance(rows, Tensor) or not isinstance(held, Tensor) or rows.dtype.itemsize != 2:
        return False
    return (
        rows.dtype == held.dtype
        and held.dim() == 2
        and rows.stride(-1) == held.stride(-1) == 1
        and len(held) <= WIDEST
        and (bias is None or (added.dtype == held.dtype and added.shape == held.shape[:1] and added.stride(0) == 1))
    )
