"""What a plan says of linears and experts with few tokens in vLLM. Needs neither torch nor vLLM."""

from __future__ import annotations

from ...adapters.specs import ResidualSpec
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


def runs_experts(plan: Plan) -> bool:
    """Whether routed experts of one token or two may be layerfuse's: where a chain that quantises in groups is expected, on the GPU that was timed."""
    formats = (FUSIONS[each.fusion].format for each in plan.expected())
    return plan.target.arch == TIMED and any(each is not None and each.word == "group" for each in formats)


def note(plan: Plan) -> str | None:
    """In how many layers the routed experts of one token or two are layerfuse's in vLLM, as a sentence; None: in none."""
    if plan.engine is None or plan.engine.uncompiled is not None or not runs_experts(plan):
        return None
    held = (
        spec.experts.weight for _, spec in plan.specs if isinstance(spec, ResidualSpec) and spec.experts is not None
    )
    routed = sum(each is not None and each.dtype == "float8_e4m3fn" and each.block == (128, 128) for each in held)
    if not routed:
        return None
    return f"Routed experts of {routed} layers are layerfuse's with one token or two, where vLLM's Triton kernels multiply them."
