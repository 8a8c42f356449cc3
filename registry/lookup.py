"""The registry: which adapter speaks for which layer, and which models are declared.

Layers are recognised by the name of their class, through its bases, so no engine is ever imported. Registering copies
the tables and swaps them in at once: readers in other threads see the old or the new ones, never a half.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..adapters.base import Adapter, Facts, check_key
from ..adapters.errors import FactsError, UnknownLayerError, did_you_mean
from ..adapters.reader import LayerReader
from ..adapters.specs import FAMILIES, KernelSpec, Parallel, ResidualSpec
from .errors import ConflictError, UnknownModelError

if TYPE_CHECKING:
    from .catalog import ModelEntry

S = TypeVar("S")

_LOOKS_LIKE_ATTENTION = re.compile(r"(Attention|Attn|MLA|DeltaNet|SelfAttn)\d*$")


class Registry:
    """Adapters by layer class, and models by name.

    A new one is empty; `layerfuse.registry.default` holds the built-in adapters and models, and what plugins add.
    """

    def __init__(self, *, fill: Callable[[Registry], None] | None = None) -> None:
        """Args: fill: adds the first content when something is first asked of the registry."""
        self._lock = threading.RLock()
        self._fill = fill
        self._late: list[Callable[[Registry], None]] = []
        self._adapters: dict[str, Adapter] = {}
        self._models: dict[str, ModelEntry] = {}
        self._owners: dict[str, str] = {}
        # Class name -> (module prefix, readers), longest prefix first.
        self._readers: dict[str, list[tuple[str, tuple[LayerReader, ...]]]] = {}
        self._ignored: frozenset[str] = frozenset()
        self._by_class: dict[type, tuple[LayerReader, ...]] = {}

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
            layer: an attention layer, a decoder layer or an inner kernel layer of any known engine.
            of: the spec type wanted, where a class is two kinds of layer at once.
            parallel: the tensor-parallel degree and rank, where the layer does not say them itself. Contradicting what
                it does say is an error.
            path: the layer's name in its model, for messages.

        Returns:
            An MLASpec, GatedDeltaNetSpec, GQASpec, ResidualSpec, or the spec of a kernel layer.

        Raises:
            UnknownLayerError: no adapter knows the class.
            MissingAttributeError: the layer lacks what its adapter reads.
            ParallelUnknownError, ParallelConflictError: the sharding is unsaid, or said twice.
            SpecError: what the layer says cannot all be true.
        """
        readers = self._by_class.get(type(layer)) or self._find(type(layer))
        if not readers:
            raise self._unknown(layer)
        if of is None:
            return readers[0].read(layer, parallel, path)
        for reader in readers:
            if issubclass(reader.facts.spec, of):
                return reader.read(layer, parallel, path)
        kinds = ", ".join(reader.facts.spec.__name__ for reader in readers)
        raise UnknownLayerError(
            class_name(type(layer)), (), hint=f"as {of.__name__} (it is known as {kinds}), declare facts for that type"
        )

    def specs_in(self, model: Any, *, of: type[Any] | None = None, parallel: Parallel | None = None) -> list[Any]:
        """The specs of a model's layers as (path, spec), in the order of its modules, which is that of its layers.

        Decoder layers give their residual stream, attention layers their attention. Kernel layers inside a layer that
        is itself known are left out; ask `spec_for` for those, or pass `of=KernelSpec`.

        Args:
            model: a module with `named_modules()`.
            of: only specs of this type.
            parallel: as for `spec_for`, for every layer.

        Raises:
            UnknownLayerError: the model holds no known layer at all; the classes that look like attention are named.
            And whatever `spec_for` raises for one of them, with the layer's path.
        """
        found = []
        # Modules come parent first, and all of a layer's before the next: one prefix tells what lies inside it.
        inside: str | None = None
        for path, module in model.named_modules():
            readers = self._readers_of(type(module))
            if not readers or (of is None and _within(path, inside)):
                continue
            for reader in readers:
                if of is None or issubclass(reader.facts.spec, of):
                    found.append((path, reader.read(module, parallel, path)))
            if any(_is_attention(reader) for reader in readers):
                inside = path
        if not found and of is None:
            raise self._nothing_in(model)
        return found

    def unknown_in(self, model: Any) -> list[tuple[str, str]]:
        """Modules that look like attention by their class's name, but that no adapter knows, as (path, class).

        What an adapter declares as ignored (vision towers), and what lies inside a known layer, is not listed.
        """
        found = []
        inside: str | None = None
        for path, module in model.named_modules():
            if _within(path, inside):
                continue
            cls = type(module)
            readers = self._readers_of(cls)
            if any(map(_is_attention, readers)):
                inside = path
            elif not readers and _LOOKS_LIKE_ATTENTION.search(cls.__name__):
                if self._is_ignored(cls):
                    inside = path
                else:
                    found.append((path, class_name(cls)))
        return found

    def adapter_for(self, layer: Any) -> Adapter:
        """The adapter whose facts read this layer.

        Raises:
            UnknownLayerError: no adapter knows the class.
        """
        readers = self._readers_of(type(layer))
        if not readers:
            raise self._unknown(layer)
        return self._adapters[readers[0].owner]

    def readers_for(self, cls: type) -> tuple[LayerReader, ...]:
        """How layers of this class are read, first the one that `spec_for` uses; empty for an unknown class."""
        return self._readers_of(cls)

    # ---- listing (all read-only)

    def models(self) -> Mapping[str, ModelEntry]:
        """The declared models by name."""
        self._complete()
        return MappingProxyType(self._models)

    def model(self, name: str) -> ModelEntry:
        """One declared model, by its name or its Hugging Face id.

        Raises:
            UnknownModelError: with the closest names.
        """
        models = self.models()
        wanted = name.lower()
        for entry in models.values():
            if wanted in (entry.name, (entry.hf_id or "").lower()):
                return entry
        raise UnknownModelError(name, models)

    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by name. A model that brings layer classes of its own is an adapter too."""
        self._complete()
        return MappingProxyType(self._adapters)

    def layer_classes(self) -> Mapping[str, str]:
        """Every known layer class (`package:ClassName`) with the adapter that declares it."""
        self._complete()
        return MappingProxyType(self._owners)

    # ---- registering

    def register_adapter(self, adapter: Adapter) -> None:
        """Add an adapter. The same one again is a no-op.

        Raises:
            ConflictError: the name, or one of its layer classes, is declared differently by another; nothing is added.
        """
        self._start()
        with self._lock:
            self._add([adapter], {})

    def register_model(self, entry: ModelEntry) -> None:
        """Add a model and the layer classes it brings. The same one again is a no-op.

        Raises:
            ConflictError: the name or one of its classes is declared differently; nothing is added.
            CatalogError: it names an adapter that is not registered, or its layer classes are malformed.
        """
        self.register_models({entry.name: entry}, f"the model {entry.name}")

    def register_models(self, entries: Mapping[str, ModelEntry], source: str) -> None:
        """Add several models, all or none. `source` is who declares them, for messages.

        Raises:
            CatalogError: some cannot be added; every reason is listed.
        """
        self._start()
        from .declare import declared_adapters

        with self._lock:
            adapters = declared_adapters(self, entries, source)
            self._add(adapters, entries, source)

    def load(self, path: str | Path) -> Mapping[str, ModelEntry]:
        """Read a models.toml file and register all it declares, or nothing if it holds a mistake.

        Returns:
            The file's entries by name.

        Raises:
            CatalogError: every mistake, as `file: problem @ path`.
            ConflictError: it redeclares something differently; both owners are named.
        """
        from .files import read_file

        entries = read_file(path)
        self.register_models(entries, str(path))
        return MappingProxyType(entries)

    def on_miss(self, more: Callable[[Registry], None]) -> None:
        """Call `more` once, when a class or name is asked for that is not yet known: how plugins stay unimported."""
        with self._lock:
            self._late.append(more)

    # ---- inside

    def _start(self) -> None:
        if self._fill is None:
            return
        with self._lock:
            fill, self._fill = self._fill, None
            if fill is not None:
                try:
                    fill(self)
                except BaseException:
                    self._fill = fill
                    raise

    def _complete(self) -> bool:
        """Load whatever was left for later; whether there was something."""
        self._start()
        if not self._late:
            return False
        with self._lock:
            late, self._late = self._late, []
            for more in late:
                more(self)
        return bool(late)

    def _add(self, adapters: Iterable[Adapter], models: Mapping[str, ModelEntry], source: str = "") -> None:
        """Check everything against the tables, then swap in new ones."""
        all_adapters, owners, all_models = dict(self._adapters), dict(self._owners), dict(self._models)
        readers = {name: list(entries) for name, entries in self._readers.items()}
        ignored = self._ignored
        for adapter in adapters:
            known = all_adapters.get(adapter.name)
            if known is not None and known != adapter:
                raise ConflictError(f"the adapter {adapter.name}", ["an earlier registration", source or "this one"])
            all_adapters[adapter.name] = adapter
            ignored |= adapter.ignored
            for key, facts in adapter:
                owner = owners.get(key)
                if owner is not None:
                    if all_adapters[owner].layers[key] != facts:
                        raise ConflictError(f"the layer class {key}", [owner, adapter.name])
                    continue
                owners[key] = adapter.name
                prefix, _, name = key.partition(":")
                entry = (prefix, tuple(LayerReader(key, adapter.name, several) for several in facts))
                readers.setdefault(name, []).append(entry)
                readers[name].sort(key=lambda candidate: -len(candidate[0]))
        for name, entry_ in models.items():
            if all_models.setdefault(name, entry_) != entry_:
                raise ConflictError(f"the model {name}", ["an earlier registration", source])
        self._adapters, self._owners, self._models = all_adapters, owners, all_models
        self._readers, self._ignored = readers, ignored
        self._by_class = {}

    def _readers_of(self, cls: type) -> tuple[LayerReader, ...]:
        known = self._by_class.get(cls)
        return self._find(cls) if known is None else known

    def _find(self, cls: type) -> tuple[LayerReader, ...]:
        self._start()
        by_class = self._by_class
        found = self._match(cls)
        if not found and _LOOKS_LIKE_ATTENTION.search(cls.__name__) and self._complete():
            by_class, found = self._by_class, self._match(cls)
        by_class[cls] = found
        return found

    def _match(self, cls: type) -> tuple[LayerReader, ...]:
        for base in cls.__mro__:
            for prefix, readers in self._readers.get(base.__name__, ()):
                if base.__module__ == prefix or base.__module__.startswith(prefix + "."):
                    return readers
        return ()

    def _is_ignored(self, cls: type) -> bool:
        return any(
            f"{'.'.join(base.__module__.split('.')[:depth])}:{base.__name__}" in self._ignored
            for base in cls.__mro__
            for depth in range(1, base.__module__.count(".") + 2)
        )

    def _unknown(self, layer: Any) -> UnknownLayerError:
        self._complete()
        hint = ""
        if hasattr(type(layer), "named_modules") and any(True for _ in layer.children()):
            inner = [(p, m) for p, m in layer.named_modules() if p and self._readers_of(type(m))]
            if inner:
                hint = (
                    f"ask specs_in for a whole model; this one holds known layers, the first at {inner[0][0]}. For it"
                )
        return UnknownLayerError(class_name(type(layer)), self._owners, hint)

    def _nothing_in(self, model: Any) -> UnknownLayerError:
        unknown = self.unknown_in(model)
        if not unknown:
            return UnknownLayerError(
                class_name(type(model)), (), "give a model that holds attention layers; this one has none that looks so"
            )
        path, name = unknown[0]
        return UnknownLayerError(f"{name} (at {path}, and {len(unknown) - 1} more like it)", self._owners)


def _within(path: str, outer: str | None) -> bool:
    return outer is not None and (path.startswith(f"{outer}.") if outer else path != "")


def _is_attention(reader: LayerReader) -> bool:
    return not issubclass(reader.facts.spec, (ResidualSpec, KernelSpec))


def class_name(cls: type) -> str:
    """A class as layer classes are written: `module:ClassName`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def facts_from_words(words: Mapping[str, Any], known: Callable[[str], tuple[Facts, ...] | None]) -> tuple[Facts, ...]:
    """Facts from one declared table: `like` another class or of a `family`, then the words that differ.

    Args:
        words: the table. Beside the spec's fields: `like` (a known class), `family`, and `without` (fields to drop).
        known: facts of a class by key.

    Raises:
        FactsError: neither or unknown `like` or `family`, or words that mean nothing.
    """
    like, family = words.get("like"), words.get("family")
    changes = {name: word for name, word in words.items() if name not in ("like", "family", "without")}
    dropped = words.get("without", [])
    if not isinstance(dropped, list) or not all(isinstance(name, str) for name in dropped):
        raise FactsError(f"without: expected a list of field names, got {dropped!r}")
    if family is not None and (not isinstance(family, str) or family not in FAMILIES):
        raise FactsError(
            f"family: expected one of {', '.join(FAMILIES)}, got {family!r}{did_you_mean(str(family), FAMILIES)}"
        )
    if like is None:
        if family is None:
            raise FactsError('expected like = "<a known class>" or family = "<a kind of layer>"')
        return (Facts(FAMILIES[family], changes),)
    facts = known(check_key(like))
    if facts is None:
        raise FactsError(f"like: no class {like!r} is known")
    if family is not None:
        facts = tuple(several for several in facts if several.spec is FAMILIES[family])
        if not facts:
            raise FactsError(f"like: {like} is not known as {family}")
    if not changes and not dropped:
        return facts
    if len(facts) > 1:
        raise FactsError(f"like: {like} is several kinds of layer; say which family the words are about")
    return (facts[0].but(**dict.fromkeys(dropped), **changes),)
