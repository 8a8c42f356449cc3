"""The registry: which adapter speaks for which layer, and which models are declared.

Layers are recognised by the name of their class, through its bases, so no engine is ever imported. Registering copies
the tables and swaps them in at once: readers in other threads see the old or the new ones, never a half.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..adapters.arguments import expect, expect_callable
from ..adapters.base import Adapter
from ..adapters.errors import FOREIGN, ArgumentError, UnknownLayerError, cut, said, shown
from ..adapters.pipeline import stands_for_missing
from ..adapters.specs import FinalNormSpec, MLPSpec, Parallel, ResidualSpec
from .entries import Entries
from .errors import UnknownModelError
from .streams import Streams, within
from .tables import Readers, Tables
from .unread import Unread, class_name, is_attention

if TYPE_CHECKING:
    from ..adapters.explaining import Explanation
    from ..adapters.reader import LayerReader
    from .catalog import ModelEntry

S = TypeVar("S")

_ROUTED_EXPERT = re.compile(r"(^|\.)experts\.\d+$")
"""Where checkpoints with code of their own (DeepSeek's) keep each routed expert, of the same class as their other MLPs."""


class Registry:
    """Adapters by layer class, and models by name.

    A new one is empty; `layerfuse.registry.default` holds the built-in adapters and models, and what plugins add.
    """

    def __init__(self, *, fill: Callable[[Registry], None] | None = None) -> None:
        """Args: fill: adds the first content when something is first asked of the registry."""
        if fill is not None:
            expect_callable("fill", fill)
        self._lock = threading.RLock()
        self._busy = False
        # Both stay set until their work is done, so that other threads wait for it instead of seeing a half.
        self._fill = fill
        self._late: list[Callable[[Registry], None]] = []
        self._tables = Tables()
        self._by_class: dict[type, Readers] = {}

    # ---- asking

    @overload
    def spec_for(self, layer: Any, *, parallel: Parallel | None = ..., path: str = ...) -> Any: ...
    @overload
    def spec_for(self, layer: Any, of: type[S], *, parallel: Parallel | None = ..., path: str = ...) -> S: ...
    def spec_for(
        self, layer: Any, of: type[Any] | None = None, *, parallel: Parallel | None = None, path: str = ""
    ) -> Any:
        """What this layer is, read now.

        Args:
            layer: an attention layer, an MLP, a decoder layer or an inner kernel layer of any known engine.
            of: the spec type wanted, where a class is two kinds of layer at once.
            parallel: the tensor-parallel degree and rank, where the layer does not say them itself. Contradicting what
                it does say is an error.
            path: the layer's name in its model, for messages, and for the index of an MLP, which keeps none.

        Returns:
            An MLASpec, GatedDeltaNetSpec, GQASpec, GatedMLPSpec, MLPSpec, ResidualSpec, FinalNormSpec, or the spec of a kernel layer.

        Raises:
            UnknownLayerError: no adapter knows the class.
            MissingAttributeError: the layer lacks what its adapter reads.
            ParallelUnknownError, ParallelConflictError: the sharding is unsaid, or said twice.
            SpecError: what the layer says cannot all be true.
            ArgumentError: an argument is of another type.
        """
        return self._reader_of(layer, of).read(layer, parallel, path)

    def explain(
        self, layer: Any, of: type[Any] | None = None, *, parallel: Parallel | None = None, path: str = ""
    ) -> Explanation:
        """What this layer is, and where each field of that was read: `print` it to see why a spec says what it says.

        Args, and errors: as `spec_for`.

        Returns:
            An Explanation: the spec, the class and the adapter that it is known by, and field -> place.
        """
        from ..adapters.explaining import explained

        return explained(self._reader_of(layer, of), layer, parallel, path)

    def _reader_of(self, layer: Any, of: type[Any] | None) -> LayerReader:
        expect("of", of, (type, NoneType), "a spec type such as MLASpec")
        cls = type(layer)
        readers = self._by_class.get(cls) or self._readers_of(cls)
        # A plugin may know a class that is known here by a base of it only: what it is must not depend on earlier questions.
        if self._late and not (readers and self._tables.names(cls)):
            self._complete()
            readers = self._readers_of(cls)
        if not readers:
            raise self._unknown(layer)
        if of is None:
            return readers[0]
        for reader in readers:
            if issubclass(reader.facts.spec, of):
                return reader
        kinds = ", ".join(reader.facts.spec.__name__ for reader in readers)
        raise UnknownLayerError(
            f"{class_name(cls)} as {of.__name__}",
            (),
            f"It is known as {kinds}: ask for that, or declare facts of the other type for it.",
        )

    def specs_in(self, model: Any, *, of: type[Any] | None = None, parallel: Parallel | None = None) -> list[Any]:
        """The specs of a model's layers as (path, spec), in the order of its modules, which is that of its layers.

        Decoder layers give their residual stream, attention layers their attention, MLPs themselves; a routed expert
        gives nothing. The first decoder layer of a module that holds some starts a stream (`ResidualSpec.starts_stream`).
        The module around the layers gives the final norm, after them; on a rank of a pipeline that does not hold the last layer or
        that norm it gives nothing. Kernel layers inside a layer that is itself known are left out; ask `spec_for` for those, or pass
        `of=KernelSpec`.

        Args:
            model: a module with `named_modules()`.
            of: only specs of this type.
            parallel: as for `spec_for`, for every layer.

        Raises:
            UnknownLayerError: the model holds no known layer at all; the classes that look like attention are named.
            And whatever `spec_for` raises for one of them, with the layer's path.
            ArgumentError: an argument is of another type, or the model's `named_modules()` fails.
        """
        expect("of", of, (type, NoneType), "a spec type such as MLASpec")
        self._complete()
        found: list[Any] = []
        # Modules come parent first, and all of a layer's before the next: one prefix tells what lies inside it.
        inside: str | None = None
        around: list[tuple[str, Callable[[], Any]]] = []
        modules = list(_modules(model))
        streams = Streams(modules)
        for path, module in modules:
            while around and not within(path, around[-1][0]):
                outer, read = around.pop()
                found.append((outer, read()))
            if stands_for_missing(module):
                streams.passes(path)
            readers = self._readers_of(type(module))
            # A decoder layer that is its own attention holds an MLP all the same.
            mlp = any(issubclass(reader.facts.spec, MLPSpec) for reader in readers)
            if not readers or (_ROUTED_EXPERT.search(path) if mlp else of is None and within(path, inside)):
                continue
            # A class that is both gives its residual stream first, as a decoder layer comes before its attention.
            for reader in sorted(readers, key=is_attention):
                if (of is not None and not issubclass(reader.facts.spec, of)) or reader.elsewhere(module):
                    continue
                if reader.facts.spec is FinalNormSpec:
                    if streams.goes_on_elsewhere(path):
                        continue  # some models of vLLM build the norm on every rank
                    around.append((path, partial(reader.read, module, parallel, path)))
                else:
                    spec = reader.read(module, parallel, path)
                    if isinstance(spec, ResidualSpec):
                        spec = streams.entered(path, spec)
                    found.append((path, spec))
            if any(is_attention(reader) for reader in readers):
                inside = path
        found += [(outer, read()) for outer, read in reversed(around)]
        if not found and of is None and not streams.elsewhere:
            raise self._nothing_in(model)
        return found

    def unknown_in(self, model: Any) -> list[tuple[str, str]]:
        """What of a model no adapter reads though it should, as (path, class).

        Modules that look like attention by their class's name, or by their children in a known decoder layer. And what is left of
        layers that were declared in part: gated MLPs of known layers, decoder layers around known attention or beside known ones,
        the model's final norm beside known ones. Of those, what they are and how to declare them stands behind the class.

        What an adapter declares as ignored (vision towers), and what lies inside a known attention, is not listed. Nor is a final
        norm that another rank of a pipeline runs.
        """
        self._complete()
        return Unread(list(_modules(model)), self._readers_of, self._tables.ignores).found()

    def ignored_in(self, model: Any) -> list[str]:
        """The paths of what an adapter declares as ignored and none reads. What lies inside of them is as good as ignored."""
        self._complete()
        return [
            path
            for path, module in _modules(model)
            if self._tables.ignores(type(module)) and not self._readers_of(type(module))
        ]

    def adapter_for(self, layer: Any) -> Adapter:
        """The adapter whose facts read this layer.

        Raises:
            UnknownLayerError: no adapter knows the class.
        """
        self._complete()
        readers = self._readers_of(type(layer))
        if not readers:
            raise self._unknown(layer)
        return self._tables.adapters[readers[0].owner]

    def readers_for(self, cls: type) -> Readers:
        """How layers of this class are read, first the one that `spec_for` uses; empty for an unknown class."""
        expect("cls", cls, type, "a layer's class")
        self._complete()
        return self._readers_of(cls)

    # ---- listing (all read-only)

    def models(self) -> Mapping[str, ModelEntry]:
        """The declared models by name."""
        self._complete()
        return MappingProxyType(self._tables.models)

    def model(self, name: str) -> ModelEntry:
        """One declared model, by its name, an alias of it or its Hugging Face id.

        Raises:
            UnknownModelError: with the closest names.
        """
        expect("name", name, str, "a model's name")
        self._complete()
        models, wanted = self._tables.models, name.lower()
        for known, head in models.heads.items():
            if wanted in head.names:
                return models[known]
        names = {each: known for known, head in models.heads.items() for each in head.names}
        raise UnknownModelError.of(name, names, models)

    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by name. A model that brings layer classes of its own is an adapter too."""
        self._complete()
        return MappingProxyType(self._tables.adapters)

    def layer_classes(self) -> Mapping[str, str]:
        """Every known layer class (`package:ClassName`) with the adapter that declares it."""
        self._complete()
        return MappingProxyType(self._tables.owners)

    # ---- registering

    def register_adapter(self, adapter: Adapter, source: str = "a call of register_adapter") -> None:
        """Add an adapter. The same one again is a no-op. `source` is who declares it, for messages.

        Raises:
            ConflictError: the name, or one of its layer classes, is declared differently by another; nothing is added.
            ArgumentError: this is no Adapter.
        """
        expect("adapter", adapter, Adapter, "one Adapter")
        self.register_adapters([adapter], source)

    def register_adapters(self, adapters: Iterable[Adapter], source: str) -> None:
        """Add several adapters, all or none. `source` is who declares them, for messages.

        Raises:
            ConflictError, ArgumentError: as `register_adapter`.
        """
        expect("adapters", adapters, (list, tuple), "Adapters in a list")
        expect("source", source, str, "who declares them")
        for adapter in adapters:
            expect("adapters", adapter, Adapter, "Adapters in a list")
        self._start()
        with self._lock:
            self._add(adapters, {}, source)

    def register_model(self, entry: ModelEntry) -> None:
        """Add a model and the layer classes it brings. The same one again is a no-op.

        Raises:
            ConflictError: the name or one of its classes is declared differently; nothing is added.
            CatalogError: it names an adapter that is not registered, or its layer classes are malformed.
        """
        from .catalog import ModelEntry

        expect("entry", entry, ModelEntry, "a ModelEntry (registry.load reads a file of them)")
        self.register_models({entry.name: entry}, "a call of register_model")

    def register_models(self, entries: Mapping[str, ModelEntry], source: str) -> None:
        """Add several models, all or none. `source` is who declares them, for messages.

        Raises:
            CatalogError: some cannot be added; every reason is listed.
            ArgumentError: these are no entries by their names.
        """
        from .catalog import ModelEntry

        expect("entries", entries, Mapping, "ModelEntries by name")
        expect("source", source, str, "who declares them")
        heads = entries.heads if isinstance(entries, Entries) else entries
        for name, entry in heads.items():
            expect("entries", entry, ModelEntry, "ModelEntries by name")
            if name != entry.name:
                raise ArgumentError(f"entries: the entry {shown(entry.name)} stands under {shown(name)}")
        self._start()
        from .declare import declared_adapters

        with self._lock:
            self._add(declared_adapters(self._tables, heads, source), entries, source)

    def load(self, path: str | Path) -> Mapping[str, ModelEntry]:
        """Read a models.toml file and register all it declares, or nothing if it holds a mistake.

        Returns:
            The file's entries by name.

        Raises:
            CatalogError: every mistake, as `file: problem @ path`.
            ConflictError: it redeclares something differently; both owners are named.
        """
        from .declare import declared_adapters
        from .errors import CatalogError
        from .files import read_file

        def more(entries: Mapping[str, ModelEntry]) -> Sequence[str]:
            self._start()
            try:
                declared_adapters(self._tables, entries, str(path))
            except CatalogError as error:
                return error.problems
            return ()

        entries = read_file(path, more)
        self.register_models(entries, str(path))
        return MappingProxyType(entries)

    def on_miss(self, more: Callable[[Registry], None]) -> None:
        """Call `more` once, when a class or name is asked for that is not yet known: how plugins stay unimported.

        It is given a registry to add to. All that it adds is taken over at once, or nothing where it raises; it is then called
        again, and raises again, whenever something unknown is asked for.
        """
        expect_callable("more", more)
        with self._lock:
            self._late.append(more)

    # ---- inside

    def _start(self) -> None:
        """Add the first content, once."""
        if self._fill is None:
            return
        with self._lock:
            fill = self._fill
            if fill is not None and not self._busy:
                with self._being_busy():
                    fill(self)
                self._fill = None

    def _complete(self) -> None:
        """Load whatever was left for later, once."""
        self._start()
        if not self._late:
            return
        with self._lock:
            if self._late and not self._busy:
                late = list(self._late)
                with self._being_busy():
                    self._take_over(late)
                del self._late[: len(late)]

    def _take_over(self, late: Iterable[Callable[[Registry], None]]) -> None:
        """What these add, all or none: else a class would be known or not by how often something was asked."""
        before = None
        while before is not self._tables:  # a plugin may register something here too, when it is imported
            before = self._tables
            aside = Registry()
            aside._tables = before
            for more in late:
                more(aside)
        self._tables, self._by_class = aside._tables, {}

    @contextmanager
    def _being_busy(self) -> Iterator[None]:
        """What fills a registry asks it to register: that must not start the filling again."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _add(self, adapters: Iterable[Adapter], models: Mapping[str, ModelEntry], source: str) -> None:
        self._tables = self._tables.adding(adapters, models, source)
        self._by_class = {}

    def _readers_of(self, cls: type) -> Readers:
        known = self._by_class.get(cls)
        if known is None:
            self._start()
            # Into the dictionary that was current before looking: a registration meanwhile puts another in its place.
            by_class = self._by_class
            known = by_class[cls] = self._tables.readers_of(cls)
        return known

    def _unknown(self, layer: Any) -> UnknownLayerError:
        hint = ""
        if hasattr(type(layer), "named_modules"):
            try:
                inner = next((p for p, m in layer.named_modules() if p and self._readers_of(type(m))), None)
            except FOREIGN:  # a module that was never initialised: the class is what the error is about
                inner = None
            if inner is not None:
                hint = f"It holds known layers, the first at {inner}: ask specs_in for all of them."
        return UnknownLayerError(class_name(type(layer)), self._tables.owners, hint)

    def _nothing_in(self, model: Any) -> UnknownLayerError:
        unknown = self.unknown_in(model)
        if not unknown:
            return UnknownLayerError(
                class_name(type(model)),
                (),
                "Give a model that holds attention layers: nothing in this one looks like it.",
            )
        path, name = unknown[0]
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return UnknownLayerError(name, self._tables.owners, where=f" (at {cut(path, 200)}{more})")


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    try:
        named = model.named_modules
    except AttributeError:
        raise ArgumentError(f"model: expected a module with named_modules(), got {shown(model)}") from None
    except FOREIGN as error:
        raise ArgumentError(f"model: reading its named_modules raised {said(error)}") from error
    try:
        pairs = list(named())
    except FOREIGN as error:
        raise ArgumentError(f"model: its named_modules() raised {said(error)}") from error
    for pair in pairs:
        if not issubclass(type(pair), tuple) or len(pair) != 2 or not issubclass(type(pair[0]), str):
            raise ArgumentError(
                f"model: expected pairs of a path and a module of its named_modules(), got {shown(pair)}"
            )
    yield from pairs
