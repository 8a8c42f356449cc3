"""Layers of every known class, made from the facts that read them, and things that no layer should hold.

Each number of a made layer is 8, which every field takes: 8 heads, norms 8 wide, one rank. Holders are plain objects, as
an engine's modules look to `getattr`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from attrs import frozen
from standins import layer_class
from torch import nn

from layerfuse import registry
from layerfuse.adapters.mixer_specs import Mamba2Spec
from layerfuse.adapters.reader import LayerReader
from layerfuse.adapters.rope_source import RopeSource
from layerfuse.adapters.sources import Converted, NormSource, Path, Quotient, Weight, Where

_CONVERTED: Mapping[str, Any] = {
    "length": [None] * 8,
    "window_before": 7,
    "name_index": "model.layers.8.self_attn",
    "name_index_of_pairs": "model.layers.4.self_attn.0",
    "parent_name": "model.layers.8.self_attn.attn",
    "not": False,
}
_NAMED: Mapping[str, Any] = {
    "activation": "silu", "act_fn": "silu", "tp_size": 1, "tp_rank": 0, "softmax_scale": 0.125, "attention_scaling": 1.0,
    **dict.fromkeys(("norm_before_gate", "has_weight", "has_bias", "has_norm", "interleaved"), True),
    **dict.fromkeys(("parallel_residual", "has_sinks", "shares_kv", "values_are_keys"), False),
}  # fmt: skip

READERS: tuple[LayerReader, ...] = tuple(
    reader
    for key in sorted(registry.layer_classes())
    for reader in registry.default.readers_for(layer_class(key))
    if reader.key == key
)


class Holder:
    """An object with attributes, or with numbered parts, eight as far as it says."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return vars(self)[str(index)]


@frozen
class Place:
    """Something that is read off a layer, and what stands there when all is well."""

    steps: tuple[str, ...]
    good: Any


def places_of(reader: LayerReader) -> tuple[Place, ...]:
    """Everywhere that a reader looks, weights of linears included."""
    found: dict[tuple[str, ...], Any] = {}
    for field, parsed in reader.facts.parsed.items():
        if field == "unless":
            continue  # nothing is there when all is well
        for source in parsed if isinstance(parsed, tuple) else (parsed,):
            for steps, good in _places(field, source):
                # The norm of a Mamba-2 mixer is as wide as its heads together, in groups.
                one = reader.facts.spec is Mamba2Spec and field in ("head_dim", "num_groups")
                found.setdefault(steps, 1 if one else good)
    # An activation is a name, which holds no limit. What else lies around another place is made for that one.
    found = {steps: good for steps, good in found.items() if steps[:-1] != ("act_fn",)}
    return tuple(Place(steps, good) for steps, good in found.items() if not _is_around(steps, found))


def _is_around(steps: tuple[str, ...], others: Mapping[tuple[str, ...], Any]) -> bool:
    return any(len(other) > len(steps) and other[: len(steps)] == steps for other in others)


