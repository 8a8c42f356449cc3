"""The RMSNorm of a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from attrs import evolve, frozen

from ...adapters.specs import GatedNormSpec, NormSpec
from ..declare import Argument, Epsilon, Like, Result, Rows, Weight, WeightOffset
from ..kernel_source import later
from ..sites import LATENTS, STREAM
from .step import MIDDLE, At, Legality, Source, Step


@frozen(kw_only=True)
class Norm(Step):
    """An RMSNorm. `weight_offset` None: the op takes no zero-centred weights."""

    stage = MIDDLE
    roles = frozenset({*STREAM, LATENTS})
    is_norm = True

    x: str = "x"
    weight: str = "weight"
    epsilon: str = "epsilon"
    weight_offset: str | None = "weight_offset"
    out: str = "normed"
    latent: str = ""
    "What it norms, in words, where it is one of several."
    kept: bool = False
    "Whether the op gives the norm itself beside its quantisation, for its other readers."

    @classmethod
    def of(cls, name: str, latent: str = "") -> Self:
        """One norm of several: `of("q")` takes `q`, `q_weight`, `q_epsilon` and `q_weight_offset`, and gives `q`."""
        return cls(
            x=name,
            weight=f"{name}_weight",
            epsilon=f"{name}_epsilon",
            weight_offset=f"{name}_weight_offset",
            out=name,
            latent=latent or f"`{name}`",
        )

    @property
    def kernel(self) -> str:
        return "" if self.weight_offset is None else "norm"

    @property
    def is_kept(self) -> bool:
        return self.kept

    def keeping(self) -> Norm:
        return evolve(self, out=self.out if self.out == "normed" else f"{self.out}_normed", kept=True)

    def arguments(self) -> tuple[Argument, ...]:
        width = "width" if self.x == "x" else f"{self.x}_width"
        offset = () if self.weight_offset is None else (WeightOffset(name=self.weight_offset),)
        return (
            Rows(name=self.x, width=width, doc="(..., width): a view of columns goes in as it is."),
            Weight(name=self.weight, of=self.x),
            Epsilon(name=self.epsilon),
            *offset,
        )

    def results(self, of: str) -> tuple[Result, ...]:
        return (Like(name=self.out, of=self.x, doc="the norm, rounded once."),)

    def said(self, before: str, source: Source) -> str:
        if self.latent:
            return f"{before} and of {self.latent}" if before else f"RMSNorm of {self.latent}"
        return f"RMSNorm of `{before}`, and the sum itself" if before else "RMSNorm over the last dimension"

    def source(self, source: Source) -> Iterator[str]:
        offset = "0.0" if self.weight_offset is None else self.weight_offset
        yield f"made_{self.out} = _norm({source.read(self.x)}, {self.weight}, {self.epsilon}, {offset})"

    def why_not(self, at: At) -> Legality | None:
        several = len(at.site.norms) > 1
        which = f"{self.x} norm" if several else "the norm"
        if isinstance(at.norm, GatedNormSpec):
            return Legality("refused", f"{which} is gated, and the fused op takes plain norms only")
        if at.norm is not None and type(at.norm) is not NormSpec:
            return Legality("not_applicable", f"{which} is no RMSNorm: {type(at.norm).__name__}")
        offset = 0.0 if at.norm is None else at.norm.weight_offset
        if offset != 0.0 and self.weight_offset is None:
            return Legality(
                "refused",
                f"{which} is zero-centred (gemma style, weight_offset {offset}), and the fused op multiplies by the "
                "stored weight",
            )
        return None

    def described(self, at: At) -> str:
        return described(at)

    bind = later("layerfuse.fusion.rewrite.norms:bind_norm")


def described(at: At) -> str:
    """A norm of a site as plans say it."""
    norm = at.norm
    if norm is None:
        return "rms_norm"
    gate = f", {norm.activation} gate" if isinstance(norm, GatedNormSpec) else ""
    return f"rms_norm({norm.width}, epsilon {norm.epsilon:g}{gate})"
