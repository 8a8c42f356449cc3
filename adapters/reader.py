"""Reads one layer into its spec, through the facts of its class.

Reading is live: every call reads the attributes again, since engines rewrite them. What is kept is the spec that was made of
the same values, which need not be checked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import attrs

from .base import Facts
from .consumers import Below, Linears, agreed
from .conversions import whole
from .errors import (
    FOREIGN,
    ArgumentError,
    LayerfuseError,
    MissingAttributeError,
    ParallelConflictError,
    ParallelUnknownError,
    SpecError,
    UnreadableError,
    cut,
    said,
    shown,
)
from .experts import SHARED, experts_of
from .linear_specs import LinearSpec
from .linears import is_whole, linear_of
from .parallel import ambient, is_plain_tensor, ranks_summed, shards_of_linear
from .pipeline import norms_nothing
from .rope_source import RopeSource
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
    torchs_norm,
)
from .spec_fields import GATED, made
from .specs import (
    LARGEST,
    NO_ROPE,
    WHOLE,
    ExpertsSpec,
    FinalNormSpec,
    GatedMLPSpec,
    GatedNormSpec,
    LayerNormSpec,
    LayerSpec,
    NormSpec,
    Parallel,
    ResidualSpec,
    RopeSpec,
    goes_with,
    kind_of,
)
from .values import UNCHANGED, VALUES, same

S = TypeVar("S")
P = TypeVar("P", NormSource, RopeSource)
_Convert: TypeAlias = Callable[[Any], Any]
_Places: TypeAlias = Iterable[tuple[str, tuple[Source, ...]]]
_Told: TypeAlias = tuple[str, type | None, _Convert]
"""A field, of which type its values need no change, and what others become."""


class LayerReader:
    """The facts of one layer class, compiled for reading."""

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
    def near(self) -> _Near:
        """The modules below a layer by which no spec is decided."""
        return _Near(self.facts)

    @cached_property
    def unless(self) -> Any:
        """Where the layer says that it is none."""
        return self.facts.parsed.get("unless", ())

    @cached_property
    def at_once(self) -> _AtOnce:
        """The numbers and words of a layer."""
        return _AtOnce([(name, at) for name, kind, _, at in self.fields if kind in VALUES], self.values)

    @cached_property
    def others(self) -> list[tuple[str, str, str | None, Any]]:
        """The fields that are not read in one go."""
        return [field for field in self.fields if field[1] not in VALUES]

    @cached_property
    def group(self) -> _AtOnce | None:
        """The tensor-parallel size and rank of a layer that says each at one place."""
        places: Any = [(name, self.facts.parsed.get(name, ())) for name in ("tp_size", "tp_rank")]
        alone = all(len(each) == 1 for _, each in places)
        return _AtOnce(places, {"tp_size": same, "tp_rank": whole}) if alone else None

    @cached_property
    def told_by_weights(self) -> bool:
        """Whether nothing but the weights tells over how many ranks the heads are shared."""
        parsed = self.facts.parsed
        halves = [(pair.total in parsed, pair.local in parsed) for pair in self.facts.spec.pairs if not pair.replicates]
        return "tp_weight" in parsed and parsed.keys().isdisjoint(("tp_size", "tp_rank")) and (True, True) not in halves

    @cached_property
    def values(self) -> dict[str, _Convert]:
        """What each field's kind makes of what is read."""
        return {name: VALUES.get(kind, same) for name, kind, _, _ in self.fields}

    @cached_property
    def rope(self) -> _AtOnce:
        """The fields of the layer's rope."""
        rope: Any = self.facts.parsed["rope"]
        return _AtOnce(rope.fields, _ROPE_VALUES, module=None if rope.module is None else str(rope.module))

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
    def mlp_weights(self) -> list[tuple[str, _Convert, _Convert]]:
        """Where the weights of an MLP lie, each in two parts: the layer's own attribute, by its name too, and the way from there."""
        found: Any = self.facts.parsed.get("mlp_weight", ())
        return [(path.steps[0], Path(path.steps[:1]).find, Path(path.steps[1:]).find) for path in found]

    def __repr__(self) -> str:
        return f"LayerReader({self.key!r}, {self.owner!r}, {self.facts.spec.__name__})"

    def elsewhere(self, module: Any) -> bool:
        """Whether another rank of a pipeline holds what the facts describe: only the last one has a model's final norm.

        Most of the others have something in its place that norms nothing.
        """
        if self.facts.spec is not FinalNormSpec:
            return False
        source: Any = self.facts.parsed["final_norm"]
        try:
            held = source.module.read(module)
        except UnreadableError:
            return False
        return norms_nothing(held)

    def read(self, layer: Any, parallel: Parallel | None = None, path: str = "", reading: Reading | None = None) -> Any:
        """The layer's spec.

        Args:
            layer: the module.
            parallel: what the caller knows of the sharding; contradicting the layer is an error.
            path: the layer's name in its model, for messages.
            reading: of this layer, where more is wanted of it than the spec.

        Raises:
            MissingAttributeError: the layer lacks an attribute, or its own code fails when it is asked for one.
            ParallelUnknownError, ParallelConflictError: the tensor-parallel degree is unsaid, or said twice.
            SpecError: what the layer says cannot all be true.
            ArgumentError: `parallel` or `path` is of another type.
        """
        if parallel is not None and not isinstance(parallel, Parallel):
            raise ArgumentError(f"parallel: expected Parallel(size=..., rank=...), got {shown(parallel)}")
        if not isinstance(path, str):
            raise ArgumentError(f"path: expected the layer's name in its model, got {shown(path)}")
        return (reading or Reading(self, layer, path)).spec(parallel, ambient())


