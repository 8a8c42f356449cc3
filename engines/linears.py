"""Linears with few tokens that no graph shows: layerfuse's products at seams of an engine, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from attrs import define, field

from ..fusion.report import Use
from ..fusion.rewrite.linears import UNREAD


@define(kw_only=True)
class AtSeams:
    """Linears that no graph shows, with layerfuse's product at a seam of each."""

    fusion: str
    calls: Callable[[], Mapping[str, Counter[str]]] = field(repr=False)
    "Site -> op -> calls so far."
    left: Mapping[str, str] = field(factory=dict)
    "Site -> why nothing of layerfuse's stands there after all."
    ran: dict[str, Counter[str]] = field(factory=dict)
    "The same of the first run."

    def uses(self, run: str) -> Iterator[Use]:
        """What that run was; `run`: as `CompiledModule.run`."""
        for site, calls in self.ran.items():
            yield from (Use(site=site, fused=self.fusion, form=op, how="module") for op in calls.elements())
            if not calls.total():
                why = self.left.get(site) or f"the {run} did not come to its product, or {UNREAD}"
                yield Use(site=site, fused=None, missed={self.fusion: why}, how="module")
