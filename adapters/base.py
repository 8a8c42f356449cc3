"""How an architecture declares what to read.

`Facts` say, for one layer class, where each field of its spec is found; an `Adapter` is a named list of them. Both
are data: what is malformed is refused when it is defined, with the remedy, and never when a layer is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
from attrs import field, frozen

from .errors import FactsError, did_you_mean, shown
from .rope_source import RopeSource, parse_rope
from .sources import AROUND, Const, NormSource, Path, Source, parse_linears, parse_norm, parse_source, parse_weight
from .spec_fields import GATED, problem_of
from .specs import FAMILY_OF, GatedNormSpec, LayerNormSpec, LayerSpec, ResidualSpec, RopeSpec, kind_of
from .values import VALUES, same

_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")

_LONGEST_KEY = 200
_LONGEST_NAME = 100
"""Both stand in every message about a layer."""

_EVERYTHINGS_BASE = frozenset(
    (
        *("object", "ABC", "Generic", "Protocol", "Module", "ScriptModule", "ModuleList", "ModuleDict", "Sequential"),
        *("PreTrainedModel", "GenerationMixin", "GradientCheckpointingLayer"),  # transformers
        *("CustomOp", "PluggableLayer", "AttentionLayerBase", "VllmModel", "SupportsPP", "SupportsLoRA"),  # vLLM
    )
)
"""Classes of torch and the engines that layers and models of every kind are made of, by their names."""

PARALLEL_WORDS = ("tp_size", "tp_rank", "tp_weight")
"""Beside the spec's own fields: the tensor-parallel size and rank (paths), and linear modules whose weight tells."""

LAYER_WORDS = (*PARALLEL_WORDS, "unless")
"""Those and the places which, where something is there, make a layer one that the spec does not describe: cross-attention."""

RESIDUAL_WORDS = ("mlp_weight", "added_as_given", "last_linear", "mixture")
"""What a residual stream's facts may say besides: where the weights lie that tell over how many ranks the MLP is summed,
whether what attention and MLP give is added as it is, where the linear is whose result is added last, and where a mixture of experts."""

MAY_BE_UNSAID = (
    *("rope", "q_norm", "k_norm", "parallel_residual", "post_norms", "no_sum", "shares_kv", "values_are_keys"),
    *("gate_multiplier", "down_multiplier"),
)
"""Fields that facts need not speak of where a spec has a default for them, which it then has."""

Parsed: TypeAlias = tuple[Source, ...] | NormSource | RopeSource | tuple[NormSource, ...] | tuple[Path, ...]


