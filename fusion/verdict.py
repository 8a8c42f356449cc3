"""Whether one fusion can stand at one site, from the site, the target and the quantisation alone.

Switches, engines and other fusions are not looked at: that is `plan`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..adapters.activation_quant import ActivationQuant
from ..adapters.specs import GatedNormSpec, NormSpec
from .chain import Fusion
from .sites import Site
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
    for step, norm in zip(fusion.norms, site.norms, strict=True):
        problem = _not_plain(norm, step.weight_offset is not None)
        if problem is not None:
            return Verdict("refused", f"{step.x if len(site.norms) > 1 else 'the'} norm {problem}")
    norms = " and ".join(_described(norm) for norm in site.norms)
    what = f"the residual add and {norms}" if fusion.add is not None else norms
    verb = "are" if fusion.add is not None or len(site.norms) > 1 else "is"
    if fusion.quant is None:
        return Verdict("expected", f"{what} {verb} one launch on {target}")
    if quant is None:
        return Verdict(
            "not_applicable", f"the linears that read the {site.role} site are not known to quantise their activations"
        )
    if quant.scheme != fusion.quant.scheme:
        return Verdict("not_applicable", f"the linears that read the {site.role} site quantise with {quant}")
    if target.fp8 not in FP8_FORMATS:
        return Verdict(
            "refused",
            f"{target} has {'no fp8 format' if target.fp8 is None else 'fp8 ' + target.fp8}, and "
            f"the fused op writes {' or '.join(FP8_FORMATS)}",
        )
    width = site.norms[0].width
    if quant.group_size is not None and width % quant.group_size:
        return Verdict(
            "refused",
            f"the quantised tensor is {width} wide, which is no multiple of the {quant.group_size} columns that share a "
            "scale",
        )
    return Verdict("expected", f"{what} {verb} one launch on {target}, the first in {target.fp8} with {quant}")


def _not_plain(norm: NormSpec, takes_offset: bool) -> str | None:
    if isinstance(norm, GatedNormSpec):
        return "is gated, and the fused op takes plain norms only"
    if norm.weight_offset != 0.0 and not takes_offset:
        return (
            f"is zero-centred (gemma style, weight_offset {norm.weight_offset}), and the fused op multiplies by the "
            "stored weight"
        )
    return None


def _described(norm: NormSpec) -> str:
    return f"rms_norm({norm.width}, epsilon {norm.epsilon:g})"
