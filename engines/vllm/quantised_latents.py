"""`mla_decode` whose query latent is quantised in the launch of its norms: a pass that puts that launch in vLLM's graphs.

Where FlashInfer is, `q_b_proj` is one op of vLLM's that takes bfloat16 (`inside`). Behind our launch its product takes values and scales, as behind
any fused norm: few tokens are layerfuse's where that is expected, and more are FlashInfer's or DeepGEMM's. In graphs that are to be vLLM's
own (`decode_beyond`) nothing is quantised by us.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from vllm.compilation.passes.inductor_pass import InductorPass

from ..process import troubled
from . import decode_ops, inside
from .decode_beyond import OwnBeyond
from .decode_ops import Layer
from .host_bound import holds
from .passes import AFTER, FusionPass


class QuantisedLatents(InductorPass):  # type: ignore[misc]
    """A pass of vLLM's for all but these numbers of tokens, in a module of this key (`keys.key_for`)."""

    def __init__(self, untouched: range, made: Iterable[Layer], key: str, own: OwnBeyond | None = None) -> None:
        self.untouched = untouched
        self.key = key
        self.own = own
        "What puts vLLM's own ops where nothing is quantised, as the plain form is off; None: it stands there."
        self.rounds = {layer.rounds for layer in made} - {None}
        "Of the scales: each layer was tried out with one of these alone."

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether a range of vLLM's is another."""
        return not holds(self.untouched, compile_range)

    def __call__(self, graph: Graph) -> None:
        """Quantise the latents whose one reader takes that. The report says which layers have none."""
        try:
            if inside.why_not() is None:
                for latents, product, given in list(_read(graph)):
                    if self.rounds == {given["use_deep_gemm_e8m0"]}:
                        _quantise(graph, latents, product, given)
        except Exception as error:
            troubled("quantising mla_decode's query latents in a graph", error)
        if self.own is not None:
            self.own(graph)

    def uuid(self) -> str:
        """Changes with all of layerfuse's code and what it plans in the module."""
        return f"{self.key} quantised but for {self.untouched}"


def insert(manager: Any, added: QuantisedLatents) -> None:
    """Put it in front of layerfuse's other pass, which finds the products, and behind what only tidies."""
    passes = manager.passes
    ours = next((i for i, each in enumerate(passes) if isinstance(each, FusionPass)), None)
    tidied = next((i + 1 for i, each in enumerate(passes) if type(each).__name__ in AFTER), 0)
    passes.insert(tidied if ours is None else ours, added)


def _read(graph: Graph) -> Iterator[tuple[Node, Node, dict[str, Any]]]:
    """The launches whose query latent is read by one product alone that quantises inside of its op: both nodes, and what that is given."""
    for node in graph.nodes:
        if node.target is not decode_ops.latents or any(user.target is not operator.getitem for user in node.users):
            continue
        readers = [reader for user in node.users if user.args[1] == 0 for reader in user.users]
        product = readers[0] if len(readers) == 1 else None
        if product is None or getattr(product.target, "_name", "") != f"vllm::{inside.NAME}":
            continue
        given = dict(zip(inside.ARGUMENTS, product.args, strict=False)) | product.kwargs
        if given["group_size"] == inside.GROUP and type(given["use_deep_gemm_e8m0"]) is bool:
            yield node, product, given


def _quantise(graph: Graph, latents: Node, product: Node, given: dict[str, Any]) -> None:
    """Let the launch give values and scales in the place of the normed latent, and the product take them."""
    rounds = given["use_deep_gemm_e8m0"]
    *others, name = latents.args
    vals = [each.meta["val"] for each in others[:4]]
    with torch.no_grad():
        results = decode_ops._made_quantised(*vals, rounds, None)
    with graph.inserting_before(latents):
        made = graph.call_function(decode_ops.latents_quantised, (*others, rounds, name))
        made.meta = {**latents.meta, "val": results}
        parts = [graph.call_function(operator.getitem, (made, place)) for place in range(4)]
    for part, val in zip(parts, results, strict=True):
        part.meta["val"] = val
    weight, weight_scale = given["weight"], given["weight_scale"]
    with graph.inserting_before(product):
        behind = graph.call_function(inside.PRODUCT, (parts[0], parts[1], weight, weight_scale, rounds))
    behind.meta = dict(product.meta)
    product.replace_all_uses_with(behind)
    graph.erase_node(product)
    for user in list(latents.users):
        user.replace_all_uses_with(parts[user.args[1] + 1])
        graph.erase_node(user)
    graph.erase_node(latents)
    for part in parts:
        if not part.users:
            graph.erase_node(part)
