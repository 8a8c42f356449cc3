"""Finding gated norms: a norm whose result, or whose input, is multiplied by a silu or sigmoid of a gate.

They are read forwards from the norm, factor by factor, so that orders and roundings need no forms of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, frozen
from torch.fx import Graph, Node

from ...adapters.specs import GatedNormSpec, NormSpec
from .activations import aten, between, is_rounding, narrow, operands, read_activation, unrounded, what_is
from .errors import Unmatched
from .norms import FoundNorm
from .provenance import ROW_PRESERVING
from .values import is_last, last_width, same, same_shape, value

_ADDS = (aten.add.Tensor, aten.add.Scalar)


@frozen(kw_only=True, eq=False)
class FoundGatedNorm(FoundNorm):
    """One gated norm. `x` and `gate` are of one shape, with the width last, and `out` has their elements in their order."""

    gate: Node
    activation: str
    norm_before_gate: bool
    kind: type[NormSpec] = GatedNormSpec

    @property
    def inputs(self) -> tuple[Node, ...]:
        """What it reads, the weight aside."""
        return (self.x, self.gate)


def why_ungated(norm: FoundNorm) -> str:
    """Why a norm is no gated norm, as a sentence."""
    reading = _of_norm(norm)
    try:
        reading.gated()
    except Unmatched as reason:
        return str(reason)
    return f"{norm.out} is a norm whose gate is not its own"


def find_gated_norms(graph: Graph, norms: Iterable[FoundNorm]) -> tuple[list[FoundGatedNorm], dict[Node, str]]:
    """The gated norms of a graph in its order, and why the other norms are none.

    Args:
        graph: a graph.
        norms: its norms, among which are those that are one op.

    Returns:
        The gated norms; and reasons, by the reciprocal root of a norm or by the result of one that is one op.
    """
    found: list[FoundGatedNorm] = []
    reasons: dict[Node, str] = {}
    starts = [(root, _of_root(root)) for root in graph.find_nodes(op="call_function", target=aten.rsqrt.default)]
    starts += [(norm.out, _of_norm(norm)) for norm in norms if root_of(norm) is norm.out]
    for node, reading in starts:
        if reading is not None:
            try:
                found.append(reading.gated())
            except Unmatched as reason:
                reasons[node] = str(reason)
    return sorted(found, key=lambda norm: norm.out), reasons


def root_of(norm: FoundNorm) -> Node:
    """The reciprocal root of a norm; of one that is one op its result."""
    return next((node for node in norm.nodes if node.target is aten.rsqrt.default), norm.out)


@define(kw_only=True, eq=False)
class _Reading:
    """A norm that is being read: what is known so far of `out`, a product of its factors."""

    out: Node
    normed: Node
    "What the mean square is of."
    inside: torch.dtype
    "What it is computed in."
    epsilon: float
    width: int
    has_input: bool = False
    weight: Node | None = None
    weight_offset: float = 0.0
    activated: tuple[str, Node] | None = None
    "What the gate passes through, and the gate."
    loose: Node | None = None
    "A factor that may be the gate of a silu, whose sigmoid comes as a factor of its own."

    def gated(self) -> FoundGatedNorm:
        """The gated norm.

        Raises:
            Unmatched: it is none, or one that no fused op computes.
        """
        plain: Node | None = None
        try:
            while self.activated is None or not self._complete:
                if self._complete:
                    plain = plain or self.out
                self._next()
        except Unmatched as reason:
            # Nothing gates the result. Its input may be gated.
            inside = None if plain is None else self._gated_input()
            if plain is None or inside is None:
                raise reason if self.loose is None else _no_gate(self.loose) from None
            self.out = plain
            return self._found(*inside, before=False)
        return self._found(narrow(self.normed), self.activated, before=True)

    @property
    def _complete(self) -> bool:
        """Whether `out` is the norm, or the norm and its gate: no factor of it is left over."""
        return self.has_input and self.weight is not None and self.loose is None

    def _next(self) -> None:
        """Take in the next factor."""
        readers = list(self.out.users)
        if len(readers) != 1:
            names = ", ".join(map(str, readers[:3]))
            raise Unmatched(f"{len(readers)} nodes read {self.out}, the norm before its gate ({names})")
        reader = readers[0]
        if is_rounding(reader):
            self.out = reader
            return
        others = [other for one, other in operands(reader, aten.mul.Tensor) if one is self.out]
        if len(others) != 1:
            raise Unmatched(f"{what_is(reader)} reads the norm {self.out}, and is no product with a gate")
        self.out, factor = reader, others[0]
        if not self.has_input and unrounded(factor) is unrounded(self.normed):
            self.has_input = True
        elif self.weight is not None or not self._take_weight(factor):
            self._take_gate(factor)

    def _take_gate(self, factor: Any) -> None:
        known = read_activation(factor)
        if self.activated is None and self.loose is None:
            self.activated, self.loose = known, factor if known is None else None
        elif known is not None and known[0] == "sigmoid" and unrounded(known[1]) is unrounded(self.loose):
            self.activated, self.loose = ("silu", known[1]), None
        else:
            raise _no_gate(factor)

    def _take_weight(self, node: Any) -> bool:
        """Whether a factor is the norm's weight, with or without an offset."""
        node, offset = unrounded(node), 0.0
        if isinstance(node, Node) and node.target in _ADDS and isinstance(node.args[1], float | int):
            node, offset = unrounded(node.args[0]), float(node.args[1])
        val = value(node)
        if not isinstance(val, torch.Tensor) or val.dim() != 1 or not same(val.shape[0], self.width):
            return False
        self.weight, self.weight_offset = node, offset
        return True

    def _gated_input(self) -> tuple[Node, tuple[str, Node]] | None:
        """The x, the activation and the gate of what is normed, where that is their product."""
        product = unrounded(self.normed)
        while isinstance(product, Node) and product.target in ROW_PRESERVING:
            product = unrounded(product.args[0])
        for x, other in operands(product, aten.mul.Tensor):
            activated = read_activation(other)
            if isinstance(x, Node) and activated is not None:
                return narrow(x), activated
        return None

    def _found(self, x: Node, activated: tuple[str, Node], *, before: bool) -> FoundGatedNorm:
        activation, gate = activated
        out, dtype = self.out, value(x).dtype
        if self.inside.itemsize < 4:
            raise Unmatched(f"{self.normed} is normed in {self.inside}, and the fused op norms in float32")
        if value(out).dtype != dtype:
            rounded = [user for user in out.users if is_rounding(user) and value(user).dtype == dtype]
            if len(out.users) != 1 or not rounded:
                raise Unmatched(f"the gated norm {out} is {value(out).dtype}, and its input {x} is {dtype}")
            out = rounded[0]
        if not same_shape(value(x).shape, value(gate).shape):
            raise Unmatched(
                f"the gate {gate} {tuple(value(gate).shape)} is broadcast to {x} {tuple(value(x).shape)}, and the fused "
                "op takes one of x's shape"
            )
        if self.weight is None:  # not reached: what is incomplete raises before
            raise Unmatched(f"the norm {out} has no weight")
        nodes = tuple(reversed(between(out, {x, gate, self.weight})))
        coarse = next((node for node in nodes if value(node).dtype.itemsize < dtype.itemsize), None)
        if coarse is not None:
            raise Unmatched(f"{coarse} rounds to {value(coarse).dtype}, and the fused op to {dtype} only")
        return FoundGatedNorm(
            width=self.width,
            epsilon=self.epsilon,
            weight_offset=self.weight_offset,
            form="gated",
            x=x,
            weight=self.weight,
            out=out,
            nodes=nodes,
            gate=gate,
            activation=activation,
            norm_before_gate=before,
        )


