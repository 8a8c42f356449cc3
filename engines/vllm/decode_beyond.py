"""`mla_decode` in graphs that are to be vLLM's own (`host_bound`, or the form that is on fits none): what its wrapper does stands there again, op by op.

vLLM traces a model once and compiles it for each range of tokens. So the wrapper's own forward is traced once more, between its projections, with what
the ops of ours are given, and its results are handed to the op that is the attention, which then does what vLLM's two do and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.func import functionalize
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.passes.inductor_pass import InductorPass

from ..process import troubled
from . import decode_ops
from .decode_ops import Layer
from .decode_trial import With
from .host_bound import holds

aten = torch.ops.aten


class OwnBeyond(InductorPass):  # type: ignore[misc]
    """A pass of vLLM's for these numbers of tokens and layers, in a module of this key (`keys.key_for`)."""

    def __init__(self, tokens: range, made: Iterable[Layer], key: str) -> None:
        self.tokens = tokens
        self.key = key
        self.kinds = {(layer.form(), _code_in_front(layer)): layer for layer in made}

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether a range of vLLM's is one of them."""
        return holds(self.tokens, compile_range)

    def __call__(self, graph: Graph) -> None:
        """Put what vLLM's wrapper does in the place of our ops. Where that cannot be traced they stay, which costs the host more and no more."""
        try:
            found = [(latents, turn, self._traced(latents, turn)) for latents, turn in _pairs(graph)]
        except Exception as error:
            troubled("putting vLLM's own ops in the place of mla_decode's in a graph", error)
            return
        for latents, turn, own in found:
            _replace(graph, latents, turn, own)

    def uuid(self) -> str:
        """Changes with all of layerfuse's code and what it plans in the module. What is traced is vLLM's code, which is part of vLLM's own key."""
        return f"{self.key} beyond {self.tokens}"

    def _traced(self, latents: Node, turn: Node) -> Graph:
        """What the wrapper does: of `_given` the normed query latent, the query, the latent and the rope's columns as its attention is given them.

        Raises:
            TypeError: that is not known of these nodes.
        """
        layer = self._layer(latents)
        wrapper = layer.wrapper

        def own(
            rows: Tensor, query: Tensor, positions: Tensor, q_weight: Tensor, kv_weight: Tensor, table: Tensor
        ) -> Any:
            seen: list[Tensor] = []

            def project(normed: Tensor) -> tuple[Tensor]:
                seen.append(normed)
                return (query,)

            def attend(q: Tensor, latent: Tensor, rope: Tensor, *_: Any, **__: Any) -> Tensor:
                seen.extend((q, latent, rope))
                return q

            standing = With(
                wrapper, fused_qkv_a_proj=lambda _: (rows,), q_b_proj=project, mla_attn=attend, o_proj=lambda x: (x,)
            )
            with ExitStack() as held:
                for module, name, tensor in (
                    ("q_a_layernorm", "weight", q_weight), ("kv_a_layernorm", "weight", kv_weight),
                    ("rotary_emb", "cos_sin_cache", table),
                ):  # fmt: skip
                    held.enter_context(_holding(layer.children[module], name, tensor))
                type(wrapper).forward(standing, positions, rows)
            return tuple(seen)

        given = [each.meta["val"] for each in _given(latents, turn)]
        traced = make_fx(functionalize(own, remove="mutations"), decomposition_table=select_decomp_table())(*given)
        graph: Graph = traced.graph
        for node in reversed(graph.nodes):
            target = node.target
            if target is aten.copy_.default and node.args[0].op == "placeholder" and not node.users:
                graph.erase_node(node)  # the query is written to in place, and nobody reads it but by the result
            elif target in (aten.alias.default, aten.detach.default):
                node.replace_all_uses_with(node.args[0])
            elif target is aten.view.default:
                node.target = aten.reshape.default  # as Inductor has them by now, and vLLM's passes look for them
            elif isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
                raise TypeError(f"{target} writes to what it is given")
        graph.eliminate_dead_code()
        return graph

    def _layer(self, latents: Node) -> Layer:
        """One like that of a node, whose name is not in the graph."""
        *_, settings, pairs, _ = latents.args
        found = [
            each for each in self.kinds.values() if ([*each.epsilons, *each.offsets], each.pairs) == (settings, pairs)
        ]
        if len(found) != 1:
            raise TypeError(f"{len(found)} kinds of layers have the settings of {latents}")
        return found[0]


def _code_in_front(layer: Layer) -> frozenset[Hashable]:
    """As `decode_trial.code_of`, without the attention and its cache, which are not traced."""
    alike: Any = layer.around.alike
    behind = f" of this {type(layer.attention).__qualname__}"
    return frozenset((place, what) for place, what in alike if not place.endswith(behind))


@contextmanager
def _holding(module: Any, name: str, tensor: Tensor) -> Iterator[None]:
    """A module with another tensor in the place of its own."""
    held = module._parameters if name in module._parameters else module._buffers
    before = held[name]
    held[name] = tensor
    try:
        yield
    finally:
        held[name] = before


def _pairs(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Of each layer whose query latent is not quantised the nodes of both of our ops in front of its attention."""
    latents = None
    for node in graph.nodes:
        if node.target is decode_ops.latents:
            latents = _checked(node, (0, 1, 2))
        elif node.target is decode_ops.latents_quantised:
            latents = node
        elif node.target is torch.ops.higher_order.auto_functionalized and node.args[0] is decode_ops.turn:
            if latents is None:
                raise TypeError(f"{node} has no latents in front of it")
            if latents.target is decode_ops.latents:
                yield latents, _checked(node, (1,))
            latents = None


def _checked(node: Node, places: tuple[int, ...]) -> Node:
    """A node that is read by the places of its results alone.

    Raises:
        TypeError: it is not.
    """
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] not in places:
            raise TypeError(f"{user} reads {node} in another way than by its results")
    return node


def _given(latents: Node, turn: Node) -> list[Node]:
    """The rows, the query that is not turned yet, the positions, both weights and the table."""
    rows, *others = latents.args[:5]
    return [rows, turn.kwargs["q"], *others]


def _replace(graph: Graph, latents: Node, turn: Node, own: Graph) -> None:
    """Write what vLLM does in front of our nodes: up to the query, and from there on."""
    holders, result = [each for each in own.nodes if each.op == "placeholder"], own.output_node()
    known = dict(zip(holders, _given(latents, turn), strict=True))
    late = {holders[1]}
    before = latents
    for node in own.nodes:
        if node in known or node is result:
            continue
        if not late.isdisjoint(node.all_input_nodes):
            before = turn
        with graph.inserting_before(before):
            known[node] = graph.node_copy(node, known.__getitem__)
    normed, query, latent, rope = (known[each] for each in result.args[0])
    for node, instead in ((latents, {0: normed, 1: latent, 2: rope}), (turn, {1: query})):
        for user in list(node.users):
            user.replace_all_uses_with(instead[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    # Inductor copies what a graph hands on to the strides that it had before.
    out = graph.output_node()
    strides = out.meta.get("original_output_strides", ())
    for place, each in enumerate(out.args[0]) if strides else ():
        if each in (query, latent, rope):
            strides[place] = each.meta["val"].stride()
