"""Where a fusion was measured faster than what an engine does without it: what makes it on by default there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import field, frozen

from ..adapters.activation_quant import ActivationQuant
from ..adapters.errors import shown
from ..adapters.specs import KernelSpec
from .sites import Site
from .steps import FusionError
from .target import Target


def _archs(several: Iterable[str]) -> tuple[str, ...]:
    found = () if isinstance(several, str) else tuple(several)
    if not found:
        raise FusionError(
            f"Faster.archs: expected the architectures that it was measured on, as ('sm90',), got {shown(several)}"
        )
    return found


def _text(_instance: Any, _attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise FusionError(f"Faster.figure: expected the measurement in words, got {shown(value)}")


@frozen(kw_only=True)
class Faster:
    """One measurement. Where its conditions hold, the fusion is on in that engine unless it is switched off.

    Write the fields as plain texts and numbers: the plugin for vLLM reads them off the source.
    """

    engine: str
    archs: tuple[str, ...] = field(converter=_archs)
    "The architectures that it was measured on, as `Target.arch` names them."
    figure: str = field(validator=_text)
    "The measurement, as it is to be read in plans and docs: `1.06 times faster per decode step (vLLM 0.26, H200, TP 4, batch 8)`."
    quant: str | None = None
    "Only where what reads the site quantises like this: a word of `ActivationQuant.scheme`. None: however it does."
    ranks: int = 1
    "Only from this tensor-parallel size on."
    unless: str | None = None
    "A fusion: only where the engine does not do that itself, as in the measurement."
    compiled: bool = True
    "Whether the engine compiled the model. False: it did not, and the fusion stood at module level."

    @property
    def where(self) -> str:
        """The conditions in words."""
        quant = [] if self.quant is None else [f"where activations are quantised {self.quant.replace('_', ' ')}"]
        ranks = [] if self.ranks == 1 else [f"from {self.ranks} ranks on"]
        unless = [] if self.unless is None else [f"where {self.engine} does not do {self.unless} itself"]
        eager = [] if self.compiled else ["where nothing is compiled"]
        return ", ".join([" and ".join(self.archs), *quant, *ranks, *unless, *eager])

    def holds(self, target: Target, site: Site, quant: ActivationQuant | None) -> bool:
        """Whether a site is one that the measurement speaks of."""
        scheme = None if quant is None else quant.scheme
        return (
            target.arch in self.archs
            and self.quant in (None, scheme)
            and not isinstance(site.spec, KernelSpec)
            and site.spec.parallel.size >= self.ranks
        )
