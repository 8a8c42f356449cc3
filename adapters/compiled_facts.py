"""The facts of one layer class, compiled for reading: what is read in one go, and what one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

import attrs

from .base import Facts
from .consumers import Below, Linears
from .conversions import whole
from .errors import FOREIGN, UnreadableError
from .pipeline import norms_nothing
from .sources import (
    ABSENT,
    TORCH_LAYER_NORM,
    TORCH_NORM,
    Const,
    Named,
    NormSource,
    Path,
    Source,
    Weight,
    has_keys,
    is_index,
)
from .specs import (
    FinalNormSpec,
    GatedNormSpec,
    LayerNormSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
    goes_with,
    kind_of,
)
from .values import UNCHANGED, VALUES, same

Convert: TypeAlias = Callable[[Any], Any]
_Places: TypeAlias = Iterable[tuple[str, tuple[Source, ...]]]
_Told: TypeAlias = tuple[str, type | None, Convert]
"""A field, of which type its values need no change, and what others become."""


class CompiledFacts:
    """What is known of one layer class before a layer is there."""

    def __init__(self, key: str, owner: str, facts: Facts, plugin: str = "") -> None:
        self.key = key
        "The layer class, `package:ClassName`."
        self.owner = owner
        "The adapter or models.toml entry that declared the facts."
        self.plugin = plugin
        "The installed plugin that brought them, in words that name its package; empty for others."
        self.facts = facts
        self.spec: Any = facts.spec
        self.is_layer = issubclass(facts.spec, LayerSpec)
        "Whether it has ranks."

    # Made when the first layer of the class is read: of the hundreds of classes that are known, a process meets a few.

    @cached_property
    def near(self) -> Near:
        """The modules below a layer by which no spec is decided."""
        return Near(self.facts)

    @cached_property
    def unless(self) -> Any:
        """Where the layer says that it is none."""
        return self.facts.parsed.get("unless", ())

    @cached_property
    def at_once(self) -> AtOnce:
        """The numbers and words of a layer."""
        return AtOnce([(name, at) for name, kind, _, at in self.fields if kind in VALUES], self.values)

    @cached_property
    def others(self) -> list[tuple[str, str, str | None, Any]]:
        """The fields that are not read in one go."""
        return [field for field in self.fields if field[1] not in VALUES]

    @cached_property
    def group(self) -> AtOnce | None:
        """The tensor-parallel size and rank of a layer that says each at one place."""
        places: Any = [(name, self.facts.parsed.get(name, ())) for name in ("tp_size", "tp_rank")]
        alone = all(len(each) == 1 for _, each in places)
        return AtOnce(places, {"tp_size": same, "tp_rank": whole}) if alone else None

    @cached_property
    def told_by_weights(self) -> bool:
        """Whether nothing but the weights tells over how many ranks the heads are shared."""
        parsed = self.facts.parsed
        halves = [(pair.total in parsed, pair.local in parsed) for pair in self.facts.spec.pairs if not pair.replicates]
        return "tp_weight" in parsed and parsed.keys().isdisjoint(("tp_size", "tp_rank")) and (True, True) not in halves

    @cached_property
    def values(self) -> dict[str, Convert]:
        """What each field's kind makes of what is read."""
        return {name: VALUES.get(kind, same) for name, kind, _, _ in self.fields}

    @cached_property
    def rope(self) -> AtOnce:
        """The fields of the layer's rope."""
        rope: Any = self.facts.parsed["rope"]
        return AtOnce(rope.fields, ROPE_VALUES, module=None if rope.module is None else str(rope.module))

    @cached_property
    def fields(self) -> list[tuple[str, str, str | None, Any]]:
        """The fields that are read, with their kinds, the field that each goes with, and where they are."""
        return [
            (attribute.name, kind_of(attribute), goes_with(attribute), self.facts.parsed[attribute.name])
            for attribute in attrs.fields(self.facts.spec)
            if attribute.name in self.facts.parsed
        ]

    @cached_property
    def weights(self) -> list[tuple[str, Weight]]:
        """Where the weights lie that tell over how many ranks the heads are shared, in words too."""
        found: Any = self.facts.parsed.get("tp_weight", ())
        return [(f"the weight of {'.'.join(path.steps)}", path) for path in found]

    @cached_property
    def mlp_weights(self) -> list[tuple[str, Convert, Convert]]:
        """Where the weights of an MLP lie, each in two parts: the layer's own attribute, by its name too, and the way from there."""
        found: Any = self.facts.parsed.get("mlp_weight", ())
        return [(path.steps[0], Path(path.steps[:1]).find, Path(path.steps[1:]).find) for path in found]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, {self.owner!r}, {self.facts.spec.__name__})"

    def elsewhere(self, module: Any) -> bool:
        """Whether what the facts describe is not here: another rank of a pipeline holds it, or nothing of it is left.

        Only the last rank has a model's final norm; most of the others have something in its place that norms nothing. An MLP of no columns
        is what transformers builds of no shared experts.
        """
        parsed: Mapping[str, Any] = self.facts.parsed
        try:
            if self.facts.spec is FinalNormSpec:
                return norms_nothing(parsed["final_norm"].module.read(module))
            if issubclass(self.facts.spec, MLPSpec):
                widths = [place.read(module) for place in parsed.get("intermediate_size", ())[:1]]
                return widths == [0] and type(widths[0]) is int
        except UnreadableError:
            pass
        return False


