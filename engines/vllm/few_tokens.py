"""What a plan says of products with few tokens in vLLM. Needs neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Collection

from ...fusion.catalog import FUSIONS
from ...fusion.catalog.few_token_linear import TIMED
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


def beside(names: Collection[str], arch: str) -> tuple[str, ...]:
    """What is on by default on a GPU where these fusions are: products go with what quantises for them, and some with those."""
    on = {*names, *(form.word for name in names if name in FUSIONS and (form := FUSIONS[name].format) is not None)}
    found: dict[str, None] = {}
    for fusion in FUSIONS.values() if arch == TIMED else ():
        if fusion.goes_with in (on | found.keys()):
            found[fusion.name] = None
    return tuple(found)
