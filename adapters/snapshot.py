"""Every raw value of a layer that decides its spec, taken in a few C calls.

Reading is live: engines rewrite attributes, so every reading takes the values again. A spec that was built from equal
values before is then the same spec, and need not be built and checked once more.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import attrs

from .base import Facts
from .errors import UnreadableError
from .parallel import is_dtensor
from .sources import Const, Converted, NormSource, Path, Source, is_index
from .specs import goes_with


def settled(raw: Any) -> bool:
    """Whether equal keys mean equal values for good: a tensor may change in place, and must not be kept alive."""
    if isinstance(raw, tuple):
        return all(map(settled, raw))
    return raw is None or isinstance(raw, (int, float, str))


class Snapshot:
    """Takes every raw value that decides a spec, in a few C calls, as a key to remember the spec by.

    Only facts whose first source is a plain path can be taken so; others (and layers on which a first source is
    missing) are read in full every time.
    """

    def __init__(self, facts: Facts) -> None:
        partners = {a.name: goes_with(a) for a in attrs.fields(facts.spec) if goes_with(a)}
        always: list[tuple[Path, _Reduce]] = []
        dependent: list[tuple[Path, _Reduce]] = []
        possible = True
        partner: Path | None = None
        for name, parsed in facts.parsed.items():
            paths = list(_first_paths(name, parsed))
            possible = possible and None not in paths
            taken = [(path, _reduction(name, parsed)) for path in paths if path]
            (dependent if name in partners else always).extend(taken)
            if name in partners.values() and taken:
                partner = taken[0][0]
        self._full = _Getter(always + dependent) if possible else None
        # The layer may lack what goes with a field that is None on it: no query latent, no norm of it.
        self._without = _Getter(always) if possible and partner else None
        self._partner = operator.attrgetter(str(partner)) if partner else None

    def take(self, layer: Any) -> Any:
        """The key, or None where only a full reading will do."""
        try:
            if self._partner is not None and self._without is not None and self._partner(layer) is None:
                return self._without.take(layer)
            return None if self._full is None else self._full.take(layer)
        except Exception:  # whatever it is, the full reading meets it again and reports it properly
            return None


_Reduce: TypeAlias = Callable[[Any], Any] | None


class _Getter:
    """Several paths at once: each child module is fetched once, which is the slow part on a torch module."""

    def __init__(self, paths: list[tuple[Path, _Reduce]]) -> None:
        own: list[tuple[str, _Reduce]] = []
        inner: dict[str, list[str]] = {}
        for path, reduce in paths:
            if len(path.steps) == 1 or reduce:
                own.append((_without_index(path.steps), reduce))
            else:
                inner.setdefault(path.steps[0], []).append(_without_index(path.steps[1:]))
        self._own = _attrgetter([name for name, reduce in own if not reduce])
        self._reduced = [(_path_getter(name), reduce) for name, reduce in own if reduce]
        self._children = [(_member(child), [_path_getter(path) for path in rest]) for child, rest in inner.items()]

    def take(self, layer: Any) -> tuple[Any, ...]:
        values = [*self._own(layer)]
        for get, reduce in self._reduced:
            values.append(reduce(get(layer)))
        for child, rest in self._children:
            module = child(layer)
            for get in rest:
                values.append(get(module))
        # 64, 64.0 and True are equal keys when they should not be: one is a count, the others are mistakes.
        return tuple(values), tuple(map(type, values))


def _attrgetter(names: list[str]) -> Callable[[Any], Any]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    single = [operator.attrgetter(name) for name in names]
    return lambda layer: tuple(get(layer) for get in single)


_STORES = ("_parameters", "_buffers", "_modules")


def _path_getter(path: str) -> Callable[[Any], Any]:
    first, _, rest = path.partition(".")
    member = _member(first)
    if not rest:
        return member
    further = operator.attrgetter(rest)
    return lambda obj: further(member(obj))


def _member(name: str) -> Callable[[Any], Any]:
    """`operator.attrgetter(name)`, by a shorter way on torch modules.

    A module keeps parameters and children in dictionaries that Python asks only after everything else has failed,
    which takes longer than the rest of a reading. Where nothing but torch's own lookup would answer, they are asked
    here in torch's order.
    """
    usual = operator.attrgetter(name)
    short: dict[type, bool] = {}

    def get(obj: Any) -> Any:
        cls = type(obj)
        direct = short.get(cls)
        if direct is None:
            direct = short[cls] = _has_torch_lookup(cls) and not hasattr(cls, name)
        if direct:
            held = obj.__dict__
            if name in held:
                return held[name]
            for store in _STORES:
                if name in held[store]:
                    return held[store][name]
        return usual(obj)

    return get


def _has_torch_lookup(cls: Any) -> bool:
    torch: Any = sys.modules.get("torch")  # never imported for this: without it there are no torch modules
    if torch is None or not issubclass(cls, torch.nn.Module):
        return False
    own: Any = object
    return cls.__getattribute__ is own.__getattribute__ and cls.__getattr__ is torch.nn.Module.__getattr__


def _without_index(steps: tuple[str, ...]) -> str:
    """`weight.shape.0` as `weight.shape`: an attrgetter cannot index, and the whole shape decides the part."""
    return ".".join(steps[:-1] if is_index(steps[-1]) else steps)


def _reduction(name: str, parsed: Any) -> _Reduce:
    """What stands in the key for an object that must not be kept alive by it."""
    if name == "tp_weight":
        return _weight_facts
    if isinstance(parsed, tuple) and isinstance(parsed[0], Converted) and parsed[0].convert == "present":
        return _is_none
    return None


def _weight_facts(linear: Any) -> tuple[Any, ...]:
    weight = _weight(linear)
    if is_dtensor(weight):
        raise UnreadableError("a mesh may change without the weight")
    return weight.shape, linear.out_features, linear.in_features


_weight = _member("weight")


def _is_none(value: Any) -> bool:
    return value is None


def _first_paths(name: str, parsed: Any) -> Iterable[Path | None]:
    if isinstance(parsed, NormSource):  # what its `feeds` say is in the key of its own, see LayerReader
        for part, sources in parsed.fields:
            for path in _first_paths(part, sources):
                yield Path((*parsed.module.steps, *path.steps)) if path else None
        return
    if name in ("input_norms", "post_attention_norms"):
        for source in parsed:
            yield from _first_paths(name, source) if isinstance(source, NormSource) else (None,)
        return
    first = parsed[0]
    if isinstance(first, Const):
        return
    yield from parsed if name == "tp_weight" else [_plain(first)]


def _plain(source: Source) -> Path | None:
    path = source.path if isinstance(source, Converted) else source
    if not isinstance(path, Path):
        return None
    # attrgetter cannot index, but a trailing index can wait: `weight.shape` decides `weight.shape.0`.
    inner = path.steps[:-1]
    return None if any(map(is_index, inner)) else path