class Near:
    """The linears around norms, and what stands in the place of an MLP."""

    def __init__(self, facts: Facts) -> None:
        parsed: Mapping[str, Any] = facts.parsed
        self.below = Below()
        self.norms = {id(norm): NormPlaces(norm, self.below) for norm in facts.norms}
        "Keyed by the identity of the facts' norms."
        self.last = Linears(parsed.get("last_linear", ()), self.below)
        "The linear whose result the layer adds last."
        self.mixtures = Linears(parsed.get("mixture", ()), self.below)
        "Where a mixture of experts may stand."


class NormPlaces:
    """What is read of one norm."""

    def __init__(self, norm: NormSource, below: Below) -> None:
        place = str(norm.module)
        self.find = norm.module.find
        self.readers, self.writers = Linears(norm.consumers, below), Linears(norm.producers, below)
        kind = GatedNormSpec if norm.gated else LayerNormSpec if norm.is_layer_norm else NormSpec
        self.own = AtOnce(norm.fields, NORM_VALUES, kind=kind, module=place)
        "The fields of the norm that the facts describe."
        self.torchs = {
            name: AtOnce(fields, NORM_VALUES, kind=kind, module=place)
            for name, (fields, kind) in ({} if norm.gated else TORCHS).items()
        }
        "Those of torch's own, which may stand in its place."


class AtOnce:
    """Fields that are read in one go, as most layers and norms hold them all: what takes an error to be said is read again, field by field."""

    def __init__(self, fields: _Places, values: Mapping[str, Convert], **given: Any) -> None:
        self.fields = fields
        self.values = values
        self.given = given
        "What is known without a layer."
        self._constants = dict(given)
        self._alone: list[tuple[Convert, _Told]] = []
        self._others: list[tuple[str, list[tuple[bool, Convert]], Convert]] = []
        together: dict[tuple[str, ...], list[tuple[str, _Told]]] = {}
        for name, places in fields:
            convert = values[name]
            told = (name, UNCHANGED.get(convert), convert)
            match places:
                case (Const(value=value), *_):
                    self._constants[name] = convert(value)
                case (Path(steps=(*above, step)),) if not is_index(step):
                    together.setdefault(tuple(above), []).append((step, told))
                case (Path() as place,):
                    self._alone.append((place.find, told))
                case _:
                    self._others.append((name, [(type(place) is Named, place.find) for place in places], convert))
        self._together: list[tuple[Convert | None, Convert, tuple[_Told, ...]]] = []
        "Where several attributes are, the getter of all of them, and what each tells."
        for head, held in together.items():
            steps, several = tuple([step for step, _ in held]), tuple([told for _, told in held])
            if len(held) > 1:
                self._together.append((Path(head).find if head else None, attrgetter(*steps), several))
            else:
                (told,) = several
                self._alone.append((Path((*head, *steps)).find if head else attrgetter(*steps), told))

    def of(self, start: Any, path: str) -> dict[str, Any]:
        """Their values by name; none where one is missing."""
        cls: Any = type(start)
        if has_keys(cls):
            return {}
        read = self._constants.copy()
        try:
            for above, get, several in self._together:
                held = start
                if above is not None:
                    held = above(start)
                    cls = type(held)
                    if has_keys(cls):
                        return {}
                for (name, unchanged, convert), found in zip(several, get(held), strict=True):
                    read[name] = found if type(found) is unchanged else convert(found)
            for find, (name, unchanged, convert) in self._alone:
                found = find(start)
                if found is ABSENT:
                    return {}
                read[name] = found if type(found) is unchanged else convert(found)
            for name, finds, convert in self._others:
                for named, find in finds:
                    found = find(path if named else start)
                    if found is not ABSENT:
                        read[name] = convert(found)
                        break
                else:
                    return {}
        except FOREIGN:
            return {}
        return read


NORM_VALUES = {
    a.name: VALUES.get(kind_of(a), same) for spec in (GatedNormSpec, LayerNormSpec) for a in attrs.fields(spec)
}
"""Of the fields of a norm, by name."""

TORCHS = {"RMSNorm": (TORCH_NORM, NormSpec), "LayerNorm": (TORCH_LAYER_NORM, LayerNormSpec)}
"""Where the fields of torch's own norms are, and what they are."""

ROPE_VALUES = {a.name: VALUES.get(kind_of(a), same) for a in attrs.fields(RopeSpec)}
"""Of the fields of a rope, by name."""
