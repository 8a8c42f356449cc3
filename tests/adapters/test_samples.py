"""Specs that are kept are never those of another layer: whatever is changed, a layer gives what a reading without anything kept gives."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from helpers import fresh_model
from torch import nn

from layerfuse import registry
from layerfuse.adapters import LayerfuseError, tensor_parallel
from layerfuse.adapters.parallel import ambient
from layerfuse.adapters.reader import LayerReader, Reading
from layerfuse.testing.models import full_model, small_entry

MIXTURE = "deepseek-v3"
ROUNDS = 2000
"""Of a plain loop of Python's, in the time of one reading: about 60 us."""
LAYERS = [
    (MIXTURE, "model.layers.3.self_attn"),
    (MIXTURE, "model.layers.3"),
    (MIXTURE, "model.layers.0"),
    (MIXTURE, "model.layers.0.mlp"),
    ("gpt-oss-20b", "model.layers.0.self_attn"),
    ("gpt-oss-20b", "model.layers.0"),
    ("kimi-linear-48b-a3b", "model.layers.0.self_attn"),
    ("longcat-flash", "model.layers.0"),
    ("qwen3-next-80b-a3b", "model.layers.3.self_attn"),
    ("qwen3-next-80b-a3b", "model.layers.0"),
]


def small(name: str) -> Any:
    return full_model(small_entry(registry.model(name), layers=4, hidden_size=64, heads=2))


def kept_or_read(reader: LayerReader, layer: Any, path: str) -> tuple[Any, Any]:
    """What a reading gives and what one gives that keeps nothing, in all fields, those too that equal specs may differ in."""

    def outcome(read: Callable[[], Any]) -> Any:
        try:
            spec = read()
        except LayerfuseError as error:
            return type(error), str(error)
        return type(spec), repr(attrs.asdict(spec))

    return (
        outcome(lambda: reader.read(layer, path=path)),
        outcome(lambda: Reading(reader, layer, path).spec(None, ambient())),
    )


@contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    held = next((table for table in tables(holder) if name in table), vars(holder))
    before = held[name]
    held[name] = value
    try:
        yield
    finally:
        held[name] = before


def tables(module: Any) -> list[dict[str, Any]]:
    return [vars(module)[name] for name in ("_parameters", "_modules") if name in vars(module)]


def others(value: Any) -> list[Any]:
    """What may stand in the place of a value, equal ones of another type among them."""
    match value:
        case bool():
            return [not value, int(value), None]
        case int():
            return [value + 1, 2 * value, 0, float(value), None, "8"]
        case float():
            return [2 * value, -value, 1.0, int(value), None]
        case str() | None:
            return ["silu", "other", 1, True]
        case nn.Parameter():
            wider = nn.Parameter(torch.empty(*value.shape[:-1], 2 * value.shape[-1], device="meta"))
            other = nn.Parameter(torch.empty(value.shape, dtype=torch.float16, device="meta"))
            half = nn.Parameter(torch.empty(value.shape[0] // 2 or 1, *value.shape[1:], device="meta"))
            return [wider, other, half, None]
        case nn.Linear():
            return [nn.Linear(value.in_features, 2 * value.out_features, device="meta"), nn.Identity(), None]
        case nn.Module():
            return [
                nn.RMSNorm(8, eps=1e-3, device="meta"),
                nn.LayerNorm(8, device="meta"),
                nn.SiLU(),
                nn.Identity(),
                None,
            ]
    return []


def changes(layer: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Everything of a layer and of what is inside of it that may be changed, and what its config says."""
    config = [layer.config] if hasattr(layer, "config") else []
    for holder in (*layer.modules(), *config):
        for table in (vars(holder), *tables(holder)):
            for name, value in table.items():
                if name.startswith("_") or name == "training":
                    continue
                for other in others(value):
                    yield holder, name, other


@pytest.mark.parametrize(("name", "path"), LAYERS)
def test_a_layer_that_was_changed_is_what_it_is_now(name: str, path: str) -> None:
    layer = (fresh_model(name) if name == MIXTURE else small(name)).get_submodule(path)
    (reader, *_) = registry.default.readers_for(type(layer))
    first, _ = kept_or_read(reader, layer, path)
    assert reader.known, "a plain layer is kept"
    differ = 0
    for holder, attribute, value in list(changes(layer)):
        with changed(holder, attribute, value):
            kept, read = kept_or_read(reader, layer, path)
            assert kept == read, (type(holder), attribute, value)
            again, _ = kept_or_read(reader, layer, path)
            assert again == read, (type(holder), attribute, value)
            differ += read != first
    assert kept_or_read(reader, layer, path) == (first, first)
    assert differ > 20


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (MIXTURE, "model.layers.3.self_attn"),
        (MIXTURE, "model.layers.0"),
        (MIXTURE, "model.layers.3"),
        ("longcat-flash", "model.layers.0"),
    ],
)
def test_the_largest_layers_are_read_in_the_time_of_a_short_loop(name: str, path: str) -> None:
    """Both are measured in turn, a few calls at a time, until a moment comes in which nothing else runs."""
    layer = (fresh_model(name) if name == MIXTURE else small(name)).get_submodule(path)
    registry.spec_for(layer)
    readings, rounds = [], []
    end = time.monotonic() + 20
    while not readings or min(readings) > ROUNDS / 1000 * min(rounds):
        assert time.monotonic() < end, (min(readings), min(rounds))
        readings.append(min(timeit.repeat(lambda: registry.spec_for(layer), number=5, repeat=50)) / 5)
        rounds.append(min(timeit.repeat("for i in range(1000): x = i * i % 7", number=1, repeat=50)))


def test_how_the_shared_experts_quantise_is_read_anew() -> None:
    """It is no part of what makes mixtures equal."""
    layer = fresh_model(MIXTURE).get_submodule("model.layers.3")
    down = layer.mlp.shared_experts.down_proj
    before = registry.spec_for(layer).experts.shared.feeds
    down.weight = nn.Parameter(down.weight.to(torch.bfloat16))
    after = registry.spec_for(layer).experts.shared.feeds
    assert [each.weight.dtype for (each,) in (before, after)] == ["float32", "bfloat16"]


def test_what_is_around_the_call_is_of_the_reading() -> None:
    model = fresh_model("deepseek-v3")
    layer = model.get_submodule("model.layers.3.self_attn")
    for linear in (layer.kv_b_proj, layer.o_proj):
        linear.weight = nn.Parameter(
            torch.empty(linear.out_features, linear.in_features // 2, dtype=torch.uint8, device="meta"),
            requires_grad=False,
        )
    sizes = []
    for size in (2, 4, 2):
        with tensor_parallel(size, 1):
            sizes.append(registry.spec_for(layer).num_local_heads)
    assert sizes == [64, 32, 64]


def test_a_name_says_what_it_says() -> None:
    mlp = fresh_model("deepseek-v3").get_submodule("model.layers.0.mlp")
    assert [registry.spec_for(mlp, path=f"model.layers.{i}.mlp").layer_index for i in (4, 7, 4)] == [4, 7, 4]
    assert registry.spec_for(mlp).layer_index is None
