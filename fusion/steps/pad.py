"""Columns of zeros behind a norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from ..declare import Argument, Padded, PaddedWidth, Result
from ..sites import STREAM
from .step import SINKS, At, Legality, Source, Step

if TYPE_CHECKING:
    from ..rewrite.binding import Binding
    from ..rewrite.uses import SiteMatch


@frozen(kw_only=True)
class Pad(Step):
    """Columns of zeros behind a norm, for kernels that take only certain widths."""

    stage = SINKS
    roles = frozenset(STREAM)
    kernel = "pad"

    width: str = "padded_width"
    out: str = "padded"

    def arguments(self) -> tuple[Argument, ...]:
        return (PaddedWidth(name=self.width),)

    def results(self, of: str) -> tuple[Result, ...]:
        return (Padded(name=self.out, of=of, doc="the norm with zeros behind it."),)

    def said(self, before: str, source: Source) -> str:
        return f"{before}, padded with zeros"

    def source(self, source: Source) -> Iterator[str]:
        yield f"made_{self.out} = _pad({source.main.rows}, {self.width})"

    def why_not(self, at: At) -> Legality | None:
        return None

    def described(self, at: At) -> str:
        return "padded"

    def bind(self, bound: Binding) -> None:
        from ..match.pads import find_pads
        from ..rewrite.pad_results import PaddedResults

        out = bound.use.norms[0].out
        found = find_pads(out)
        plan = PaddedResults(found, out, bound.sources)
        bound.args[self.width] = found.width
        bound.last += [out, *found.pads]
        bound.finish.append(lambda given: plan.replace(given[self.out]))

    def is_left(self, use: SiteMatch) -> bool:
        from ..match.pads import is_padded

        return is_padded(use.norms[0].out)
