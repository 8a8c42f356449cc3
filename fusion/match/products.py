"""Finding the products of gated MLPs: `silu(gate) * up`, with or without clamps, as arithmetic or as an engine's op."""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import frozen
from torch.fx import Node

from ..sites import Site
from .activations import read_activation
from .arithmetic import CLAMPS, aten, between, bounds_of, narrow, operands, rounded_to, unrounded, what_is
from .calls import call_of
from .errors import Unmatched
from .index import GraphIndex
from .provenance import ROW_PRESERVING
from .values import last_width, same_shape, value

ONE_OP = ("_C::silu_and_mul", "_C::silu_and_mul_with_clamp")
"""Ops of vLLM that write `silu(gate) * up` into a buffer, with gate and up as the halves of one tensor."""


@frozen(kw_only=True, eq=False)
class FoundProduct:
    """One product. Where an op reads gate and up as halves of one tensor, both are that tensor."""

    gate: Node
    up: Node
    limit: float
    "Infinite where nothing is clamped."
    width: int
    out: Node
    nodes: tuple[Node, ...]
    "All that computes it, inputs excluded."

    @property
    def inputs(self) -> tuple[Node, ...]:
        """What it reads."""
        return (self.gate, self.up)

    @property
    def weights(self) -> list[Node]:
        """Candidates for the weight of the down projection that reads it."""
        return _weights_behind(self.out)

    def why_not(self, site: Site, *_: Any) -> str | None:
        """How it differs from the product of a site, as a sentence; None where it does not."""
        spec: Any = site.spec
        if self.width != spec.local_intermediate_size:
            return f"the product {self.out} has width {self.width}; the spec says {spec.local_intermediate_size}"
        limit = math.inf if spec.swiglu_limit is None else spec.swiglu_limit
        if self.limit != limit:
            has, says = ("no clamp" if each == math.inf else f"a clamp at {each:g}" for each in (self.limit, limit))
            return f"the product {self.out} has {has}; the spec says {says}"
        return None

    @property
    def halves(self) -> bool:
        """Whether gate and up are the halves of one tensor."""
        return self.gate is self.up and last_width(self.gate) == 2 * self.width


@frozen(kw_only=True, eq=False)
class NearProduct:
    """A product of two tensors of one shape that is no `silu(gate) * up`."""

    out: Node
    reason: str

    @property
    def weights(self) -> list[Node]:
        """As those of a product."""
        return _weights_behind(self.out)

    def why_not(self, *_: Any) -> str:
        """The reason, whatever the site."""
        return self.reason


def find_products(index: GraphIndex) -> tuple[list[FoundProduct], list[NearProduct]]:
    """The products of a graph in its order, and what only resembles one."""
    found = [product for product in map(_one_op, index.calls(ONE_OP)) if product is not None]
    near: list[NearProduct] = []
    for node in index.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        a, b = node.args
        if not isinstance(a, Node) or not isinstance(b, Node) or not same_shape(value(a).shape, value(b).shape):
            continue
        if read_activation(node) is not None:
            continue  # silu itself, as x * sigmoid(x)
        try:
            found.append(_read(node))
        except Unmatched as reason:
            near.append(NearProduct(out=node, reason=str(reason)))
    return sorted(found, key=lambda product: product.out), near


