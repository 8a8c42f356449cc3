"""Reads one layer into its spec, through the facts of its class.

Reading is live: every call reads the attributes again, since engines rewrite them. What is kept is the spec that was made of
the same values, which need not be checked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from .compiled_facts import NORM_VALUES, AtOnce, CompiledFacts, NormPlaces
from .consumers import Linears, agreed
from .errors import FOREIGN, ArgumentError, MissingAttributeError, SpecError, UnreadableError, shown
from .experts import SHARED, experts_of
from .linear_specs import LinearSpec
from .linears import linear_of
from .parallel import ambient
from .rope_source import RopeSource
from .sharding import Sharded
from .sources import ABSENT, NormSource, Path, Source, torchs_norm
from .spec_fields import GATED, made
from .specs import NO_ROPE, ExpertsSpec, GatedMLPSpec, NormSpec, Parallel, ResidualSpec, RopeSpec
from .values import same

S = TypeVar("S")
P = TypeVar("P", NormSource, RopeSource)


class LayerReader(CompiledFacts):
    """The facts of one layer class, by which its layers are read."""

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


class Reading(Sharded):
    """One full reading of one layer."""

    def __init__(self, reader: CompiledFacts, layer: Any, path: str) -> None:
        super().__init__(reader, layer, path)
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
            read["epsilon"] = self.answered(f"{name}.epsilon", source.layer_epsilon, NORM_VALUES["epsilon"])[1]
        if torchs is not None and read["epsilon"] is None:
            why = "torch.nn.RMSNorm with eps=None takes the eps of the dtype that it is called with, which no spec can say"
            raise SpecError("NormSpec", [f"{name}.epsilon: {why}: build it with a number"])
        read["consumers"], read["producers"] = consumers, producers
        return self.part(name, _norm, read)

    def module_of(self, name: str, source: NormSource, near: NormPlaces) -> Any:
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

    def parts_of(self, name: str, part: AtOnce, start: Any, module: Path | None) -> dict[str, Any]:
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


@lru_cache(maxsize=len(SHARED))
def _reader_of_shared(engine: str) -> CompiledFacts:
    return CompiledFacts(f"{engine}:SharedExperts", "experts", SHARED[engine])


def _norm(kind: Callable[..., NormSpec], consumers: tuple[LinearSpec, ...], **values: Any) -> NormSpec:
    quant, unquantised = agreed(consumers)
    return kind(**values, consumers=consumers, quant=quant, unquantised=unquantised)


_NORMS = ("norm", "optional_norm", *GATED)
"""The kinds of single norms."""
