"""What a plan says of linears and experts with few tokens in vLLM. Needs neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Collection

from ...adapters.specs import ResidualSpec
from ...fusion.catalog import FUSIONS
from ...fusion.catalog.few_token_linear import BLOCKS, TIMED
from ...fusion.chain import Fusion
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
    """What is on by default on a GPU where these fusions are: the linears in blocks go with what quantises for them."""
    return (BLOCKS,) if arch == TIMED and any(name in FUSIONS and _in_groups(FUSIONS[name]) for name in names) else ()


def _in_groups(fusion: Fusion) -> bool:
    return fusion.format is not None and fusion.format.word == FUSIONS[BLOCKS].goes_with


def runs_experts(plan: Plan) -> bool:
    """Whether routed experts of one token or two may be layerfuse's: where a chain that quantises in groups is expected, on the GPU that was timed.

    What switches the linears in blocks off leaves these to vLLM too.
    """
    if dict(plan.config.switches).get(BLOCKS) is False:
        return False
    return plan.target.arch == TIMED and any(_in_groups(FUSIONS[each.fusion]) for each in plan.expected())


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
