"""Which layer can take which fusion, as a table of small rules.

A rule looks at one spec and one target and answers in a sentence, whichever way it decides. It touches no layer, no
tensor and no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from attrs import frozen

from ..adapters.specs import GatedNormSpec, KernelSpec, MLAKernelSpec, MLASpec, NormSpec
from .target import Target

Kind = Literal["expected", "refused", "not_applicable"]
"""`refused`: the layer has the sites but may not take the fusion. `not_applicable`: it has no such thing."""


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
    rule: Callable[[Any, Target], Verdict]


def mla_dual_rms_norm(spec: Any, target: Target) -> Verdict:
    """The norms of an MLA layer's query and key/value latents become one kernel launch."""
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
    )
}
"""Every fusion, by name, in the order in which plans list them."""
