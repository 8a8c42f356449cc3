"""Linears with few tokens in an engine that no graph shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from attrs import define, field

from ..fusion.rewrite.linears import UNREAD
from .placement import Placement


@define(kw_only=True, eq=False)
class AtSeams(Placement):
    """Linears that no graph shows, with layerfuse's product at a seam of each."""

    counts: Mapping[str, Counter[str]] = field(repr=False)
    "Site -> op -> calls so far, kept up where ops are called."
    left: Mapping[str, str] = field(factory=dict)
    "Site -> why nothing of layerfuse's stands there after all."

    def calls(self) -> Mapping[str, Counter[str]]:
        """As they are now: they go on."""
        return {site: calls.copy() for site, calls in self.counts.items()}

    def why_left(self, site: str, run: str) -> str:
        """Why nothing stands there, or that nothing of what does was called."""
        return self.left.get(site) or f"the {run} did not come to its product, or {UNREAD}"
