"""Where few tokens are multiplied by layerfuse in vLLM, from a plan alone. Needs neither torch nor vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...adapters.activation_quant import ActivationQuant
from ...adapters.specs import AnySpec, GQASpec, MLASpec, MLPSpec, ResidualSpec
from ...fusion.catalog import FUSIONS
from ...fusion.linear_ops import MOST
from ...fusion.planning import Plan
from ...fusion.sites import INPUT

ARCH = "sm90"
"""Where layerfuse's kernels were timed beside vLLM's."""

_LINEARS: dict[type[AnySpec], int] = {MLASpec: 3, GQASpec: 2, MLPSpec: 2}
"""Products of a layer with few tokens, as vLLM merges them: MLA's first projections or those of its query and latent, its second and its last
(what is left of its latents' is absorbed); query, key and value, and output; gate and up, and down."""


def looks_inside(plan: Plan) -> bool:
    """Whether a fusion is expected whose quantisation stands inside of a linear's op."""
    return any(quant.inside for quant in _quantised(plan))


def expects_products(plan: Plan) -> bool:
    """Whether a fusion is expected that quantises in groups for linears, and the GPU is none but those that layerfuse's products were timed on."""
    timed = plan.target.arch == ARCH or not plan.target.arch.startswith(("sm", "gfx"))
    return timed and any(quant.scheme == "group" for quant in _quantised(plan))


def _quantised(plan: Plan) -> Iterator[ActivationQuant]:
    """How linears quantise behind the quantised fusions that are expected."""
    quants = {site.name: plan.config.quant_at(site) for site in plan.sites}
    for each in plan.expected():
        quant = quants[each.site]
        if quant is not None and FUSIONS[each.fusion].format is not None:
            yield quant


def note(plan: Plan) -> str | None:
    """How many products of a step of few tokens are layerfuse's in a model that vLLM compiles, as a sentence; None: there are none.

    Linears of delta nets and Mamba-2 are not counted: a spec does not say which of them are quantised.
    """
    engine = plan.engine
    if engine is None or engine.name != "vllm" or engine.uncompiled is not None or plan.target.arch != ARCH:
        return None
    inside, shown = looks_inside(plan), expects_products(plan)
    read = {site.spec.layer_index: plan.config.quant_at(site) for site in plan.sites if site.role == INPUT}
    products = {site.layer: site for site in plan.sites if isinstance(site.spec, MLPSpec)}
    counts: Counter[bool] = Counter()
    for layer, spec in plan.specs:
        number = next((several for kind, several in _LINEARS.items() if isinstance(spec, kind)), 0)
        site = products.get(layer) if isinstance(spec, MLPSpec) else None
        quant = read.get(spec.layer_index) if site is None else plan.config.quant_at(site)
        shared = site is not None and site.experts is not None
        if quant is not None and quant.group_size == 128 and (inside if quant.inside else shown and not shared):
            counts[shared] += number
    if not counts.total():
        return None
    held = (
        spec.experts.weight for _, spec in plan.specs if isinstance(spec, ResidualSpec) and spec.experts is not None
    )
    routed = sum(each is not None and each.dtype == "float8_e4m3fn" and each.block == (128, 128) for each in held)
    beside = (
        f" Routed experts of {routed} layers are, with one token or two, where vLLM's Triton kernels multiply them."
        if routed
        else ""
    )
    apart = f", {counts[True]} of them in shared experts" if counts[True] else ""
    return f"With up to {MOST} tokens, {counts.total()} fp8 products of attention and MLPs in a step are layerfuse's{apart}.{beside}"