class _Near:
    """The linears around norms, and what stands in the place of an MLP."""

    def __init__(self, facts: Facts) -> None:
        parsed: Mapping[str, Any] = facts.parsed
        self.below = Below()
        self.norms = {id(norm): _NormPlaces(norm, self.below) for norm in facts.norms}
        "Keyed by the identity of the facts' norms."
        self.last = Linears(parsed.get("last_linear", ()), self.below)
        "The linear whose result the layer adds last."
        self.mixtures = Linears(parsed.get("mixture", ()), self.below)
        "Where a mixture of experts may stand."


class _NormPlaces:
    """What is read of one norm."""

    def __init__(self, norm: NormSource, below: Below) -> None:
        place = str(norm.module)
        self.find = norm.module.find
        self.readers, self.writers = Linears(norm.consumers, below), Linears(norm.producers, below)
        kind = GatedNormSpec if norm.gated else LayerNormSpec if norm.is_layer_norm else NormSpec
        self.own = _AtOnce(norm.fields, _NORM_VALUES, kind=kind, module=place)
        "The fields of the norm that the facts describe."
        self.torchs = {
            name: _AtOnce(fields, _NORM_VALUES, kind=kind, module=place)
            for name, (fields, kind) in ({} if norm.gated else _TORCHS).items()
        }
        "Those of torch's own, which may stand in its place."


class _AtOnce:
    """Fields that are read in one go, as most layers and norms hold them all: what takes an error to be said is read again, field by field."""

    def __init__(self, fields: _Places, values: Mapping[str, _Convert], **given: Any) -> None:
        self.fields = fields
        self.values = values
        self.given = given
        "What is known without a layer."
        self._constants = dict(given)
        self._alone: list[tuple[_Convert, _Told]] = []
        self._others: list[tuple[str, list[tuple[bool, _Convert]], _Convert]] = []
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
        self._together: list[tuple[_Convert | None, _Convert, tuple[_Told, ...]]] = []
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


