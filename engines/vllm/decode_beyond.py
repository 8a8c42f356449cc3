"""`mla_decode` in graphs that are to be vLLM's own (`host_bound`): plain torch stands there, which vLLM's compiler merges as its own.

Such steps are prompts, nearly always. No op stands in front of the attention in their graphs, and the one that is the attention does what vLLM's two do.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.passes.inductor_pass import InductorPass

from ...fusion.ops.norm import normalise_wide
from ..process import troubled
from . import decode_ops
from .host_bound import holds


class PlainBeyond(InductorPass):  # type: ignore[misc]
    """A pass of vLLM's for these numbers of tokens."""

    def __init__(self, tokens: range) -> None:
        self.tokens = tokens

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether a range of vLLM's is one of them."""
        return holds(self.tokens, compile_range)

    def __call__(self, graph: Graph) -> None:
        """Put what the ops compute in their place. Where that cannot be traced they stay, which costs the host more and no more."""
        try:
            found = [*_traced(graph)]
        except Exception as error:
            troubled("writing mla_decode's ops out in a graph", error)
            return
        for node, places, inputs, plain in found:
            made = _inlined(graph, node, inputs, plain)
            _replace(graph, node, dict(zip(places, made, strict=True)))

    def uuid(self) -> str:
        """Changes with this file."""
        return f"{self.tokens} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"


def latents(
    q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, q_weight: Tensor, kv_weight: Tensor, table: Tensor, *,
    settings: list[float], pairs: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `layerfuse_vllm::mla_latents` where a step is no decode step: the normed query latent, and the entries that no cache has yet."""
    q_epsilon, kv_epsilon, q_offset, kv_offset = settings
    normed = normalise_wide(q, q_weight, q_epsilon, q_offset).to(q.dtype)
    latent = normalise_wide(kv, kv_weight, kv_epsilon, kv_offset).to(kv.dtype)
    return normed, torch.cat([latent, _turned(k_rope, positions, table, pairs)], -1)


def turned_query(q: Tensor, positions: Tensor, table: Tensor, *, heads: int, pairs: str) -> tuple[Tensor]:
    """As `layerfuse_vllm::mla_rope`, with a result of its own."""
    rows = q.view(q.shape[0], heads, q.shape[1] // heads)
    width = table.shape[-1]
    rope = _turned(rows[..., -width:], positions, table, pairs)
    return (torch.cat([rows[..., :-width], rope], -1).view(q.shape),)


def _turned(x: Tensor, positions: Tensor, table: Tensor, pairs: str) -> Tensor:
    """The rope of (tokens, width) or (tokens, heads, width), by a table of cos beside sin; computed in float32, rounded once."""
    cos, sin = table.index_select(0, positions).float().chunk(2, -1)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wide = x.float()
    if pairs == "halves":
        first, second = wide.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    first, second = wide[..., 0::2], wide[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


def _traced(graph: Graph) -> Iterator[tuple[Node, tuple[int, ...], list[Node], Graph]]:
    """Of each op of ours: its node, the places of its results, the nodes that it reads, and a graph that computes these results of them."""
    for node in graph.nodes:
        if node.target is decode_ops.latents:
            *tensors, settings, pairs, _ = node.args
            _checked(node, (0, 1))
            yield node, (0, 1), tensors, _plain(partial(latents, settings=settings, pairs=pairs), tensors)
        elif node.target is torch.ops.higher_order.auto_functionalized and node.args[0] is decode_ops.turn:
            given = node.kwargs
            _checked(node, (1,))
            tensors = [given["q"], given["positions"], given["table"]]
            function = partial(turned_query, heads=given["heads"], pairs=given["pairs"])
            yield node, (1,), tensors, _plain(function, tensors)


def _checked(node: Node, places: tuple[int, ...]) -> None:
    """That a node is read by the places of its results alone.

    Raises:
        TypeError: it is not.
    """
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] not in places:
            raise TypeError(f"{user} reads {node} in another way than by its results")


def _plain(function: Callable[..., Any], given: list[Node]) -> Graph:
    traced = make_fx(function, decomposition_table=select_decomp_table())(*(each.meta["val"] for each in given))
    traced.graph.eliminate_dead_code()
    graph: Graph = traced.graph
    return graph


def _inlined(graph: Graph, node: Node, given: list[Node], plain: Graph) -> tuple[Node, ...]:
    """Write what a graph does with these nodes in front of a node; its results."""
    holders = [each for each in plain.nodes if each.op == "placeholder"]
    with graph.inserting_before(node):
        made = graph.graph_copy(plain, dict(zip(holders, given, strict=True)))
    return tuple(made)


def _replace(graph: Graph, node: Node, instead: dict[int, Node]) -> None:
    """Let those that read a node's results by their place read others."""
    for user in list(node.users):
        user.replace_all_uses_with(instead[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
