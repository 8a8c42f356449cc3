"""The same reading step by step, with nothing kept and no short way, and what may be changed in a layer: both ways must say the same.

Knows no engine: the layers of each are built by its own tests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import attrs
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from layerfuse import registry
from layerfuse.adapters import (
    LayerfuseError,
    compiled_facts,
    consumers,
    experts,
    linear_quant_readings,
    linears,
    reader,
    sharding,
    sources,
    spec_fields,
)
from layerfuse.adapters.consumers import children_of
from layerfuse.adapters.errors import UnreadableError
from layerfuse.adapters.parallel import ranks_summed
from layerfuse.adapters.reader import LayerReader

PLACES = (
    sources.Path,
    sources.Weight,
    sources.Quotient,
    sources.Const,
    sources.Converted,
    sources.Where,
    sources.Named,
)


def _find(place: Any, start: Any) -> Any:
    try:
        return place.read(start)
    except UnreadableError:
        return sources.ABSENT


def _modules(paths: Any, layer: Any) -> list[tuple[str, Any]]:
    """Each path walked alone."""
    found = []
    for steps, name in paths:
        children = children_of(layer)
        for step in steps:
            parent = children.get(step)
            children = {} if parent is None else children_of(parent)
        if children.get(name) is not None:
            found.append((".".join((*steps, name)), children[name]))
    return found


class _Linears(consumers.Linears):
    _together = ()  # none that was made beforehand

    def __init__(self, paths: Any, below: Any = None) -> None:
        parents = dict.fromkeys(path.steps[:-1] for path in paths)
        self.paths = [(steps, path.steps[-1]) for steps in parents for path in paths if path.steps[:-1] == steps]

    def modules(self, layer: Any, tables: Any) -> Any:
        return _modules(self.paths, layer)


def _mlp_ranks(reading: Any) -> int | None:
    for path in reading.facts.parsed.get("mlp_weight", ()):
        try:
            return ranks_summed(path.read(reading.layer))
        except UnreadableError:
            continue
    return None


@contextmanager
def slowly() -> Iterator[None]:
    """Without what makes readings short."""
    with ExitStack() as stack:
        for place in PLACES:
            stack.enter_context(mock.patch.object(place, "find", _find))
        for owner, name, other in (
            (sources.Path, "read", sources.Path._refused),
            (compiled_facts.AtOnce, "of", lambda *_: {}),
            (linears, "plain_linear", lambda *_: None),
            (
                linear_quant_readings,
                "several",
                lambda obj, *paths: tuple(linear_quant_readings.at(obj, each) for each in paths),
            ),
            (consumers, "plain_linear", lambda *_: None),
            (linears, "linear_spec", linears.linear_spec.__wrapped__),
            (experts, "linear_spec", experts.linear_spec.__wrapped__),
            (experts, "_scores", experts._scores.__wrapped__),
            (
                experts,
                "_is_alone",
                lambda holder: all(experts.stored(holder, each) is None for each in experts.HOLDERS),
            ),
            (spec_fields, "_made", spec_fields._made.__wrapped__),
            (compiled_facts, "Linears", _Linears),
            (reader, "Linears", _Linears),
            (reader.Reading, "mlp_ranks", _mlp_ranks),
            (sharding, "is_whole", lambda _: False),
            (reader, "_reader_of_shared", reader._reader_of_shared.__wrapped__),
        ):
            stack.enter_context(mock.patch.object(owner, name, other))
        yield


def outcome(read: Callable[[], Any]) -> tuple[type, str]:
    """What came of a reading, in all fields, those too that equal specs may differ in."""
    try:
        spec = read()
    except LayerfuseError as error:
        return type(error), str(error)
    return type(spec), repr(attrs.asdict(spec))


def both(known: LayerReader, layer: Any, path: str) -> tuple[tuple[type, str], tuple[type, str]]:
    """What a reading gives, and what the slow one does."""
    short = outcome(lambda: known.read(layer, path=path))
    with slowly():
        return short, outcome(lambda: LayerReader(known.key, known.owner, known.facts).read(layer, path=path))


class Text(str):
    """A text of a class of its own."""

    __slots__ = ()


class Whole(int):
    """A number of a class of its own."""


SYMBOL = ShapeEnv().create_unbacked_symint()
REMOVED = object()


def others(value: Any) -> list[Any]:
    """What may stand in the place of a value, equal ones of another type among them."""
    meta: dict[str, Any] = {"device": "meta"}
    match value:
        case bool():
            return [not value, int(value), None]
        case int():
            return [value + 1, 2 * value, value // 2, 0, -1, float(value), Whole(value), SYMBOL, True, None, "8"]
        case float():
            return [2 * value, -value, 1.0, int(value), None, "1"]
        case str():
            return [Text(value), "silu", Text("silu"), "other", 1, None]
        case None:
            return [1, "silu", True, 64]
        case nn.Parameter() if value.ndim:
            shapes = [(*value.shape[:-1], 2 * value.shape[-1]), (value.shape[0] // 2 or 1, *value.shape[1:]), (3,)]
            found = [
                nn.Parameter(torch.empty(shape, dtype=value.dtype, **meta), requires_grad=False) for shape in shapes
            ]
            for dtype in (torch.float16, torch.float8_e4m3fn, torch.uint8):
                found.append(nn.Parameter(torch.empty(value.shape, dtype=dtype, **meta), requires_grad=False))
            return [*found, found[0].data, None]
        case nn.Linear():
            wider = nn.Linear(value.in_features, 2 * value.out_features, **meta)
            return [wider, nn.Bilinear(2, 2, 2, **meta), nn.Identity(), None]
        case nn.Module():
            return [
                nn.RMSNorm(8, eps=1e-3, **meta),
                nn.LayerNorm(8, **meta),
                nn.SiLU(),
                nn.GELU("tanh"),
                nn.Identity(),
                None,
            ]
    return []


def tables(module: Any) -> list[dict[str, Any]]:
    """What holds the values of an object."""
    held = vars(module)
    return [held, *[held[name] for name in ("_parameters", "_modules") if name in held]]


def holders(layer: nn.Module) -> list[Any]:
    """The modules of a layer, and what of the engine's own they hold that is none: configs, methods of quantisation."""
    found: dict[int, Any] = {id(module): module for module in layer.modules()}
    for module in list(found.values()):
        for value in vars(module).values():
            package = type(value).__module__.partition(".")[0]
            if (
                package in ("vllm", "sglang", "transformers", "types")
                and hasattr(value, "__dict__")
                and not callable(value)
            ):
                found[id(value)] = value
    return list(found.values())


