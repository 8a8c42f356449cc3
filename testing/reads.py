"""What an adapter reads off a layer, derived from its facts: no list by hand that could go stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from attrs import frozen

from ..adapters.base import Facts
from ..adapters.errors import UnreadableError
from ..adapters.rope_source import RopeSource
from ..adapters.sources import Const, Converted, NormSource, Path, Quotient, Source
from ..adapters.specs import GatedNormSpec, LayerSpec, RopeSpec, goes_with, kind_of

GEOMETRY = ("count", "width_or_zero", "index", "positive")
"""Kinds of field for which no constant may stand in: counts, widths, indices, epsilons, scales."""


@frozen(kw_only=True)
class Read:
    """One field, and the places it is read from, in order."""

    field: str
    "As errors name it: `num_heads`, `q_norm.epsilon`."
    kind: str
    "The field's kind, see adapters.specs."
    places: tuple[Source, ...]
    "Seen from the layer: a norm's own places have the norm's path in front."
    inner: tuple[str, ...] = ()
    "Steps to the norm module, if the field is a norm's."

    @property
    def constant(self) -> Const | None:
        """The constant among the places, if there is one."""
        return next((place for place in self.places if isinstance(place, Const)), None)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every path of every place, the first place's first."""
        return tuple(path for place in self.places for path in paths_of(place))

    def used(self, layer: Any) -> Source | None:
        """The place that answers on this layer, or None where none does."""
        for place in self.places:
            try:
                place.read(layer)
            except UnreadableError:
                continue
            return place
        return None


def paths_of(place: Source) -> tuple[Path, ...]:
    """The attribute paths of one place: none of a constant, two of a quotient."""
    if isinstance(place, Converted):
        return paths_of(place.path)
    if isinstance(place, Quotient):
        return place.dividend, place.divisor
    return (place,) if isinstance(place, Path) else ()


def reads_of(facts: Facts, spec: Any) -> tuple[Read, ...]:
    """What was read for this spec, field by field. What goes with a field that is None on it is left out."""
    found: list[Read] = []
    for attribute in attrs.fields(facts.spec):
        name, partner = attribute.name, goes_with(attribute)
        if name not in facts.parsed or (partner is not None and getattr(spec, partner) is None):
            continue
        parsed: Any = facts.parsed[name]
        if isinstance(parsed, RopeSource):
            rope = getattr(spec, name)
            if rope is not None and rope.width:  # what a rope that turns nothing says of itself decides nothing
                found += _rope_reads(name, parsed)
            continue
        if (
            isinstance(parsed, NormSource) and parsed.where and getattr(spec, name) is None
        ):  # the layer norms nothing there
            continue
        norms = parsed if kind_of(attribute) == "norms" else [parsed] if isinstance(parsed, NormSource) else None
        if norms is None:
            found.append(Read(field=name, kind=kind_of(attribute), places=parsed))
        else:
            found += [read for source in norms for read in _norm_reads(name, source)]
    return tuple(found)


def _norm_reads(name: str, source: NormSource) -> Iterator[Read]:
    for part, places in source.fields:
        kind = kind_of(getattr(attrs.fields(GatedNormSpec), part))
        within = tuple(_within(source.module, place) for place in places)
        yield Read(field=f"{name}.{part}", kind=kind, places=within, inner=source.module.steps)


def _rope_reads(name: str, source: RopeSource) -> Iterator[Read]:
    module = source.module
    for part, places in source.fields:
        within = places if module is None else tuple(_within(module, place) for place in places)
        kind = kind_of(getattr(attrs.fields(RopeSpec), part))
        # A rope without a factor says nothing of it: 1.0 is no guess there.
        kind = "factor" if part == "attention_scaling" else kind
        yield Read(field=f"{name}.{part}", kind=kind, places=within, inner=() if module is None else module.steps)


def _within(module: Path, place: Source) -> Source:
    if isinstance(place, Path):
        return Path((*module.steps, *place.steps))
    if isinstance(place, Quotient):
        inner = Path((*module.steps, *place.dividend.steps)), Path((*module.steps, *place.divisor.steps))
        return Quotient(*inner)
    if isinstance(place, Converted):
        path = _within(module, place.path)
        return Converted(path, place.convert) if isinstance(path, (Path, Quotient)) else place
    return place


def norms_of(facts: Facts, spec: Any) -> tuple[tuple[str, Path], ...]:
    """The norm modules that were read, as (field, path)."""
    found = {
        (read.field.split(".")[0], read.inner) for read in reads_of(facts, spec) if read.field.endswith(".epsilon")
    }
    return tuple((name, Path(steps)) for name, steps in sorted(found))


def size_paths(facts: Facts) -> tuple[Path, ...]:
    """Every path that may say the tensor-parallel size: `tp_size`, and the weights that tell."""
    parsed: Any = facts.parsed
    sources = [path for place in parsed.get("tp_size", ()) for path in paths_of(place)]
    return (*sources, *(Path((*module.steps, "weight")) for module in parsed.get("tp_weight", ())))


def counts_say_size(facts: Facts) -> bool:
    """Whether the layer holds both halves of a pair that is not replicated, so that their ratio is the size."""
    if not issubclass(facts.spec, LayerSpec):
        return False
    pairs = [pair for pair in facts.spec.pairs if not pair.replicates]
    return any(pair.total in facts.parsed and pair.local in facts.parsed for pair in pairs)