class Reading:
    """One full reading of one layer, with everything an error message needs."""

    def __init__(self, reader: LayerReader, layer: Any, path: str) -> None:
        self.reader = reader
        self.layer = layer
        self.path = path
        self.facts = reader.facts
        self.parts: list[int] = []
        "The identities of the norms and ropes that were read."
        self.near = reader.near
        self.tables: list[Mapping[str, Any]] | None
        "What the modules hold that are near; None where the layer's own code fails on the way."
        try:
            self.tables = self.near.below.of(layer)
        except FOREIGN:
            self.tables = None

    def spec(self, parallel: Parallel | None, around: Parallel | None) -> Any:
        """The spec, or an error with every reason."""
        try:
            if self.reader.unless:
                self.refuse_others(self.reader.unless)
            values = self.values()
            spec = self.reader.spec
            if self.reader.is_layer:
                values["parallel"] = self.parallel(values, parallel, around)
                if spec.pairs:
                    self.complete(values)
            if spec is ResidualSpec:
                values["mlp_ranks"] = self.mlp_ranks()
                values["gives"] = self.near.last.of(self.layer, self.tables)
                values["experts"] = self.experts()
            return made(spec, values, tuple(self.parts))
        except SpecError as error:
            raise SpecError(f"{self.name()} ({error.what})", error.problems) from None

    def name(self) -> str:
        """The layer in words: its path if known, else its class and the index it claims; and who, of other packages, declares it."""
        plugin = self.reader.plugin
        return f"{self.itself()}, declared by {plugin}," if plugin else self.itself()

    def itself(self) -> str:
        """The layer in words, whoever declares it."""
        if self.path:
            return f"{cut(self.path, 200)} ({self.reader.key})"
        try:
            _, index = self.first(self.facts.parsed["layer_index"], convert=whole)
        except (LayerfuseError, UnreadableError, KeyError):
            index = None
        return f"a {self.reader.key} layer" if index is None else f"{self.reader.key} layer {shown(index)}"

    # ---- fields

    def refuse_others(self, places: Any) -> None:
        """Of what no spec describes, some has a place of its own on the layer."""
        for place in places:
            try:
                found = place.find(self.layer)
            except FOREIGN:
                continue
            if found is not None and found is not False and found is not ABSENT:
                what = (
                    f"{place} is {shown(found)}" if isinstance(found, (bool, int, float, str)) else f"it has a {place}"
                )
                raise SpecError(self.facts.spec.__name__, [f"{what}, and no spec describes such a layer"])

    def values(self) -> dict[str, Any]:
        """The fields that the facts speak of."""
        reader = self.reader
        values = reader.at_once.of(self.layer, self.path)
        for name, kind, partner, parsed in reader.others if values else reader.fields:
            if kind == "norms":
                values[name] = self.norms(name, parsed, may_lack=values.get("parallel_residual") is True)
            elif (partner is not None and values[partner] is None) or (
                kind == "optional_gated_norm" and not self.holds(name, parsed)
            ):
                values[name] = None
            elif kind in _NORMS:
                values[name] = self.or_unsaid(name, parsed, self.norm)
            elif kind == "optional_rope":
                values[name] = self.or_unsaid(name, parsed, self.rope)
            elif kind == "activation_quant":
                values |= self.reader_of_product(name, parsed)
            else:
                _, values[name] = self.answered(name, parsed, reader.values[name])
        return values

    def norms(self, name: str, sources: tuple[NormSource, ...], may_lack: bool) -> tuple[NormSpec, ...]:
        """The norms of a stream. With a parallel residual the MLP may have none of its own, and reads the one before the attention."""
        if not may_lack:
            return tuple([self.norm(name, source) for source in sources])
        after: Any = self.facts.parsed["post_attention_norms"]
        lacked = [source for source in after if not self.has(source.module)]
        also = tuple(path for source in lacked for path in source.consumers)
        if name == "post_attention_norms":
            return tuple(self.norm(name, source) for source in sources if source not in lacked)
        return tuple(self.norm(name, source, also) for source in sources)

    def holds(self, name: str, source: NormSource) -> bool:
        """Whether the layer says that it norms here, where its facts name a flag for it."""
        if not source.where:
            return True
        place, found = self.answered(f"{name}.where", source.where, same)
        if type(found) is not bool:
            raise SpecError(
                self.facts.spec.__name__, [f"{name}: expected {place} to be true or false, got {shown(found)}"]
            )
        return found

    def has(self, module: Path) -> bool:
        """Whether something is at this path."""
        try:
            return self.first((module,))[1] is not None
        except UnreadableError:
            return False

    def norm(self, name: str, source: NormSource, also: tuple[Path, ...] = ()) -> NormSpec:
        """A norm, and the linears around it. `also`: of those that read it, what its source does not name."""
        near = self.near.norms[id(source)]
        module = self.module_of(name, source, near)
        consumers = (
            Linears((*source.consumers, *also)).of(self.layer, None)
            if also
            else near.readers.of(self.layer, self.tables)
        )
        producers = near.writers.of(self.layer, self.tables)
        cls: Any = type(module)
        own = near.own
        torchs = torchs_norm(cls) if near.torchs else None
        if torchs is not None:
            own = near.torchs[torchs]
        read = self.parts_of(name, own, module, source.module)
        if source.layer_epsilon:
            read["epsilon"] = self.answered(f"{name}.epsilon", source.layer_epsilon, _NORM_VALUES["epsilon"])[1]
        if torchs is not None and read["epsilon"] is None:
            why = "torch.nn.RMSNorm with eps=None takes the eps of the dtype that it is called with, which no spec can say"
            raise SpecError("NormSpec", [f"{name}.epsilon: {why}: build it with a number"])
        read["consumers"], read["producers"] = consumers, producers
        return self.part(name, _norm, read)

    def module_of(self, name: str, source: NormSource, near: _NormPlaces) -> Any:
        """The module of a norm."""
        try:
            found = near.find(self.layer)
            if found is not None and found is not ABSENT:
                return found
        except FOREIGN:
            pass
        try:  # again, for what is to be said of it
            found = source.module.read(self.layer)
        except UnreadableError as error:
            raise self.missing(name, [str(error)]) from error.__cause__
        if found is None:
            raise self.missing(name, [f"{source.module}: is None"])
        return found

    def parts_of(self, name: str, part: _AtOnce, start: Any, module: Path | None) -> dict[str, Any]:
        """The fields of a norm or rope, which is at `module`, if at any."""
        read = part.of(start, self.path)
        if read:
            return read
        read = dict(part.given)
        for field, places in part.fields:
            try:
                _, read[field] = self.first(places, start, part.values[field])
            except UnreadableError as error:
                within = "" if module is None else f"{module}."
                raise self.missing(f"{name}.{field}", [within + tried for tried in error.args]) from error.__cause__
        return read

    def part(self, name: str, spec: Callable[..., S], values: dict[str, Any]) -> S:
        """A norm or rope of these values, or an error that names the field that it is."""
        try:
            found = made(spec, values)
        except SpecError as error:
            raise SpecError(error.what, [f"{name}.{problem}" for problem in error.problems]) from None
        self.parts.append(id(found))
        return found

    def reader_of_product(self, name: str, places: tuple[Source, ...]) -> dict[str, Any]:
        """The linear that reads the result of a gated MLP's activation, and what it does to it."""
        place, linear = self.answered(name, places, same)
        path = str(place)
        spec = linear_of(path, (path,), linear)
        said = spec.activation
        if isinstance(said, str):
            return {name: None, "unquantised": said, "consumers": (spec,)}
        return {name: said, "consumers": (spec,)}

    def or_unsaid(self, name: str, source: P, read: Callable[[str, P], S]) -> S | None:
        """None where the class did not speak of a norm or rope itself, and the layer has nothing at the places of the class that it is like."""
        try:
            return read(name, source)
        except MissingAttributeError as error:
            # A module that is there says all of its rope, and what fails in its own way is not absent.
            partly = source.module is not None and error.field != name
            if name not in self.facts.inherited or partly or error.__cause__ is not None:
                raise
            return None

    def rope(self, name: str, source: RopeSource) -> RopeSpec:
        """A rotary embedding, or that there is none."""
        start = self.layer
        if source.module is not None:
            try:
                start = source.module.read(self.layer)
            except UnreadableError as error:
                raise self.missing(name, [str(error)]) from error.__cause__
        if not source.fields or start is None:
            return NO_ROPE
        read = self.parts_of(name, self.reader.rope, start, source.module)
        if type(read["width"]) is int and read["width"] == 0:  # an odd one is left for the spec to refuse
            return NO_ROPE
        return self.part(name, RopeSpec, read)

    def answered(self, name: str, places: tuple[Source, ...], convert: _Convert) -> tuple[Source, Any]:
        """The place that answered for a field, and its answer."""
        try:
            return self.first(places, convert=convert)
        except UnreadableError as error:
            raise self.missing(name, list(error.args)) from error.__cause__

    def first(self, places: Any, start: Any = None, convert: _Convert = same) -> tuple[Source, Any]:
        """The first place that says something. Whatever the layer's own code raises on the way is a reason why one does not."""
        start = self.layer if start is None else start
        for source in places:
            try:
                found = source.find(self.path if type(source) is Named else start)
                if found is not ABSENT:
                    return source, convert(found)
            except FOREIGN:
                continue
        return self.silent(places, start, convert)

    def silent(self, places: Any, start: Any, convert: _Convert) -> tuple[Source, Any]:
        """The same in full, for what is to be said of each place that says nothing."""
        tried: list[str] = []
        cause: BaseException | None = None
        for source in places:
            try:
                return source, convert(source.read(self.path if type(source) is Named else start))
            except UnreadableError as error:
                tried.append(str(error))
                cause = error.__cause__
            except FOREIGN as error:
                tried.append(f"{source}: reading it raised {said(error)}")
                cause = error
        raise UnreadableError(*tried) from cause

    def missing(self, field: str, tried: list[str]) -> MissingAttributeError:
        """The error of a field that no place says."""
        return MissingAttributeError(
            layer=self.name(),
            adapter=self.reader.owner,
            field=field,
            tried=tried,
            existing=existing_names(self.layer),
        )

    def experts(self) -> ExpertsSpec | None:
        """The mixture in the place of the MLP, at the first of its places that holds one."""
        for path, mixture in self.near.mixtures.modules(self.layer, self.tables):
            found = experts_of(path, mixture, self.shared)
            if found is not None:
                self.parts.append(id(found))
                return found
        return None

    def shared(self, path: str, engine: str, mlp: Any) -> GatedMLPSpec:
        """The shared experts of a mixture, in the vocabulary of its engine."""
        reading = Reading(_reader_of_shared(engine), mlp, f"{self.path}.{path}" if self.path else path)
        read: GatedMLPSpec = reading.spec(None, ambient())
        return read

    # ---- parallelism

    def parallel(self, values: Mapping[str, Any], given: Parallel | None, around: Parallel | None) -> Parallel:
        """How the layer was sharded, by itself, by the caller, or by what stands around the call."""
        if given is None and self.reader.told_by_weights and self.is_whole():
            return WHOLE
        sources, rank, silent = self.evidence(values)
        if given is not None:
            sources["the parallel argument"] = given.size
        if len(set(sources.values())) > 1:
            raise ParallelConflictError(self.name(), sources)
        hint = given or around
        if not sources:
            if hint is None:
                raise ParallelUnknownError(self.name(), silent)
            return hint
        size = next(iter(sources.values()))
        if rank is not None and (type(rank) is not int or rank < 0):
            return Parallel(size=size, rank=rank)  # which refuses it by name
        if rank is not None and rank >= size:
            # The rank in a larger group than the one that now shares the heads (SGLang's decode tensor parallelism
            # rewrites the counts during a forward): it does not tell which share this is.
            rank = None
        if rank is not None and given is not None and given.rank not in (None, rank):
            raise ParallelConflictError(
                f"{self.name()}, rank", {"the layer": rank, "the parallel argument": given.rank}
            )
        if rank is None and hint is not None and hint.size == size:
            rank = hint.rank
        return WHOLE if size == 1 else made(Parallel, {"size": size, "rank": rank})

    def is_whole(self) -> bool:
        """Whether the first weight that tells the sharding has all features, as most layers that no engine built."""
        path = self.reader.weights[0][1]
        try:
            return is_whole(path.find(self.layer))
        except FOREIGN:  # of which `evidence` has words
            return False

    def evidence(self, values: Mapping[str, Any]) -> tuple[dict[str, int], int | None, list[str]]:
        """What says the size (source -> size), the rank if anything says it, and what stayed silent."""
        sources: dict[str, int] = {}
        rank: int | None = None
        silent: list[str] = []
        parsed: Mapping[str, Any] = self.facts.parsed
        group = self.reader.group.of(self.layer, self.path) if self.reader.group is not None else {}
        if "tp_size" in parsed:
            try:
                place, said_size = (parsed["tp_size"][0], group["tp_size"]) if group else self.first(parsed["tp_size"])
                sources[str(place)] = self.size(str(place), said_size)
            except UnreadableError as error:
                silent.extend(error.args)
        for pair in self.facts.spec.pairs:
            # Replicated heads say nothing of the ranks that share them.
            if pair.replicates or pair.total not in values or pair.local not in values:
                continue
            total, local = values[pair.total], values[pair.local]
            ratio = f"{pair.total} / {pair.local}"
            counts = type(total) is int and type(local) is int
            if counts and 0 < local <= total <= LARGEST and total % local == 0:
                sources[ratio] = total // local
            else:
                silent.append(f"{ratio}: {shown(total)} / {shown(local)} is no whole number of ranks")
        if group:
            rank = group["tp_rank"]
        elif "tp_rank" in parsed:
            try:
                _, rank = self.first(parsed["tp_rank"], convert=whole)
            except UnreadableError:
                rank = None
        if not sources and "tp_weight" in parsed:
            for source, path in self.reader.weights:
                try:
                    linear = path.read(self.layer)
                    if is_whole(linear):
                        sources[source], rank = 1, 0 if rank is None else rank
                        break
                    shards = shards_of_linear(linear, path.dimensions)
                except UnreadableError as error:
                    silent.append(f"{source}: {error}")
                    continue
                sources[source] = self.size(source, shards.size)
                rank = shards.rank if rank is None else rank
                break
        return sources, rank, silent

    def mlp_ranks(self) -> int | None:
        """Over how many ranks the MLP is summed, where its weights tell."""
        heads: dict[str, Any] = {}
        for name, head, tail in self.reader.mlp_weights:
            try:
                if name not in heads:  # most are in one module
                    heads[name] = head(self.layer)
                part = tail(heads[name])
                if part is not ABSENT and not is_plain_tensor(part):  # as experts' are
                    return 1 if is_whole(part) else ranks_summed(part)
            except FOREIGN:
                continue
        return None

    def size(self, source: str, value: Any) -> int:
        """A tensor-parallel size, or an error that names where it was read."""
        size = whole(value)
        if type(size) is not int or not 1 <= size <= LARGEST:
            raise SpecError(
                self.facts.spec.__name__, [f"{source}: expected a tensor-parallel size, got {shown(value)}"]
            )
        return size

    def complete(self, values: dict[str, Any]) -> None:
        """Fill the half of each pair that the layer does not hold."""
        size = values["parallel"].size
        for pair in self.facts.spec.pairs:
            total, local = values.get(pair.total), values.get(pair.local)
            if pair.local not in values and type(total) is int and total > 0:
                values[pair.local] = pair.local_of(total, size)
            elif pair.total not in values and type(local) is int:
                if pair.replicates and local == 1 and size > 1:
                    raise SpecError(
                        self.facts.spec.__name__,
                        [f"{pair.total}: one local head on {size} ranks may be a share or a replica; say the total"],
                    )
                values[pair.total] = local * size
            # The half that is there is no whole number, which the spec reports; this one only stands in.
            values.setdefault(pair.total, 1)
            values.setdefault(pair.local, 1)


