"""Where each field of a spec was read: the same reading, which takes down the place that answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from attrs import frozen

from .conversions import whole
from .errors import UnreadableError, shown
from .experts import told_of
from .reader import LayerReader, Reading
from .sources import Const, NormSource, Path, Source
from .specs import ExpertsSpec, NormSpec, Parallel, RopeSpec
from .values import VALUES


@frozen(kw_only=True)
class Explanation:
    """What a layer is, and where each field of that was read."""

    spec: Any
    key: str
    "The layer class that the adapter knows, `package:ClassName`."
    owner: str
    "The adapter or models.toml entry that declares it."
    places: Mapping[str, str]
    "Field -> where it was read, in the spec's order: `q_norm.epsilon` -> `q_a_layernorm.variance_epsilon`. Paths are below the layer."

    def __str__(self) -> str:
        rows = [(name, shown(self._value(name)), place) for name, place in self.places.items()]
        widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
        lines = (f"  {name:{widths[0]}}  {value:{widths[1]}}  {place}" for name, value, place in rows)
        head = f"{type(self.spec).__name__} of {self.key}, by {self.owner}"
        return "\n".join(
            (head, *lines, *([f"  without a place, as by default: {', '.join(rest)}"] if (rest := self.unsaid) else []))
        )

    @property
    def unsaid(self) -> tuple[str, ...]:
        """The fields that nothing of the layer says, and that are as the spec has them by default."""
        told = {place.partition(".")[0] for place in self.places}
        return tuple(each.name for each in attrs.fields(type(self.spec)) if each.name not in told)

    def _value(self, name: str) -> Any:
        value = self.spec
        for step in name.split("."):
            value = tuple(getattr(one, step) for one in value) if isinstance(value, tuple) else getattr(value, step)
        return value


def explained(reader: LayerReader, layer: Any, parallel: Parallel | None, path: str) -> Explanation:
    """Read a layer, and say where.

    Raises:
        LayerfuseError: as `LayerReader.read`.
    """
    reading = _Noting(reader, layer, path)
    spec = reader.read(layer, parallel, path, reading)
    fields = attrs.fields(type(spec))
    order = [attribute.name for attribute in fields]
    told = {place.partition(".")[0] for place in reading.places}
    for each in fields:
        if each.name not in told and (value := getattr(spec, each.name)) != each.default:
            reading.note(
                each.name,
                ", ".join(one.path for one in value) if each.name == "consumers" else "other fields and the class",
            )
    places = dict(sorted(reading.places.items(), key=lambda place: order.index(place[0].partition(".")[0])))
    return Explanation(spec=spec, key=reader.key, owner=reader.owner, places=MappingProxyType(places))


class _Noting(Reading):
    """A reading that takes down each place that answered."""

    def __init__(self, reader: LayerReader, layer: Any, path: str) -> None:
        super().__init__(reader, layer, path)
        self.places: dict[str, str] = {}

    def note(self, name: str, place: str) -> None:
        """A stream that several norms read has several places for one field."""
        known = self.places.get(name)
        self.places[name] = place if known in (None, place) else f"{known}, {place}"

    def values(self) -> dict[str, Any]:
        values = super().values()
        for name, kind, partner, parsed in self.reader.fields:
            if partner is not None and values[partner] is None:
                self.note(name, f"{partner} is None")
            elif kind in VALUES and name not in self.places:  # read at once with others
                self.answered(name, parsed, VALUES[kind])
        return values

    def answered(self, name: str, places: tuple[Source, ...], convert: Callable[[Any], Any]) -> tuple[Source, Any]:
        place, value = super().answered(name, places, convert)
        self.note(name, str(place))
        return place, value

    def parts_of(self, name: str, part: Any, start: Any, module: Path | None) -> dict[str, Any]:
        read = super().parts_of(name, part, start, module)
        for field, places in part.fields:
            place, _ = self.first(places, start, part.values[field])
            within = "" if module is None or isinstance(place, Const) else f"{module}."
            self.note(f"{name}.{field}", f"{within}{place}")
        return read

    def norm(self, name: str, source: NormSource, also: tuple[Path, ...] = ()) -> NormSpec:
        spec = super().norm(name, source, also)
        if spec.consumers:
            self.note(f"{name}.quant", ", ".join(linear.path for linear in spec.consumers))
        return spec

    def experts(self) -> ExpertsSpec | None:
        found = super().experts()
        if found is not None and found.path is not None:
            places = dict(self.near.mixtures.modules(self.layer, self.tables))
            for name, place in told_of(places[found.path]).items():
                if getattr(found, name) is not None:
                    self.note(f"experts.{name}", f"{found.path}.{place}")
        return found

    def rope(self, name: str, source: Any) -> RopeSpec:
        spec = super().rope(name, source)
        if not any(place.startswith(f"{name}.") for place in self.places):
            self.note(
                f"{name}.width", "the class has none" if source.module is None else f"{source.module}: there is none"
            )
        return spec

    def parallel(self, values: Mapping[str, Any], given: Parallel | None, around: Parallel | None) -> Parallel:
        found = super().parallel(values, given, around)
        sources, _, _ = self.evidence(values)
        size = ", ".join(sources) or ("tensor_parallel() around the call" if given is None else "the parallel argument")
        try:
            rank = str(self.first(self.facts.parsed.get("tp_rank", ()), convert=whole)[0])
        except UnreadableError:
            rank = size
        self.note("parallel.size", size)
        self.note("parallel.rank", rank)
        return found

    def complete(self, values: dict[str, Any]) -> None:
        read = set(values)
        super().complete(values)
        for pair in self.facts.spec.pairs:
            for half, other in ((pair.total, pair.local), (pair.local, pair.total)):
                if half in values and half not in read:
                    self.note(half, f"{other} and parallel.size")
