"""The routed experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from ..sites import EXPERTS
from .linear import Linear
from .step import At, Legality, Source

if TYPE_CHECKING:
    from ..rewrite.binding import Binding


EXPERTS_HELD = "not known: how the routed experts hold their weights"
"""Of a mixture that nothing was said of, as the reason begins."""


@frozen(kw_only=True)
class Experts(Linear):
    """Both products of each chosen expert, what stands between them, and their sum. Its op writes where the engine says, so that it stands at a call alone."""

    roles = frozenset({EXPERTS})
    launches = "two launches"
    whose = "an expert's weight"

    out: str = ""

    @property
    def in_graphs(self) -> bool:
        return False

    def source(self, source: Source) -> Iterator[str]:
        given = (source.read(argument.name) for argument in self.op.args)
        yield f"{self.op.name}({', '.join(given)})"

    def why_not(self, at: At) -> Legality | None:
        experts = at.site.experts
        assert experts is not None, "a site of this role has a mixture"
        if at.declared and at.quant is None:
            return Legality("not_applicable", f"its experts take what they read as it is; {self.reads}")
        if experts.weight is None:
            return Legality("not_applicable", f"{EXPERTS_HELD}; {self.reads}")
        # What quantises inside of their kernels is what the op does as well.
        quant = None if at.quant is None else self.other_quant(at.quant)
        return self.other_weight(experts.weight) or (None if quant is None else Legality("not_applicable", quant))

    def described(self, at: At) -> str:
        return "both products of each chosen expert with their quantisation and their sum"

    def bind(self, bound: Binding) -> None:
        from ..match.errors import Unmatched

        raise Unmatched(f"{self.op.name} writes to what it is given, which no graph does")
