"""All that a reading of one layer reads, taken as plain values in one go: a spec is kept under it, and need not be made of the same values twice.

Numbers, words and flags are taken as they are, and of modules their classes; linears and mixtures as what was made of what they say now. A layer
that says anything in another way, or fails where it is asked, has no sample, and its spec is made at every reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, TypeAlias

from .conversions import activation_of
from .errors import UnreadableError
from .feeds import Linears
from .linears import is_whole, linear_of, plain_of
from .parallel import shards_of_linear
from .rope_source import RopeSource
from .sources import (
    ABSENT,
    TORCH_LAYER_NORM,
    TORCH_NORM,
    Const,
    Converted,
    Named,
    NormSource,
    Path,
    Source,
    torchs_norm,
)
from .spec_fields import GATED

Probe: TypeAlias = Callable[[Any, list[Any]], None]
"""Given a layer, or what its paths start at, adds what it says to a list: as much, and what it means, follows from what stands there already."""
Fields: TypeAlias = Iterable[tuple[str, tuple[Source, ...]]]

_EXACT = frozenset({int, str, NoneType, type(ABSENT)})
_MIXED = frozenset({float, bool})
"""Types of which a value may be equal to a whole number: they are taken too."""
_TORCHS: dict[str | None, Fields] = {"RMSNorm": TORCH_NORM, "LayerNorm": TORCH_LAYER_NORM}


class UnsampledError(Exception):
    """A value that nothing can be kept under, as it may change and stay the same object."""


def probes_of(kind: str, parsed: Any, also: tuple[Path, ...] = ()) -> list[Probe]:
    """What takes one field of a layer. `also`: linears that may read a norm beside those that it names."""
    if kind == "norms":
        return [probe for source in parsed for probe in probes_of("norm", source, also)]
    if isinstance(parsed, NormSource):
        return [*_places(kind, parsed.where), _norm(parsed, kind in GATED), *map(_linears, _around(parsed, also))]
    if isinstance(parsed, RopeSource):
        return _rope(parsed)
    if kind == "activation_quant":
        return [_linear(parsed)]
    if kind == "last_linear":
        return [_linears(Linears(parsed))]
    if kind == "unless":
        return [probe for place in parsed for probe in _places(kind, (place,))]
    return _places(kind, parsed)


def _around(source: NormSource, also: tuple[Path, ...]) -> list[Linears]:
    return [Linears(paths) for paths in (source.feeds, source.fed_by, (*source.feeds, *also) if also else ()) if paths]


def _linears(linears: Linears) -> Probe:
    return lambda layer, said: said.append(linears.of(layer))


def _linear(places: Iterable[Any]) -> Probe:
    """The first linear that is there."""

    def probe(layer: Any, said: list[Any]) -> None:
        for path in places:
            linear = path.find(layer)
            if linear is not ABSENT:
                plain = plain_of(linear)
                said.append(linear_of("", ("",), linear) if plain is None else plain)
                return

    return probe


def _take(value: Any, said: list[Any]) -> None:
    kind = type(value)
    said.append(value)
    if kind in _MIXED:
        said.append(kind)
    elif kind not in _EXACT:
        raise UnsampledError


# ---- places


def _places(kind: str, places: tuple[Source, ...]) -> list[Probe]:
    """The places of a field until one surely answers. What they say of a name is not taken: it goes with the layer's sample."""
    if len(places) == 1 and type(places[0]) is Path:
        return [_activation(places[0]) if kind == "mlp_activation" else _one(places[0])]
    several: list[tuple[Probe, bool]] = []
    for place in places:
        if isinstance(place, Const):
            break
        if isinstance(place, Path):
            several.append((_activation(place) if kind == "mlp_activation" else _one(place), True))
        elif isinstance(place, Converted):
            several.append((_converted(place), True))
        elif not isinstance(place, Named):  # which say something or not by the values at their paths
            several += [(_one(path), False) for path in place.paths]
    if not several:
        return []

    def probe(start: Any, said: list[Any]) -> None:
        for each, answers in several:
            each(start, said)
            if answers and said[-1] is not ABSENT:  # a place that is absent adds that alone
                return

    return [probe]


def _one(path: Path) -> Probe:
    find = path.find

    def probe(start: Any, said: list[Any]) -> None:
        value = find(start)
        kind = type(value)
        said.append(value)
        if kind in _MIXED:
            said.append(kind)
        elif kind not in _EXACT:
            raise UnsampledError

    return probe


def _activation(path: Path) -> Probe:
    def probe(start: Any, said: list[Any]) -> None:
        value = path.find(start)
        cls: Any = type(value)
        if cls not in _EXACT:
            if activation_of(cls) is None:
                raise UnsampledError
            value = cls
        said.append(value)

    return probe


def _converted(place: Converted) -> Probe:
    return lambda start, said: _take(place.read(start), said)


# ---- parts


def _norm(source: NormSource, gated: bool) -> Probe:
    find = source.module.find
    own = _each(source.fields)
    torchs = {name: _each(fields) for name, fields in _TORCHS.items()}

    def probe(layer: Any, said: list[Any]) -> None:
        module = find(layer)
        if module is ABSENT or module is None:
            said.append(module)
            return
        cls: Any = type(module)
        said.append(cls)
        name = None if gated else torchs_norm(cls)
        for each in own if name is None else torchs[name]:
            each(module, said)

    return probe


def _rope(source: RopeSource) -> list[Probe]:
    fields = _each(source.fields)
    if source.module is None:
        return fields
    find = source.module.find

    def probe(layer: Any, said: list[Any]) -> None:
        module = find(layer)
        if module is ABSENT or module is None:
            said.append(module)
            return
        said.append(True)
        for each in fields:
            each(module, said)

    return [probe]


def _each(fields: Fields) -> list[Probe]:
    return [probe for name, places in fields for probe in _places(name, places)]


def shards(paths: Iterable[Any]) -> Probe:
    """What linears tell of the ranks, up to the one that tells it."""

    def probe(layer: Any, said: list[Any]) -> None:
        for path in paths:
            linear = path.find(layer)
            if linear is ABSENT:
                continue
            plain = plain_of(linear)
            if plain is not None:
                said.append(plain)
                if is_whole(plain):
                    return
                continue
            try:
                said.append(shards_of_linear(linear, path.dimensions))
            except UnreadableError:
                said.append(None)
                continue
            return

    return probe