def _read(product: Node) -> FoundProduct:
    known = [(read, other) for one, other in operands(product, aten.mul.Tensor) if (read := read_activation(one))]
    silus = [(gate, other) for (name, gate), other in known if name == "silu"]
    if not silus:
        factors = " and ".join(map(what_is, product.args))
        raise Unmatched(f"{product} multiplies {factors}, neither of which is silu of a gate")
    activated, up = silus[0]
    gate, most = _clamped(activated)
    up, limit = _clamped_both(narrow(up))
    if most != limit:
        raise Unmatched(
            f"{product} clamps its gate to {most:g} and the other half to {limit:g}; the fused op has one limit"
        )
    dtype = value(gate).dtype
    out = rounded_to(dtype, product)
    if out is None:
        raise Unmatched(f"the product {product} is {value(product).dtype}, and its gate {gate} is {dtype}")
    width = last_width(out)
    if width is None:
        raise Unmatched(f"the width of {out} is not static")
    nodes = between(out, {gate, up})
    coarse = next((node for node in nodes if value(node).dtype.itemsize < dtype.itemsize), None)
    if coarse is not None:
        raise Unmatched(f"{coarse} rounds to {value(coarse).dtype}, and the fused op to {dtype} only")
    return FoundProduct(gate=gate, up=up, limit=limit, width=width, out=out, nodes=nodes)


def _clamped(node: Node) -> tuple[Node, float]:
    """What is clamped from above, and to what."""
    inner = unrounded(node)
    low, high, before = _bounds(inner)
    if low != -math.inf:
        raise Unmatched(f"{inner} clamps the gate from below, at {low:g}, and the fused op does not")
    return (node, math.inf) if high == math.inf else (narrow(before), high)


def _clamped_both(node: Node) -> tuple[Node, float]:
    """What is clamped on both sides, and to what."""
    low, high, before = _bounds(unrounded(node))
    if (low, high) == (-math.inf, math.inf):
        return node, math.inf
    if low != -high:
        raise Unmatched(
            f"{unrounded(node)} clamps between {low:g} and {high:g}, which are not one number and its negative"
        )
    return narrow(before), high


def _bounds(node: Any) -> tuple[float, float, Any]:
    """The least and the largest value that clamps leave, and what they clamp."""
    low, high = -math.inf, math.inf
    while isinstance(node, Node) and node.target in CLAMPS:
        bounds = bounds_of(node)
        if not all(bound is None or isinstance(bound, float | int) for bound in bounds):
            break
        low = low if bounds[0] is None else max(low, bounds[0])
        high = high if bounds[1] is None else min(high, bounds[1])
        node = unrounded(node.args[0])
    return low, high, node


# ---- one op ----------------------------------------------------------------------------------------------------------


def _one_op(node: Node) -> FoundProduct | None:
    """A call of an op; None where it does more, or its result is not read as such."""
    call = call_of(node)
    tensor, out = call[1], call.results.get(0)
    # vLLM's clamped form: gate * sigmoid(alpha * gate) * (up + beta).
    limit, alpha, beta = call[2], call[3], call[4]
    if not isinstance(tensor, Node) or out is None or (alpha, beta) not in ((None, None), (1, 0)):
        return None
    width = last_width(out)
    if width is None or not same_shape(value(tensor).shape, (*value(out).shape[:-1], 2 * width)):
        return None
    known = math.inf if limit is None else float(limit)
    return FoundProduct(gate=tensor, up=tensor, limit=known, width=width, out=out, nodes=(*call.buffers, *call.nodes))


# ---- who reads it ----------------------------------------------------------------------------------------------------


def _readers_of(product: Node, most: int = 64) -> list[Node]:
    """What a product flows into, up to the first matrix product: that of the down projection, or its quantisation."""
    found = [product]
    for node in found:
        if len(found) < most and (node is product or not _has_weight(node)):
            found += [user for user in node.users if user not in found]
    return found[1:]


def _weights_behind(product: Node) -> list[Node]:
    """Matrices that what reads a product takes beside it."""
    readers = _readers_of(product)
    inside = {product, *readers}
    return [
        source for node in readers for source in node.all_input_nodes if source not in inside and _is_matrix(source)
    ]


def _has_weight(node: Node) -> bool:
    return node.target not in ROW_PRESERVING and any(_is_matrix(source) for source in node.all_input_nodes)


def _is_matrix(node: Node) -> bool:
    """Whether a node is an input of the graph with two dimensions, or a transposed one."""
    val = value(node)
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr") and isinstance(val, torch.Tensor) and val.dim() > 1