def changes(layer: nn.Module, names: set[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each table of a layer that may be changed, and what then is in it. `names`: where facts look for modules."""
    for holder in holders(layer):
        for table in tables(holder):
            for name, value in list(table.items()):
                if name in ("_modules", "_parameters", "_buffers"):
                    continue
                yield table, {name: REMOVED}
                for other in others(value):
                    yield table, {name: other}
                if isinstance(value, nn.Module):
                    for place in sorted(names - table.keys())[:6]:
                        yield table, {name: REMOVED, place: value}
                        yield table, {place: value}
                    for place in sorted(names & table.keys() - {name}):
                        yield table, {name: table[place], place: value}


@contextmanager
def changed(table: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """A table in which some values are others, or are not."""
    before = dict(table)
    table.update(values)
    for name in [name for name, value in table.items() if value is REMOVED]:
        del table[name]
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def check(layer: Any, path: str, most: int | None, differ: float = 0.02) -> None:
    """Whatever is changed, a layer gives what a reading gives that keeps nothing.

    Args:
        layer: as some engine built it.
        path: its name in its model.
        most: of all changes, how many are made; None: all.
        differ: of these, the part that must change what is read.
    """
    for known in registry.default.readers_for(type(layer)):
        first, slow = both(known, layer, path)
        assert first == slow
        said = [place for norm in known.facts.norms for place in (norm.module, *norm.consumers, *norm.producers)]
        names = {place.steps[-1] for place in said} | {"mlp", "experts", "gate", "router", "shared_experts"}
        every = list(changes(layer, names))
        some = every if most is None or most >= len(every) else random.Random(known.key).sample(every, most)
        seen = 0
        for (table, values), again in zip(some, itertools.cycle((True, False))):
            with changed(table, values):
                short, slow = both(known, layer, path)
                assert short == slow, values
                if again:
                    assert both(known, layer, path) == (short, slow), values
                seen += short != first
        assert both(known, layer, path) == (first, first)
        assert seen > differ * len(some), (known, seen, len(some))