def _frozen(words: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(words, Mapping):
        raise FactsError(f"expected a mapping from spec fields to where they are read, got {shown(words)}")
    return MappingProxyType(dict(words))


@frozen
class Facts:
    """Where each field of `spec` is found on one class of layer, in the words of `sources`."""

    spec: type[Any]
    "The spec type these layers are read into."
    words: Mapping[str, Any] = field(converter=_frozen, eq=False)
    "Field -> source. Of a total/local pair one is enough: which of the two is named says what the number means."
    inherited: frozenset[str] = field(default=frozenset(), eq=False, repr=False)
    "Of `MAY_BE_UNSAID`, what a class is only `like` another in: where a layer has nothing at those places, it is unsaid."
    parsed: Mapping[str, Parsed] = field(init=False, repr=False)
    "The words with their meaning. Two facts are equal that read the same, however they are written."

    @parsed.default
    def _parse(self) -> Mapping[str, Parsed]:
        if not isinstance(self.spec, type) or self.spec not in FAMILY_OF:
            known = ", ".join(spec.__name__ for spec in FAMILY_OF)
            raise FactsError(f"{shown(self.spec)} is no spec type; expected one of {known}")
        return MappingProxyType(_parse_words(self.spec, self.words))

    @property
    def norms(self) -> tuple[NormSource, ...]:
        """The norms that are read, in the spec's order."""
        found = (
            source for parsed in self.parsed.values() for source in (parsed if isinstance(parsed, tuple) else (parsed,))
        )
        return tuple(source for source in found if isinstance(source, NormSource))

    def but(self, **changes: Any) -> Facts:
        """The same facts with some differences; None takes a field's words away."""
        words = {**self.words, **changes}
        return Facts(self.spec, {name: word for name, word in words.items() if word is not None})

    def liked(self, said: Iterable[str] = ()) -> Facts:
        """The same facts for a class that is like this one, and has `said` these fields itself."""
        inherited = frozenset(name for name in _unsaid(self.spec) if name in self.words and name not in said)
        if inherited == self.inherited:
            return self
        alike = copy.copy(self)  # parsed already, which takes longer than all else of a large file
        object.__setattr__(alike, "inherited", inherited)
        return alike

    def __hash__(self) -> int:
        return hash((self.spec, frozenset(self.parsed)))


def fields_of(spec: type[Any]) -> dict[str, str]:
    """The fields that facts may speak of, with their kinds, in the spec's order."""
    unread = (
        "parallel",
        "mlp_ranks",
        "added_as_given",
        "starts_stream",
        "handed_over",
        "experts",
        "undeclared",
        "unquantised",
        "consumers",
        "gives",
    )
    return {a.name: kind_of(a) for a in attrs.fields(spec) if a.name not in unread}


def _unsaid(spec: type[Any]) -> tuple[str, ...]:
    """Of `MAY_BE_UNSAID`, what this spec has a default for."""
    return tuple(a.name for a in attrs.fields(spec) if a.name in MAY_BE_UNSAID and a.default is not attrs.NOTHING)


def words_of(spec: type[Any]) -> tuple[str, ...]:
    """All that facts may speak of: the fields, and what says how the layer was sharded."""
    sharded = LAYER_WORDS if issubclass(spec, LayerSpec) else ()
    return (*fields_of(spec), *sharded, *(RESIDUAL_WORDS if spec is ResidualSpec else ()))


def _parse_words(spec: type[Any], words: Mapping[str, Any]) -> dict[str, Parsed]:
    kinds, allowed = fields_of(spec), words_of(spec)
    shardable = issubclass(spec, LayerSpec)
    for name in words:
        if name not in allowed:
            norms = " or ".join(field for field, kind in kinds.items() if "norm" in kind)
            inside = f"; it belongs inside a norm's table, in {norms}" if name in AROUND and norms else ""
            near = inside or did_you_mean(name, allowed) or f"; there are {', '.join(allowed)}"
            raise FactsError(f"{spec.__name__} has no field {shown(name)}{near}")
    missing = [name for name in kinds if name not in words and name not in _unsaid(spec)]
    for pair in spec.pairs if shardable else ():
        if (pair.total in missing) != (pair.local in missing):
            missing = [name for name in missing if name not in (pair.total, pair.local)]
    if missing:
        raise FactsError(f"{spec.__name__}: nothing says where to read {', '.join(missing)}; no geometry has a default")
    return {name: _parse_one(name, kinds.get(name, name), words[name]) for name in allowed if name in words}


_PARALLEL_KINDS = {"tp_size": "count", "tp_rank": "index", "added_as_given": "flag", "unless": "optional_flag"}


def _parse_one(name: str, kind: str, words: Any) -> Parsed:
    if kind in ("norm", "optional_norm", *GATED):
        norm = parse_norm(words, name, gated=kind in GATED)
        if norm.where and kind != "optional_gated_norm":
            raise FactsError(
                f"{name}: where is said of a norm that a layer may be without, and this one every layer has"
            )
        return _checked_norm(norm, name)
    if kind == "optional_rope":
        source = parse_rope(words, name)
        _check_parts(source, name, RopeSpec)
        return source
    if kind == "norms":
        listed = words if isinstance(words, (list, tuple)) else [words]
        return tuple(
            _checked_norm(parse_norm(word, f"{name}.{i}", gated=False), f"{name}.{i}") for i, word in enumerate(listed)
        )
    if kind in ("tp_weight", "mlp_weight"):
        listed = words if isinstance(words, (list, tuple)) else [words]
        if not listed or not all(isinstance(word, str) for word in listed):
            raise FactsError(f"{name}: expected the paths of linear modules, got {shown(words)}")
        return tuple(parse_weight(word, name) for word in listed)
    if kind in ("last_linear", "mixture"):
        return parse_linears([words] if isinstance(words, str) else words, name)
    return _checked(parse_source(words, name), name, _PARALLEL_KINDS.get(kind, kind))


def _checked_norm(source: NormSource, name: str) -> NormSource:
    _check_parts(source, name, GatedNormSpec, LayerNormSpec)
    return source


def _check_parts(source: NormSource | RopeSource, name: str, *specs: type[Any]) -> None:
    kinds = {a.name: kind_of(a) for spec in specs for a in attrs.fields(spec)}
    for part, places in source.fields:
        _checked(places, f"{name}.{part}", kinds[part])


def _checked(places: tuple[Source, ...], name: str, kind: str) -> tuple[Source, ...]:
    """A constant that no layer could make a value of the field is refused here, and not when the first layer is read."""
    for place in places:
        if isinstance(place, Const) and (problem := problem_of(kind, VALUES.get(kind, same)(place.value))):
            raise FactsError(f"{name}: {problem}")
    return places


def check_key(key: str) -> str:
    """A layer class's key, `package.prefix:ClassName`, unchanged.

    Raises:
        FactsError: not of that form.
    """
    if not isinstance(key, str) or len(key) > _LONGEST_KEY or not _KEY.fullmatch(key):
        raise FactsError(
            f'{shown(key)} is no layer class; expected "package:ClassName", for example "vllm:MLAAttention" '
            f"(the package may go on: vllm.models.kimi_k3), at most {_LONGEST_KEY} characters"
        )
    if key.rpartition(":")[2] in _EVERYTHINGS_BASE:
        raise FactsError(f"{key!r} is a base of layers or models of every kind; name the layer's own class")
    return key


def _layers(layers: Mapping[str, Facts | Sequence[Facts]]) -> Mapping[str, tuple[Facts, ...]]:
    if not isinstance(layers, Mapping):
        raise FactsError(f"Adapter.layers: expected a mapping from layer classes to Facts, got {shown(layers)}")
    found = {
        check_key(key): tuple(facts) if isinstance(facts, (tuple, list)) else (facts,) for key, facts in layers.items()
    }
    for key, several in found.items():
        if not all(isinstance(facts, Facts) for facts in several):
            raise FactsError(f"{key}: expected Facts, or several in a tuple, got {shown(layers[key])}")
        specs = [facts.spec for facts in several]
        if not specs or len(set(specs)) != len(specs):
            kinds = [spec.__name__ for spec in specs]
            raise FactsError(f"{key}: expected facts for one or more different spec types, got {shown(kinds)}")
    return MappingProxyType(found)


def _keys(keys: Iterable[str]) -> frozenset[str]:
    if not isinstance(keys, (tuple, list, set, frozenset)):
        raise FactsError(f"Adapter.ignored: expected several layer classes, in a tuple, got {shown(keys)}")
    return frozenset(map(check_key, keys))


@frozen
class Adapter:
    """One architecture: its layer classes, in every engine that has them.

    A class that is two kinds of layer at once (a decoder layer that holds its attention's numbers itself) has several
    facts; the first is what `spec_for` answers unless asked for another spec type.
    """

    name: str = field()
    "As models.toml entries name it."
    layers: Mapping[str, tuple[Facts, ...]] = field(converter=_layers)
    "Layer class (`package.prefix:ClassName`) -> facts. The longest matching prefix wins."
    ignored: frozenset[str] = field(default=(), converter=_keys)
    "Classes that look like layers but are none of ours: vision towers, indexers."

    @name.validator
    def _check_name(self, _: Any, name: Any) -> None:
        if not isinstance(name, str) or not re.fullmatch(rf"[a-z0-9][a-z0-9_.-]{{0,{_LONGEST_NAME - 1}}}", name):
            raise FactsError(
                f"an adapter's name is lower-case letters, digits and underscores, at most {_LONGEST_NAME}, got {shown(name)}"
            )

    def __iter__(self) -> Iterator[tuple[str, tuple[Facts, ...]]]:
        return iter(self.layers.items())

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.layers)))
