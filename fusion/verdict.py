"""Whether one fusion can stand at one site, from the site, the target and the quantisation alone.

Switches, engines and other fusions are not looked at: that is `plan`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..adapters.activation_quant import ActivationQuant
from ..adapters.specs import GatedMLPSpec, GatedNormSpec, NormSpec
from .chain import Fusion
from .sites import Site
from .steps import GATES, GatedNorm, Norm
from .target import Target

Kind = Literal["expected", "fallback", "refused", "not_applicable"]
"""`fallback`: another fusion is expected there, and this one is taken where that one is missed. `refused`: the site has
the steps and may not take the fusion. `not_applicable`: it has no such steps."""

FP8_FORMATS = ("e4m3fn", "e4m3fnuz")
"""What a quantising fusion can write; `Target.fp8` is one of them where it can run."""


class Verdict(NamedTuple):
    """What one fusion is at one site, before the others are looked at."""

    kind: Kind
    reason: str


def verdict(fusion: Fusion, site: Site, target: Target, quant: ActivationQuant | None) -> Verdict:
    """Whether a site has the steps of a fusion's chain, and the target takes them. Switches are not looked at."""
    if site.absent is not None:
        return Verdict("not_applicable", site.absent)
    if site.unknown is not None:
        return Verdict("refused", site.unknown)
    if fusion.add is not None and not site.adds:
        return Verdict("not_applicable", "the first layer's input norm has no residual to add")
    if fusion.all_reduce is not None and site.reduced == 1:
        return Verdict(
            "not_applicable", "what joins the residual here is whole on every rank: there is nothing to reduce"
        )
    if fusion.all_reduce is not None and site.reduced == 0:
        return Verdict(
            "not_applicable",
            "a norm or a factor stands between the all-reduce and the residual add: it is not added as it is",
        )
    for step, norm in zip(fusion.norms, site.norms, strict=True):
        problem = _misfit(step, norm)
        if problem is not None:
            return Verdict("refused", f"{step.x if len(site.norms) > 1 else 'the'} norm {problem}")
    if isinstance(site.spec, GatedMLPSpec) and site.spec.activation != "silu":
        return Verdict("refused", f"its gate passes through {site.spec.activation}; the fused op knows silu")
    what, several = _described(fusion, site)
    verb = "are" if several else "is"
    if fusion.quant is None:
        return Verdict("expected", f"{what} {verb} one launch on {target}")
    if quant is None:
        if site.unquantised is not None:
            counted = "" if site.quantising is None else f" ({site.quantising})"
            why = f"the linears that read the {site.role} site agree on no quantisation that a fusion knows{counted}: {site.unquantised}"
            return Verdict("not_applicable", why)
        return Verdict(
            "not_applicable", f"the linears that read the {site.role} site are not known to quantise their activations"
        )
    if quant.scheme != fusion.quant.scheme:
        return Verdict("not_applicable", f"the linears that read the {site.role} site quantise with {quant}")
    problem = _why_not_quantised(site, target, quant)
    if problem is not None:
        return Verdict("refused", problem)
    which = "the first " if len(site.norms) > 1 else ""
    fp8 = f"in {quant}" if fusion.quant.mx else f"in {target.fp8} with {quant}"
    return Verdict("expected", f"{what} {verb} one launch on {target}, {which}{fp8}")


def _why_not_quantised(site: Site, target: Target, quant: ActivationQuant) -> str | None:
    width = site.quantised_width
    if quant.fixed in ("mxfp8", "mxfp4"):
        if not target.mx:
            return f"{target} has no MX formats; gfx950, gfx1250 and sm100 have"
        return f"the quantised tensor is {width} wide, which is no multiple of 32" if width % 32 else None
    if target.fp8 not in FP8_FORMATS:
        return (
            f"{target} has {'no fp8 format' if target.fp8 is None else 'fp8 ' + target.fp8}, and "
            f"the fused op writes {' or '.join(FP8_FORMATS)}"
        )
    if quant.group_size is None:
        return None
    if width % quant.group_size:
        return (
            f"the quantised tensor is {width} wide, which is no multiple of the {quant.group_size} columns that share a "
            "scale"
        )
    if site.norms and isinstance(site.norms[0], GatedNormSpec) and site.norms[0].width % quant.group_size:
        return f"groups of {quant.group_size} columns straddle heads of {site.norms[0].width}"
    return None


def _misfit(step: Norm | GatedNorm, norm: NormSpec) -> str | None:
    if isinstance(step, GatedNorm):
        if not isinstance(norm, GatedNormSpec):
            return "is not gated"
        if norm.activation not in GATES:
            return f"has a gate of {norm.activation}; the fused op knows {' and '.join(GATES)}"
        if norm.group_size not in (None, norm.width):
            return f"takes its variance over {norm.group_size} columns of {norm.width}, and the fused op over all of a head"
        return None
    if isinstance(norm, GatedNormSpec):
        return "is gated, and the fused op takes plain norms only"
    if norm.weight_offset != 0.0 and step.weight_offset is None:
        return (
            f"is zero-centred (gemma style, weight_offset {norm.weight_offset}), and the fused op multiplies by the "
            "stored weight"
        )
    return None


def _described(fusion: Fusion, site: Site) -> tuple[str, bool]:
    """What becomes one launch, and whether that is several things."""
    if not site.norms:
        return f"silu(gate) * up of {site.quantised_width} columns", False
    norms = " and ".join(map(_norm, site.norms))
    if fusion.all_reduce is not None:
        return f"all-reduce over {site.reduced} ranks, residual add and {norms}", True
    if fusion.add is not None:
        return f"the residual add and {norms}", True
    return norms, len(site.norms) > 1


def _norm(norm: NormSpec) -> str:
    gate = f", {norm.activation} gate" if isinstance(norm, GatedNormSpec) else ""
    return f"rms_norm({norm.width}, epsilon {norm.epsilon:g}{gate})"
