"""The gated norm of a delta net's heads."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from ...adapters.specs import GatedNormSpec
from ..declare import Argument, Choice, Epsilon, Flag, Like, Result, Rows, Weight, WeightOffset
from ..kernel_source import later
from ..sites import OUTPUT
from .norm import described
from .step import MIDDLE, At, Kept, Legality, Source

GATES = ("silu", "sigmoid")
"""What the gate of a gated norm passes through."""


@frozen(kw_only=True)
class GatedNorm(Kept):
    """The norm of each head with a gate of the same shape, activated, before or behind it."""

    stage = MIDDLE
    roles = frozenset({OUTPUT})
    is_norm = True
    norm = GatedNormSpec
    kernel = "gated_norm"

    x: str = "x"
    gate: str = "gate"
    weight: str = "weight"
    epsilon: str = "epsilon"
    weight_offset: str = "weight_offset"
    activation: str = "activation"
    norm_before_gate: str = "norm_before_gate"
    out: str = "normed"

    @property
    def rows(self) -> str:
        return f"made_{self.out}.flatten(-2)"  # heads are joined: what reads a gated norm quantises rows of all heads

    def arguments(self) -> tuple[Argument, ...]:
        before = "True: norm(x) * activation(gate). False: norm(x * activation(gate))."
        return (
            Rows(name=self.x, heads=True, doc="(..., heads, width), normed head by head."),
            Rows(name=self.gate, like=self.x, heads=True, doc=f"of {self.x}'s shape."),
            Weight(name=self.weight, of=self.x),
            Epsilon(name=self.epsilon),
            WeightOffset(name=self.weight_offset),
            Choice(name=self.activation, words=GATES, doc="of the gate: silu or sigmoid."),
            Flag(name=self.norm_before_gate, on=True, doc=before),
        )

    def results(self, of: str) -> tuple[Result, ...]:
        return (Like(name=self.out, of=of, doc="the gated norm, rounded once."),)

    def said(self, before: str, source: Source) -> str:
        return "The gated RMSNorm of each head"

    def source(self, source: Source) -> Iterator[str]:
        taken = (self.x, self.gate, self.weight, self.epsilon, self.weight_offset, self.activation)
        yield f"made_{self.out} = _gated_norm({', '.join(map(source.read, taken))}, {self.norm_before_gate})"

    def why_not(self, at: At) -> Legality | None:
        norm, problem = at.norm, None
        if not isinstance(norm, GatedNormSpec):
            problem = "is not gated"
        elif norm.activation not in GATES:
            problem = f"has a gate of {norm.activation}; the fused op knows {' and '.join(GATES)}"
        elif norm.group_size not in (None, norm.width):
            problem = f"takes its variance over {norm.group_size} columns of {norm.width}, and the fused op over all of a head"
        return None if problem is None else Legality("refused", f"the norm {problem}")

    def described(self, at: At) -> str:
        return described(at)

    bind = later("layerfuse.fusion.rewrite.gated:bind_gated_norm")
