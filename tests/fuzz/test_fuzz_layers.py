"""Layers whose attributes chance has changed: a spec whose numbers are numbers, or one of the library's own errors."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
from made_layers import READERS, Place, broken, changes_of, made, places_of
from mutations import tried

from layerfuse import registry
from layerfuse.adapters import LayerfuseError, Parallel, tensor_parallel
from layerfuse.adapters.reader import LayerReader

PLACES: dict[LayerReader, tuple[Place, ...]] = {reader: places_of(reader) for reader in READERS}
MOST_LETTERS = 10_000
"""Of one message."""
GIVEN = (None, None, None, Parallel(size=1, rank=0), Parallel(size=2, rank=1), Parallel(size=8, rank=None))
PATHS = ("", "model.layers.8.mlp", "model.layers.4.mlps.0", "x" * 100_000)


@pytest.mark.parametrize("module", [True, False], ids=["module", "object"])
def test_a_layer_that_nobody_changed_is_read(module: bool) -> None:
    """What the fuzzer changes is right before that, so that it comes as far as it can."""
    for reader in READERS:
        spec = read(reader, made(reader, PLACES[reader], {}, module=module), None, "model.layers.8.mlp")
        assert (type(spec), spec.layer_index in (8, 4)) == (reader.facts.spec, True), reader.key


def read(reader: LayerReader, layer: Any, parallel: Parallel | None, path: str) -> Any:
    return registry.spec_for(layer, reader.facts.spec, parallel=parallel, path=path)


def outcome(chance: random.Random) -> str:
    """What came of one layer: a word to count by."""
    reader = chance.choice(READERS)
    places, module = PLACES[reader], chance.random() < 0.3
    odd = broken(chance, chance.choice(places).steps[0]) if chance.random() < 0.1 else {}
    layer = made(reader, places, changes_of(chance, places), module=module, odd=odd)
    given, path = chance.choice(GIVEN), chance.choice(PATHS)
    try:
        if chance.random() < 0.1:
            with tensor_parallel(2, 1):
                spec = read(reader, layer, given, path)
        else:
            spec = read(reader, layer, given, path)
    except LayerfuseError as refused:
        assert 0 < len(str(refused)) < MOST_LETTERS
        assert len(repr(refused)) < 3 * MOST_LETTERS
        return type(refused).__name__
    assert type(spec) is reader.facts.spec
    hash(spec)
    assert repr(spec) == repr(attrs.evolve(spec))
    return "read"


def test_layers_that_chance_has_changed() -> None:
    came_of = tried(outcome)
    assert came_of["read"] and came_of["SpecError"] and came_of["MissingAttributeError"]
