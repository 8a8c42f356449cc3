"""What came of a plan: for each fusion, where it was expected, where it happened, and why it did not elsewhere.

Passes add one record per compiled graph; the verdict for a layer is drawn from all of them, so a recompilation that
loses a layer shows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
from attrs import field, frozen

from ..adapters.errors import LayerfuseError
from .plan import Plan
from .rules import FUSIONS


@frozen(kw_only=True)
class Match:
    """One rewritten site."""

    layer: str
    how: str
    "How the site was tied to its layer: parameter, module path, or structure alone."
    frame: str = ""
    "The module whose forward the graph was traced from, where that is not the model; its siblings may share the graph."


@frozen(kw_only=True)
class GraphRecord:
    """What one pass did to one graph."""

    fusion: str
    graph: int
    "0-based, in order of compilation."
    matched: tuple[Match, ...]
    missed: dict[str, str] = field(factory=dict)
    "Layers whose norms are in this graph and were not fused, with the reason."
    unattributed: tuple[str, ...] = ()
    "Sentences on sites that resemble this fusion's and could be tied to no layer."


class FusionMissedError(LayerfuseError, RuntimeError):
    """Expected fusions that did not happen, or layers of which nothing can be expected.

    `missed` maps fusion to layer to reason; `unknown` maps a layer that looks like attention to its unknown class.
    """

    def __init__(self, missed: dict[str, dict[str, str]], unknown: dict[str, str] | None = None) -> None:
        self.missed = missed
        self.unknown = {} if unknown is None else unknown
        super().__init__(missed, self.unknown)

    def __str__(self) -> str:
        lines = []
        for fusion, layers in self.missed.items():
            lines.append(f"{fusion} was expected and did not happen in {len(layers)} layers:")
            lines += [f"  - {layer}: {reason}" for layer, reason in layers.items()]
        if self.unknown:
            lines.append("Nobody can say what these layers should fuse, since no adapter knows their class:")
            lines += [f"  - {layer}: {name}" for layer, name in self.unknown.items()]
            lines.append(
                "Declare the class in a models.toml entry, or pass specs= to leave such layers out on purpose."
            )
        if self.missed:
            lines.append("Switch the fusion off in FusionConfig, or compile with strict=False, if that is acceptable.")
        return "\n".join(lines)


@frozen(kw_only=True)
class FusionReport:
    """One fusion over all graphs so far."""

    fusion: str
    expected: tuple[str, ...]
    "Layers, in the plan's order."
    matched: tuple[str, ...]
    "Layers fused in every graph that holds their sites."
    missed: dict[str, str]
    "Expected layers that are not matched, with the reason."
    refused: dict[str, str]
    "`missed`, and the layers that the plan itself refused."
    not_applicable: dict[str, str]
    instead: tuple[str, ...] = ()
    "Layers fused here because the fusion they were planned for missed, and falls back to this one."

    @property
    def complete(self) -> bool:
        """Whether everything expected happened."""
        return not self.missed

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return attrs.asdict(self)

    def __str__(self) -> str:
        instead = f", {len(self.instead)} fused as a fallback" if self.instead else ""
        lines = [
            f"{self.fusion}: {len(self.expected)} expected, {len(self.matched)} matched, {len(self.refused)} refused, "
            f"{len(self.not_applicable)} not applicable{instead}"
        ]
        for kind, layers in (("refused", self.refused), ("not applicable", self.not_applicable)):
            for reason, count in Counter(layers.values()).items():
                first = next(layer for layer, why in layers.items() if why == reason)
                others = f" and {count - 1} more" if count > 1 else ""
                lines.append(f"  {kind}: {first}{others}: {reason}")
        return "\n".join(lines)


class Report:
    """The plan, the records of every compiled graph, and what follows from both."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.records: list[GraphRecord] = []
        self.unknown: dict[str, str] = {}
        "Layers that look like attention, and the class that no adapter knows: they are in no plan."

    def add(self, record: GraphRecord) -> None:
        """Take in what a pass did to one more graph."""
        self.records.append(record)

    @property
    def graphs(self) -> int:
        """Graphs seen so far."""
        return len({record.graph for record in self.records})

    def of(self, fusion: str) -> FusionReport:
        """The verdict on one fusion.

        Raises:
            KeyError: no such fusion.
        """
        if fusion not in FUSIONS:
            raise KeyError(f"no fusion is called {fusion!r}; known: {', '.join(FUSIONS)}")
        records = [record for record in self.records if record.fusion == fusion]
        expected = tuple(decision.layer for decision in self.plan.expected(fusion))
        missed: dict[str, str] = {}
        for layer in expected:
            why = next((record.missed[layer] for record in records if layer in record.missed), None)
            if why is not None:
                missed[layer] = why
            elif not self._served(fusion, layer):
                missed[layer] = self._absent(records)
        other = FUSIONS[fusion].fallback
        if other is not None:
            for layer in missed:
                missed[layer] += f"; {other} was fused there instead" if self._served(other, layer) else ""
        return FusionReport(
            fusion=fusion,
            expected=expected,
            matched=tuple(layer for layer in expected if layer not in missed),
            missed=missed,
            refused={**{d.layer: d.reason for d in self.plan.refused(fusion)}, **missed},
            not_applicable={d.layer: d.reason for d in self.plan.not_applicable(fusion)},
            instead=tuple(layer for layer, _ in self.plan.fallback_specs(fusion) if self._served(fusion, layer)),
        )

    def _served(self, fusion: str, layer: str) -> bool:
        """Whether some graph that this layer runs was fused, expected or not."""
        matches = (match for record in self.records if record.fusion == fusion for match in record.matched)
        return any(match.layer == layer or self._shares(layer, match) for match in matches)

    def _shares(self, layer: str, match: Match) -> bool:
        """Whether a layer without a graph of its own runs the one that a layer of the same spec was matched in.

        After a graph break Dynamo compiles a module's forward once, takes its parameters as inputs, and runs it for
        every module that passes the guards, which compare epsilons and shapes.
        """
        if not match.frame or not layer.endswith(match.layer.removeprefix(match.frame)):
            return False
        specs = dict(self.plan.specs)
        here, there = specs[layer], specs[match.layer]
        return type(here) is type(there) and attrs.evolve(here, layer_index=there.layer_index) == there

    @staticmethod
    def _absent(records: list[GraphRecord]) -> str:
        if not records:
            return "no graph has come to the pass: the model was not called, Dynamo is off, or Inductor had it cached"
        loose = [sentence for record in records for sentence in record.unattributed]
        hint = f"; norms tied to no layer: {'; '.join(loose[:3])}" if loose else ""
        plural = "s" if len(records) > 1 else ""
        return f"its latent norms are in none of the {len(records)} compiled graph{plural}{hint}"

    def missed(self) -> dict[str, dict[str, str]]:
        """Fusion -> layer -> reason, for everything expected that did not happen; empty when all is well."""
        found = {name: self.of(name).missed for name in FUSIONS}
        return {name: layers for name, layers in found.items() if layers}

    def check(self) -> None:
        """Raise where something expected did not happen.

        Raises:
            FusionMissedError: naming each layer and its reason.
        """
        missed = self.missed()
        if missed or self.unknown:
            raise FusionMissedError(missed, self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "target": self.plan.target.to_dict(),
            "graphs": self.graphs,
            "unknown": dict(self.unknown),
            "fusions": {name: self.of(name).to_dict() for name in FUSIONS},
            "records": [attrs.asdict(record) for record in self.records],
        }

    def __str__(self) -> str:
        lines = [f"fusion report: {self.graphs} graphs compiled for {self.plan.target}"]
        named = (fusion.name for fusion in FUSIONS.values() if self.plan.config.concerns(fusion))
        lines += ["  " + line for name in named for line in str(self.of(name)).splitlines()]
        lines += [f"  unknown: {layer}: no adapter knows {name}" for layer, name in self.unknown.items()]
        return "\n".join(lines)