@lru_cache(maxsize=len(SHARED))
def _reader_of_shared(engine: str) -> LayerReader:
    return LayerReader(f"{engine}:SharedExperts", "experts", SHARED[engine])


def existing_names(layer: Any, most: int = 60) -> list[str]:
    """The public names a layer really holds, for messages: attributes, child modules, parameters."""
    names: set[str] = set()
    try:
        for name, value in vars(layer).items():
            if name in ("_modules", "_parameters", "_buffers") and isinstance(value, Mapping):
                names.update(value)
            elif not name.startswith("_") and name != "training":
                names.add(name)
        listed = [cut(name) for name in sorted(names)]
    except FOREIGN:  # it has no names, or what it has for them is none
        return []
    return listed if len(listed) <= most else [*listed[:most], f"and {len(listed) - most} more"]


def _norm(kind: Callable[..., NormSpec], consumers: tuple[LinearSpec, ...], **values: Any) -> NormSpec:
    quant, unquantised = agreed(consumers)
    return kind(**values, consumers=consumers, quant=quant, unquantised=unquantised)


_NORMS = ("norm", "optional_norm", *GATED)
"""The kinds of single norms."""

_NORM_VALUES = {
    a.name: VALUES.get(kind_of(a), same) for spec in (GatedNormSpec, LayerNormSpec) for a in attrs.fields(spec)
}
"""Of the fields of a norm, by name."""

_TORCHS = {"RMSNorm": (TORCH_NORM, NormSpec), "LayerNorm": (TORCH_LAYER_NORM, LayerNormSpec)}
"""Where the fields of torch's own norms are, and what they are."""

_ROPE_VALUES = {a.name: VALUES.get(kind_of(a), same) for a in attrs.fields(RopeSpec)}
"""Of the fields of a rope, by name."""
