"""One use of a plan's site in a graph, and all that a graph holds of a plan."""

from __future__ import annotations

from typing import Any

from attrs import define, field
from torch.fx import Node

from ..match.found import FoundNorm
from ..match.gates import FoundGatedNorm
from ..match.linears import FoundLinear
from ..match.products import FoundProduct
from ..match.values import value
from ..sites import QK, Site
from .attribution import Location
from .unknown_norms import UnknownNorm


@define(kw_only=True, eq=False)
class SiteMatch:
    """One use of a site in a graph: its norms, its product or its linear, or why it has none that can be replaced."""

    site: Site
    norms: tuple[FoundNorm, ...] = ()
    "In the order of the site's; empty where `problem` says why."
    product: FoundProduct | None = None
    "In place of norms: that of a gated MLP."
    linear: FoundLinear | None = None
    "In place of both: the product of a linear."
    problem: str | None = None
    how: str = "structure"
    weights: tuple[tuple[int, tuple[str, ...]], ...] = ()
    "As in `report.Use`."
    whole: bool = True
    "Whether the weights are always these: see `Parameter.whole`."

    @property
    def tokens(self) -> Any:
        """How many rows of the whole layer there are: a number, or one that varies."""
        made = self.linear or self.product
        rows = value(self.norms[0].x if made is None else made.out)
        heads = bool(self.norms) and (isinstance(self.norms[0], FoundGatedNorm) or self.site.role == QK)
        return rows.numel() // (self.site.quantised_width if heads else rows.shape[-1])

    @property
    def first(self) -> Node | None:
        """What places it among the uses of its graph: a result that it replaces."""
        made = self.linear or self.product
        if made is not None:
            return made.out
        return self.norms[0].out if self.norms else None


@define(kw_only=True)
class Found:
    """What a graph holds of a plan."""

    uses: list[SiteMatch] = field(factory=list)
    others: list[SiteMatch] = field(factory=list)
    "Of no known site, each as if it were one of those that take such a thing."
    loose: list[str] = field(factory=list)
    "Sentences on norms that look like a site's and could be assigned to none."
    strange: tuple[UnknownNorm, ...] = ()
    "Norms of the residual stream that belong to no layer that was read."

    @property
    def in_order(self) -> list[SiteMatch]:
        """The uses in graph order, those that cannot be replaced last."""
        placed = sorted((first, i) for i, use in enumerate(self.uses) if (first := use.first) is not None)
        return [*(self.uses[i] for _, i in placed), *(use for use in self.uses if use.first is None)]


def use_at(site: Site, where: tuple[Location, ...], **what: Any) -> SiteMatch:
    """A use of a site, from where its parts were found. `what`: the other fields of `SiteMatch`."""
    parameters = [each.parameter for each in where]
    known = [parameter for parameter in parameters if parameter is not None]
    return SiteMatch(
        site=site,
        **what,
        how=where[0].how,
        weights=tuple((parameter.position, parameter.names) for parameter in known),
        whole=all(parameter.whole for parameter in known),
    )
