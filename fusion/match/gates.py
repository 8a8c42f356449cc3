"""Finding gated norms: a norm whose result, or whose input, is multiplied by a silu or sigmoid of a gate.

They are read forwards from the norm, factor by factor, so that orders and roundings need no forms of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, evolve, frozen
from torch.fx import Node

from ...adapters.specs import GatedNormSpec, NormSpec
from .activations import read_activation
from .arithmetic import aten, between, narrow, operands, rounded_to, unrounded, what_is
from .errors import Unmatched
from .found import FoundNorm
from .index import GraphIndex
from .provenance import ROW_PRESERVING
from .values import same_shape, value
from .written_out import Reading, reading_of


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


def find_gated_norms(index: GraphIndex, norms: Iterable[FoundNorm]) -> tuple[list[FoundGatedNorm], dict[Node, str]]:
    """The gated norms of a graph in its order, and why the other norms are none.

    Args:
        index: of the graph.
        norms: its norms, among which are those that are one op.

    Returns:
        The gated norms; and reasons, by the reciprocal root of a norm or by the result of one that is one op.
    """
    found: list[FoundGatedNorm] = []
    reasons: dict[Node, str] = {}
    roots = index.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
    readings = {root: norm for root in roots if (norm := reading_of(root)) is not None}
    starts = [(root, _Gated(norm=evolve(norm, through_views=True))) for root, norm in readings.items()]
    starts += [(norm.out, _of_norm(norm)) for norm in norms if root_of(norm) is norm.out]
    for node, start in starts:
        try:
            found.append(start.gated())
        except Unmatched as reason:
            reasons[node] = str(reason)
    return sorted(found, key=lambda norm: norm.out), reasons


def root_of(norm: FoundNorm) -> Node:
    """The reciprocal root of a norm; of one that is one op its result."""
    return next((node for node in norm.nodes if node.target is aten.rsqrt.default), norm.out)


@define(kw_only=True, eq=False)
class _Gated:
    """A norm that is being read with its gate."""

    norm: Reading
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
                    plain = plain or self.norm.out
                factor = self.norm.next()
                if factor is not None:
                    self._take_gate(factor)
        except Unmatched as reason:
            # Nothing gates the result. Its input may be gated.
            inside = None if plain is None else self._gated_input()
            if plain is None or inside is None:
                raise reason if self.loose is None else _no_gate(self.loose) from None
            return self._found(*inside, plain, before=False)
        return self._found(narrow(self.norm.normed), self.activated, self.norm.out, before=True)

    @property
    def _complete(self) -> bool:
        """Whether what was read is the norm, or the norm and its gate: no factor of it is left over."""
        return self.norm.is_whole and self.loose is None

    def _take_gate(self, factor: Any) -> None:
        known = read_activation(factor)
        if self.activated is None and self.loose is None:
            self.activated, self.loose = known, factor if known is None else None
        elif known is not None and known[0] == "sigmoid" and unrounded(known[1]) is unrounded(self.loose):
            self.activated, self.loose = ("silu", known[1]), None
        else:
            raise _no_gate(factor)

    def _gated_input(self) -> tuple[Node, tuple[str, Node]] | None:
        """The x, the activation and the gate of what is normed, where that is their product."""
        product = unrounded(self.norm.normed)
        while isinstance(product, Node) and product.target in ROW_PRESERVING:
            product = unrounded(product.args[0])
        for x, other in operands(product, aten.mul.Tensor):
            activated = read_activation(other)
            if isinstance(x, Node) and activated is not None:
                return narrow(x), activated
        return None

    def _found(self, x: Node, activated: tuple[str, Node], out: Node, *, before: bool) -> FoundGatedNorm:
        norm, (activation, gate), dtype = self.norm, activated, value(x).dtype
        if norm.inside.itemsize < 4:
            raise Unmatched(f"{norm.normed} is normed in {norm.inside}, and the fused op norms in float32")
        rounded = rounded_to(dtype, out)
        if rounded is None:
            raise Unmatched(f"the gated norm {out} is {value(out).dtype}, and its input {x} is {dtype}")
        if not same_shape(value(x).shape, value(gate).shape):
            raise Unmatched(
                f"the gate {gate} {tuple(value(gate).shape)} is broadcast to {x} {tuple(value(x).shape)}, and the fused "
                "op takes one of x's shape"
            )
        if norm.weight is None:  # not reached: what is incomplete raises before
            raise Unmatched(f"the norm {out} has no weight")
        nodes = between(rounded, {x, gate, norm.weight})
        coarse = next((node for node in nodes if value(node).dtype.itemsize < dtype.itemsize), None)
        if coarse is not None:
            raise Unmatched(f"{coarse} rounds to {value(coarse).dtype}, and the fused op to {dtype} only")
        return FoundGatedNorm(
            width=norm.width,
            epsilon=norm.epsilon,
            weight_offset=norm.weight_offset,
            form="gated",
            x=x,
            weight=norm.weight,
            out=rounded,
            nodes=nodes,
            gate=gate,
            activation=activation,
            norm_before_gate=before,
        )


def _no_gate(factor: Any) -> Unmatched:
    return Unmatched(f"the norm is multiplied by {what_is(factor)}, which is no silu or sigmoid of a gate")


def _of_norm(norm: FoundNorm) -> _Gated:
    return _Gated(
        norm=Reading(
            out=norm.out,
            normed=norm.x,
            inside=torch.float32,
            epsilon=norm.epsilon,
            width=norm.width,
            word="x",
            weight=norm.weight,
            weight_offset=norm.weight_offset,
        )
    )
