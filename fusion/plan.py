"""Which layer takes which fusion on a target, and why not: pure, from specs alone.

No torch, no GPU, no layer: the answer comes before the model exists, and everything later is held to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

import attrs
from attrs import field, frozen

from ..adapters.specs import AnySpec, KernelSpec, ResidualSpec
from .config import FusionConfig
from .rules import FUSIONS, Kind
from .target import Target

Placed: TypeAlias = "AnySpec | tuple[str, AnySpec]"
"""A spec, or a spec with the path of its layer in the model."""


@frozen(kw_only=True)
class Decision:
    """One fusion at one layer."""

    layer: str
    "The layer's path in the model, or `layer 3` where no path was given."
    fusion: str
    kind: Kind
    reason: str
    "A sentence, whichever way it was decided."

    @property
    def applies(self) -> bool:
        """Whether the fusion is expected to happen here."""
        return self.kind == "expected"

    def __str__(self) -> str:
        return f"{self.layer}: {self.fusion}: {self.kind.replace('_', ' ')}: {self.reason}"


@frozen(kw_only=True)
class Plan:
    """The decisions for a model: layer by layer in the order given, fusions in the order of `rules.FUSIONS`."""

    target: Target
    config: FusionConfig
    specs: tuple[tuple[str, AnySpec], ...] = field(repr=False)
    decisions: tuple[Decision, ...] = field(repr=False)

    def of(self, layer: str) -> tuple[Decision, ...]:
        """The decisions for one layer; empty where the plan has no such layer."""
        return tuple(decision for decision in self.decisions if decision.layer == layer)

    def _kind(self, kind: Kind, fusion: str | None) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if d.kind == kind and fusion in (None, d.fusion))

    def expected(self, fusion: str | None = None) -> tuple[Decision, ...]:
        """Where this fusion (or any) will happen."""
        return self._kind("expected", fusion)

    def refused(self, fusion: str | None = None) -> tuple[Decision, ...]:
        """Where it could be thought to happen but may not."""
        return self._kind("refused", fusion)

    def not_applicable(self, fusion: str | None = None) -> tuple[Decision, ...]:
        """Where the layer has no such thing."""
        return self._kind("not_applicable", fusion)

    def expected_specs(self, fusion: str) -> tuple[tuple[str, Any], ...]:
        """(layer, spec) of the layers that will take this fusion: what a pass is built from."""
        layers = {decision.layer for decision in self.expected(fusion)}
        return tuple((layer, spec) for layer, spec in self.specs if layer in layers)

    def fallback_specs(self, fusion: str) -> tuple[tuple[str, Any], ...]:
        """(layer, spec) of the layers expected to take a fusion that falls back to this one; none where it is off."""
        if self.config.why_off(FUSIONS[fusion]) is not None:
            return ()
        return tuple(
            placed
            for other in FUSIONS.values()
            if other.fallback == fusion
            for placed in self.expected_specs(other.name)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "target": self.target.to_dict(),
            "config": self.config.to_dict(),
            "decisions": [attrs.asdict(decision) for decision in self.decisions],
        }

    def __str__(self) -> str:
        lines = [f"plan for {self.target}:"]
        for name in (fusion.name for fusion in FUSIONS.values() if self.config.concerns(fusion)):
            lines.append(
                f"  {name}: {len(self.expected(name))} expected, {len(self.refused(name))} refused, "
                f"{len(self.not_applicable(name))} not applicable"
            )
            # Layers of one kind give the same answer; saying it once per kind keeps 61 layers readable.
            reasons = Counter((d.kind, d.reason) for d in self.decisions if d.fusion == name)
            for (kind, reason), count in reasons.items():
                lines.append(f"    {count} x {kind.replace('_', ' ')}: {reason}")
        return "\n".join(lines)


def plan(specs: Iterable[Placed], target: Target, config: FusionConfig | None = None) -> Plan:
    """Decide every fusion for every layer.

    Args:
        specs: specs, or (path, spec) pairs as `registry.specs_in` yields them.
        target: what the kernels will run on.
        config: what is wanted; the default config if not given. The environment is not read here:
            pass `FusionConfig.from_environment()` for that.

    Raises:
        ValueError: two specs claim the same layer.
    """
    config = FusionConfig() if config is None else config
    placed = tuple(spec if isinstance(spec, tuple) else (_label(spec), spec) for spec in specs)
    twice = [layer for layer, count in Counter(layer for layer, _ in placed).items() if count > 1]
    if twice:
        raise ValueError(f"{len(twice)} layers have more than one spec ({twice[0]!r}, ...); give (path, spec) pairs")
    decisions = []
    off = {fusion.name: config.why_off(fusion) for fusion in FUSIONS.values()}
    for layer, spec in placed:
        for fusion in FUSIONS.values():
            kind, reason = fusion.rule(spec, target, config)
            switched_off = off[fusion.name]
            if kind == "expected" and switched_off is not None:
                kind, reason = "refused", switched_off
            decisions.append(Decision(layer=layer, fusion=fusion.name, kind=kind, reason=reason))
    return Plan(target=target, config=config, specs=placed, decisions=tuple(decisions))


def _label(spec: AnySpec) -> str:
    if isinstance(spec, KernelSpec):
        return f"layer {spec.layer_index} kernel"
    return f"layer {spec.layer_index} residual" if isinstance(spec, ResidualSpec) else f"layer {spec.layer_index}"
