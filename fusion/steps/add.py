"""The residual add in front of a norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from ..declare import Argument, Like, Result, Rows
from ..sites import STREAM
from .step import SOURCES, At, Legality, Source, Step

if TYPE_CHECKING:
    from ..rewrite.binding import Binding


@frozen(kw_only=True)
class Add(Step):
    """The residual add in front of a norm: `x + residual`, with the sum as a result of its own."""

    stage = SOURCES
    roles = frozenset(STREAM)
    adds = True

    x: str = "x"
    residual: str = "residual"
    out: str = "residual_out"

    def arguments(self) -> tuple[Argument, ...]:
        return (
            Rows(name=self.x, doc="(..., width): what attention or MLP gives."),
            Rows(name=self.residual, like=self.x, doc=f"of {self.x}'s shape: the residual stream."),
        )

    def results(self, of: str) -> tuple[Result, ...]:
        return (Like(name=self.out, of=of, doc=f"the sum, rounded to {of}'s dtype."),)

    def said(self, before: str, source: Source) -> str:
        return f"{before or self.x} + {self.residual}"

    def source(self, source: Source) -> Iterator[str]:
        yield f"made_{self.out} = _add({source.read(self.x)}, {source.read(self.residual)})"
        source.reads[self.x] = f"made_{self.out}"  # what follows reads the sum where it would have read x

    def why_not(self, at: At) -> Legality | None:
        if at.site.adds:
            return None
        return Legality("not_applicable", at.site.no_sum or "the first layer's input norm has no residual to add")

    def described(self, at: At) -> str:
        return "the residual add" if at.first else "residual add"

    def bind(self, bound: Binding) -> None:
        from ..match.adds import find_add

        found = bound.use.norms[0].add or find_add(bound.args[self.x])  # of what the norm reads
        bound.added = found
        bound.args |= {self.x: bound.now(found.x), self.residual: bound.now(found.residual)}
        if found.out is not None:
            bound.outs[self.out] = found.out
            bound.nodes.append(found.out)
