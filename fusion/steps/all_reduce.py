"""The sum over the ranks in front of a residual add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from ..declare import Argument, GroupName, Result, Rows
from ..kernel_source import later
from ..sites import STREAM
from .add import Add
from .step import SOURCES, At, Legality, Source, Step


@frozen(kw_only=True)
class AllReduce(Step):
    """The sum over the ranks of a process group, in the order of the ranks and in float32: all of them get the same bits."""

    stage = SOURCES
    roles = frozenset(STREAM)
    across_ranks = True

    x: str = "x"
    group: str = "group"

    def arguments(self) -> tuple[Argument, ...]:
        return (
            Rows(name=self.x, doc="(..., width): this rank's part of the sum; every rank gives the same shape."),
            GroupName(name=self.group),
        )

    def results(self, of: str) -> tuple[Result, ...]:
        return ()

    def said(self, before: str, source: Source) -> str:
        return f"all-reduce of {self.x},"

    def source(self, source: Source) -> Iterator[str]:
        yield f"reduced_{self.x} = _all_reduce({source.read(self.x)}, {self.group})"
        source.reads[self.x] = f"reduced_{self.x}"

    def why_not_in(self, chain: Sequence[Step]) -> str | None:
        return None if self.add_of(chain) is not None else "AllReduce stands in front of Add"

    def add_of(self, chain: Sequence[Step]) -> Add | None:
        """The add that it stands in front of."""
        behind = chain[chain.index(self) + 1 :]
        return behind[0] if behind and isinstance(behind[0], Add) else None

    def why_not(self, at: At) -> Legality | None:
        if at.site.reduced == 1:
            return Legality(
                "not_applicable", "what joins the residual here is whole on every rank: there is nothing to reduce"
            )
        if at.site.reduced == 0:
            return Legality(
                "not_applicable",
                "a norm or a factor stands between the all-reduce and the residual add: it is not added as it is",
            )
        return None

    def described(self, at: At) -> str:
        return f"all-reduce over {at.site.reduced} ranks"

    bind = later("layerfuse.fusion.rewrite.reduced:bind_all_reduce")
