"""The rope of the query's and the key's heads, and the norm of each head in front of it."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from ...adapters.specs import GQASpec
from ..declare import PAIRS, Argument, Choice, Like, OptionalIndex, Result, Rows, Table
from ..kernel_source import later
from ..sites import QK
from .norm import Norm
from .step import MIDDLE, At, Legality, Source, Step


@frozen(kw_only=True)
class HeadNorm(Norm):
    """An RMSNorm of each head, of the query or of the key, which have as wide heads and not as many."""

    roles = frozenset({QK})

    def arguments(self) -> tuple[Argument, ...]:
        rows, *others = Norm.arguments(self)
        doc = "(..., heads, width), normed head by head; a view of columns goes in as it is."
        return (Rows(name=rows.name, heads=True, own_heads=True, doc=doc), *others)

    bind = later("layerfuse.fusion.rewrite.ropes:bind_head_norm")


@frozen(kw_only=True)
class Rope(Step):
    """The rotary position embedding of both, by one position for each token (RoFormer, arXiv 2104.09864)."""

    stage = MIDDLE
    roles = frozenset({QK})
    kernel = "rope"

    q: str = "q"
    k: str = "k"
    cos: str = "cos"
    sin: str = "sin"
    positions: str = "positions"
    pairs: str = "pairs"

    @property
    def outs(self) -> tuple[str, ...]:
        return (self.q, self.k)

    @property
    def takes(self) -> tuple[str, ...]:
        return (self.q, self.k)

    def arguments(self) -> tuple[Argument, ...]:
        half = "(positions, half of the columns that are turned), floating: the rope's attention scaling is in it."
        pairs = "which columns are turned together: halves (i and i + half) or interleaved (2i and 2i + 1)."
        return (
            Table(name=self.cos, of=self.q, partial=True, doc=half),
            Table(name=self.sin, of=self.q, partial=True, doc=f"of the shape of {self.cos}."),
            OptionalIndex(
                name=self.positions,
                of=self.q,
                doc=f"(tokens,), int32 or int64: the row of {self.cos} and {self.sin} that each token takes. None: token t takes row t, "
                "counted anew behind the last row.",
            ),
            Choice(name=self.pairs, words=(PAIRS[1], PAIRS[0]), doc=pairs),
        )

    def results(self, of: str) -> tuple[Result, ...]:
        return tuple(Like(name=name, of=name, doc="normed and turned, rounded once.") for name in self.outs)

    def said(self, before: str, source: Source) -> str:
        return f"{before}, and the rope of both"

    def source(self, source: Source) -> Iterator[str]:
        for name in self.outs:
            yield f"made_{name} = _rope(made_{name}, {self.cos}, {self.sin}, {self.positions}, {self.pairs})"

    def why_not(self, at: At) -> Legality | None:
        spec = at.site.spec
        rope = spec.rope if isinstance(spec, GQASpec) else None
        if rope is None:
            return Legality("not_applicable", "not known: nothing says how the heads of this layer are turned")
        if rope.width == 0:
            return Legality("not_applicable", "the heads of this layer are not turned")
        return None

    def described(self, at: At) -> str:
        spec = at.site.spec
        rope = spec.rope if isinstance(spec, GQASpec) else None
        return "rope" if rope is None else f"the rope of {rope.width} columns"

    bind = later("layerfuse.fusion.rewrite.ropes:bind_rope")
