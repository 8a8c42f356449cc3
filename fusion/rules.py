"""Which layer can take which fusion, as a table of small rules.

A rule looks at one spec, one target and one config, and answers in a sentence, whichever way it decides. It touches no
layer, no tensor and no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attrs import frozen

from ..adapters.specs import GatedNormSpec, KernelSpec, MLAKernelSpec, MLASpec, NormSpec
from .target import Target

if TYPE_CHECKING:
    from .config import FusionConfig

Kind = Literal["expected", "refused", "not_applicable"]
"""`refused`: the layer has the sites but may not take the fusion. `not_applicable`: it has no such thing."""

FP8_FORMATS = ("e4m3fn", "e4m3fnuz")
"""What a quantising fusion can write; `Target.fp8` is one of them where it can run."""


class Verdict(NamedTuple):
    """What a rule answers."""

    kind: Kind
    reason: str


@frozen(kw_only=True)
class Fusion:
    """One fusion: its name, what it does, the optimisation level that turns it on, and its rule."""

    name: str
    doc: str
    level: int
    "1: changes at most the order and number of float roundings. 2: changes numerics, such as quantisation."
    rule: Callable[[Any, Target, FusionConfig], Verdict]
    scheme: str | None = None
    "The activation quantisation that this fusion takes in, as `ActivationQuant.scheme` names it; None: none."
    fallback: str | None = None
    "The fusion that takes a site where this one was expected and missed in the graph."


def mla_dual_rms_norm(spec: Any, target: Target, config: FusionConfig) -> Verdict:
    """The norms of an MLA layer's query and key/value latents become one kernel launch."""
    verdict = _pair(spec, target)
    if verdict.kind != "expected":
        return verdict
    for fusion in FUSIONS.values():
        if fusion.scheme is not None and config.why_off(fusion) is None:
            taken = fusion.rule(spec, target, config)
            if taken.kind == "expected":
                return Verdict("not_applicable", f"{fusion.name} takes the pair")
    return verdict


def mla_dual_rms_norm_per_token_quant(spec: Any, target: Target, config: FusionConfig) -> Verdict:
    """The same launch also quantises the normed query latent to fp8, with one scale per token."""
    return _quantised("per_token", spec, target, config)


def mla_dual_rms_norm_group_quant(spec: Any, target: Target, config: FusionConfig) -> Verdict:
    """The same launch also quantises the normed query latent to fp8, with one scale per group of columns."""
    return _quantised("group", spec, target, config)


def _quantised(scheme: str, spec: Any, target: Target, config: FusionConfig) -> Verdict:
    pair, quant = _pair(spec, target), config.quant
    if pair.kind != "expected":
        return pair
    if quant is None:
        return Verdict("not_applicable", "FusionConfig.quant is None: nobody said that the query latent is quantised")
    if quant.scheme != scheme:
        return Verdict(
            "not_applicable", f"FusionConfig.quant says {quant}: mla_dual_rms_norm_{quant.scheme}_quant's case"
        )
    if target.fp8 not in FP8_FORMATS:
        return Verdict(
            "refused",
            f"{target} has {'no fp8 format' if target.fp8 is None else 'fp8 ' + target.fp8}, and "
            f"the fused op writes {' or '.join(FP8_FORMATS)}",
        )
    width = spec.q_norm.width
    if quant.group_size is not None and width % quant.group_size:
        return Verdict(
            "refused",
            f"the query latent is {width} wide, which is no multiple of the {quant.group_size} "
            "columns that share a scale",
        )
    return Verdict("expected", f"{pair.reason}, the query in {target.fp8} with {quant}")


def _pair(spec: Any, target: Target) -> Verdict:
    """Whether the layer has two latent norms that one launch can take."""
    if isinstance(spec, MLAKernelSpec):
        return Verdict("refused", f"an inner kernel layer knows no norms; ask {spec.outer}")
    if isinstance(spec, KernelSpec) or not isinstance(spec, MLASpec):
        return Verdict("not_applicable", f"{type(spec).__name__} describes no latent norms; only MLA layers have them")
    if spec.q_norm is None:
        return Verdict("not_applicable", "q_lora_rank is None: there is no query latent norm to pair")
    for name, norm in (("q_norm", spec.q_norm), ("kv_norm", spec.kv_norm)):
        problem = _not_plain(norm)
        if problem is not None:
            return Verdict("refused", f"{name} {problem}")
    return Verdict("expected", f"{_norm(spec.q_norm)} and {_norm(spec.kv_norm)} are one launch on {target}")


def _not_plain(norm: NormSpec) -> str | None:
    if isinstance(norm, GatedNormSpec):
        return "is gated, and the fused op takes plain norms only"
    if norm.weight_offset != 0.0:
        return (
            f"is zero-centred (gemma style, weight_offset {norm.weight_offset}), and the fused op multiplies by the "
            "stored weight"
        )
    return None


def _norm(norm: NormSpec) -> str:
    return f"rms_norm({norm.width}, epsilon {norm.epsilon:g})"


FUSIONS: dict[str, Fusion] = {
    fusion.name: fusion
    for fusion in (
        Fusion(
            name="mla_dual_rms_norm",
            doc="one kernel for the norms of an MLA layer's query and key/value latents",
            level=1,
            rule=mla_dual_rms_norm,
        ),
        Fusion(
            name="mla_dual_rms_norm_per_token_quant",
            doc="the same, and the query latent comes out in fp8 with one scale per token",
            level=2,
            rule=mla_dual_rms_norm_per_token_quant,
            scheme="per_token",
            fallback="mla_dual_rms_norm",
        ),
        Fusion(
            name="mla_dual_rms_norm_group_quant",
            doc="the same, and the query latent comes out in fp8 with one scale per group of columns",
            level=2,
            rule=mla_dual_rms_norm_group_quant,
            scheme="group",
            fallback="mla_dual_rms_norm",
        ),
    )
}
"""Every fusion, by name, in the order in which plans list them."""
