"""The inside of a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from ...adapters.specs import GatedMLPSpec
from ..declare import Argument, Like, Limit, Result, Rows
from ..kernel_source import later
from ..sites import ACTIVATION
from .step import MIDDLE, At, Kept, Legality, Source


@frozen(kw_only=True)
class SiluMul(Kept):
    """The inside of a gated MLP: `silu(gate) * up`, both clamped where the model clamps them."""

    stage = MIDDLE
    roles = frozenset({ACTIVATION})
    kernel = "silu_mul"

    gate: str = "gate"
    up: str = "up"
    limit: str = "limit"
    out: str = "product"

    def arguments(self) -> tuple[Argument, ...]:
        return (
            Rows(name=self.gate, doc="(..., width): the half that is activated; a view of columns goes in as it is."),
            Rows(name=self.up, like=self.gate, doc=f"of {self.gate}'s shape: the half that it is multiplied with."),
            Limit(name=self.limit),
        )

    def results(self, of: str) -> tuple[Result, ...]:
        return (Like(name=self.out, of=of, doc="the product, rounded once."),)

    def said(self, before: str, source: Source) -> str:
        return "`silu(gate) * up`"

    def source(self, source: Source) -> Iterator[str]:
        yield f"made_{self.out} = _silu_mul({source.read(self.gate)}, {source.read(self.up)}, {self.limit})"

    def why_not(self, at: At) -> Legality | None:
        spec = at.site.spec
        if isinstance(spec, GatedMLPSpec) and spec.activation != "silu":
            return Legality("refused", f"its gate passes through {spec.activation}; the fused op knows silu")
        if isinstance(spec, GatedMLPSpec) and spec.gate_multiplier != 1:
            why = f"its gate is multiplied by {spec.gate_multiplier:.6g} in front of the activation; the fused op has no factor there"
            return Legality("refused", why)
        return None

    def described(self, at: At) -> str:
        return f"silu(gate) * up of {at.site.quantised_width} columns"

    bind = later("layerfuse.fusion.rewrite.gated:bind_product")
