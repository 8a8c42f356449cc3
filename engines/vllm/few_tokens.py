"""What a plan says of products with few tokens in vLLM. Needs neither torch nor vLLM."""

from __future__ import annotations

from ...fusion.catalog import FUSIONS
from ...fusion.planning import Plan


def looks_inside(plan: Plan) -> bool:
    """Whether a quantisation that stands inside of a linear's op is taken out: for a chain in front, or for the linear's product."""
    quants = {site.name: plan.config.quant_at(site) for site in plan.sites}
    of_linears = {site.name for site in plan.sites if site.linear is not None}
    return any(
        (quant := quants[each.site]) is not None
        and quant.inside
        and (each.site in of_linears or FUSIONS[each.fusion].format is not None)
        for each in plan.expected()
    )