def _places(field: str, source: Any, below: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(source, NormSource):
        for part, places in source.fields:
            for place in places:
                yield from _places(part, place, source.module.steps)
        for place in source.layer_epsilon:
            yield from _places("epsilon", place)
        for place in source.where:
            yield from _places("has_norm", place)
        for path in source.consumers:
            yield from _linear(path.steps)
    elif isinstance(source, RopeSource):
        for part, places in source.fields:
            for place in places:
                yield from _places(part, place, source.module.steps if source.module else ())
    elif isinstance(source, Weight):
        yield from _linear(source.steps)
    elif isinstance(source, Path):
        yield (*below, *source.steps), _NAMED.get(field, 8)
    elif isinstance(source, Quotient):
        # Of a linear's width that is shared out to heads; other quotients are counts by counts.
        yield (*below, *source.dividend.steps), 64 if source.dividend.steps[-1] == "input_size" else 8
        yield (*below, *source.divisor.steps), 1 if field == "group_size" else 8
    elif isinstance(source, Where):
        yield from _places(field, source.path, below)
        yield from ((steps, source.value) for steps, _ in _places(field, source.where, below))
    elif isinstance(source, Converted):
        path = source.path.dividend if isinstance(source.path, Quotient) else source.path
        steps = (*below, *path.steps)
        if source.convert == "rope_scaling":
            yield (*steps, "rope_parameters"), {"rope_type": "default"}
            yield (*steps, "max_position_embeddings"), 8
        elif source.convert == "rope_width":
            yield (*steps, "head_dim"), 8
        else:
            yield steps, _CONVERTED.get(source.convert, 8)


def _linear(steps: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield (*steps, "weight"), WEIGHT
    yield (*steps, "in_features"), 8
    yield (*steps, "out_features"), 8


WEIGHT = torch.empty(8, 8, device="meta")


def made(
    reader: LayerReader,
    places: tuple[Place, ...],
    changes: Mapping[tuple[str, ...], Any],
    *,
    module: bool,
    odd: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A layer of a reader's class, with some places, or what lies on the way to them, changed.

    Args:
        reader: of its class.
        places: those of the reader.
        changes: by steps.
        module: whether it is a torch module.
        odd: methods and properties that it has instead of its class's: it is of a class derived from that one.
    """
    cls = layer_class(reader.key, nn.Module if module else Holder)
    layer = cls()
    held = vars(layer)
    for place in places:
        holder: dict[str, Any] = held
        for depth, step in enumerate(place.steps):
            here = place.steps[: depth + 1]
            last = depth == len(place.steps) - 1
            if here in changes:
                _put(holder, step, changes[here])
                break
            if last:
                _put(holder, step, place.good)
            else:
                holder = vars(holder.setdefault(step, Holder()))
    if odd:
        object.__setattr__(layer, "__class__", type("Derived", (cls,), dict(odd)))
    return layer


def _put(holder: dict[str, Any], step: str, value: Any) -> None:
    if value is GONE:
        holder.pop(step, None)
    else:
        holder[step] = value


GONE = object()
"""Instead of a value: the attribute is not there."""

# ---- what no layer should hold ---------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise self

    __repr__ = __str__


ERRORS: tuple[Callable[[], BaseException], ...] = (
    ValueError, KeyError, AttributeError, RuntimeError, RecursionError, StopIteration, MemoryError, Unprintable, SystemExit,
    lambda: ValueError("x" * 100_000), lambda: AttributeError(name=None, obj=None),
)  # fmt: skip
_WAYS = (
    "__getattr__", "__getattribute__", "__hash__", "__repr__", "__str__", "__eq__", "__ne__", "__index__", "__float__",
    "__len__", "__getitem__", "__bool__", "__iter__", "__format__", "__lt__", "__mod__", "__contains__", "__class__",
    "__dict__", "shape", "dtype", "weight", "in_features", "out_features", "device_mesh", "placements",
)  # fmt: skip
"""Methods and attributes that may raise."""
_BASES = (object, str, int, float, tuple, list, dict, SimpleNamespace, Holder)


def broken(chance: random.Random, *names: str) -> dict[str, Any]:
    """The body of a class some of whose methods and attributes raise, and always those of these names."""
    error = chance.choice(ERRORS)

    def fails(*_: Any) -> Any:
        raise error()

    ways = (*names, *chance.sample(_WAYS, chance.choice((1, 1, 2, 5))))
    return {way: fails if way.startswith("__") and way not in _PROPERTIES else property(fails) for way in ways}


def breaking(chance: random.Random) -> Any:
    """An object some of whose methods and attributes raise."""
    body = broken(chance)
    try:
        return type("Breaking", (chance.choice(_BASES),), body)()
    except (Exception, SystemExit):  # what it breaks is needed to make one
        return type("Breaking", (), {"__getattr__": next(iter(body.values()))})()


_PROPERTIES = ("__class__", "__dict__")


class Mesh:
    """What tells a DTensor from a tensor, and little else."""

    device_mesh: Any = SimpleNamespace(mesh_dim_names=("tp",), size=lambda _: 2.5, get_local_rank=lambda _: "0")
    placements: Any = (SimpleNamespace(is_shard=lambda: True, dim=0),)
    shape = (8, 8)

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def dim(self) -> int:
        return 2


class GELU:
    approximate: Any = ("tanh", [])


class SiluAndMulWithClamp:
    alpha, beta = torch.tensor([1.0, 2.0]), 10**5000


LINEAR = nn.Linear(8, 8, device="meta")
ODD: tuple[Any, ...] = (
    GONE, None, True, False, 0, -1, -3, 1, 2, 3, 7, 9, 16, 2**31, 10**5000, -(10**5000), 8.0, 0.0, -1.0, 1e-6, 1j,
    float("nan"), float("inf"), "", "8", "x" * 100_000, "silu", "relu", b"8", [], {}, [8], (8, 8), (-1, -1), (8,), {8: 8},
    {"8": 8}, {"all": 8}, {1, 2}, range(8), object(), object, len, lambda: 8, LINEAR.forward, LINEAR, iter(()), Ellipsis,
    torch.tensor(8), torch.tensor(-8), torch.tensor([8]), torch.tensor([[8]]), torch.tensor([8, 8]), torch.tensor(True),
    torch.tensor(8.0), torch.tensor([]), torch.empty((), device="meta"), WEIGHT, torch.empty(4, 8, device="meta"),
    torch.empty(0, 0), torch.empty(8, 4, dtype=torch.uint8), torch.empty(3, 5, 7, device="meta"), torch.Size([8]),
    np.True_, np.int64(8), np.int64(-8), np.array([8]), np.array(8.0), np.float32("nan"), np.array(["8"]), np.zeros(0),
    Mesh(), Mesh(placements=None), Mesh(device_mesh=None), Mesh(device_mesh=SimpleNamespace(mesh_dim_names=(8,))),
    GELU(), SiluAndMulWithClamp(), Holder(), SimpleNamespace(weight=WEIGHT), torch.float32, torch.device("cpu"),
)  # fmt: skip


def changes_of(chance: random.Random, places: tuple[Place, ...]) -> dict[tuple[str, ...], Any]:
    """One to four changes: at a place, or somewhere on the way to it."""
    changes: dict[tuple[str, ...], Any] = {}
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        steps = chance.choice(places).steps
        depth = len(steps) if chance.random() < 0.7 else chance.randrange(1, len(steps) + 1)
        changes[steps[:depth]] = breaking(chance) if chance.random() < 0.35 else chance.choice(ODD)
    return changes