def _no_gate(factor: Any) -> Unmatched:
    return Unmatched(f"the norm is multiplied by {what_is(factor)}, which is no silu or sigmoid of a gate")


def _of_norm(norm: FoundNorm) -> _Reading:
    return _Reading(
        out=norm.out,
        normed=norm.x,
        inside=torch.float32,
        epsilon=norm.epsilon,
        width=norm.width,
        has_input=True,
        weight=norm.weight,
        weight_offset=norm.weight_offset,
    )


def _of_root(root: Node) -> _Reading | None:
    """A norm from its `rsqrt(mean(x^2) + epsilon)`; None where that is something else."""
    shifted = root.args[0]
    if not isinstance(shifted, Node) or shifted.target not in _ADDS:
        return None
    mean, epsilon = shifted.args[:2]
    if not isinstance(mean, Node) or mean.target is not aten.mean.dim or not isinstance(epsilon, float | int):
        return None
    square, dims, *_ = mean.args
    if not isinstance(square, Node) or not is_last(dims, value(square)):
        return None
    squared = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
    product = square.target is aten.mul.Tensor and unrounded(square.args[0]) is unrounded(square.args[1])
    width = last_width(square)
    if not (squared or product) or width is None or len(mean.args) < 3 or mean.args[2] is not True:
        return None
    dtype = value(square).dtype
    return _Reading(out=root, normed=square.args[0], inside=dtype, epsilon=float(epsilon), width=width)
