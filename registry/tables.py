"""What a registry knows, as one value that is never changed: registering makes a new one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from ..adapters.base import Adapter
from ..adapters.reader import LayerReader
from .entries import Entries
from .errors import ConflictError

if TYPE_CHECKING:
    from .catalog import ModelEntry

PLUGIN = "the plugin "
"""How the source of what an installed plugin brings begins."""

Readers = tuple[LayerReader, ...]
"""How the layers of one class are read: usually one way, several where a class is two kinds of layer at once."""


@frozen(kw_only=True)
class Tables:
    """Adapters, models and layer classes that agree with each other."""

    adapters: Mapping[str, Adapter] = field(factory=dict)
    "By name."
    models: Entries = field(factory=lambda: Entries({}, {}))
    "By name; those that ship with the library are structured when they are asked for."
    owners: Mapping[str, str] = field(factory=dict)
    "Layer class (`package:ClassName`) -> the name of its adapter."
    readers: Mapping[str, tuple[tuple[str, Readers], ...]] = field(factory=dict)
    "Class name -> (module prefix, readers), the longest prefix first."
    declared_by: Mapping[str, str] = field(factory=dict)
    "`the adapter NAME` or `the model NAME` -> who declared it, for messages."
    ignored: frozenset[str] = frozenset()
    "Classes that look like layers and are none of ours."

    def adding(self, adapters: Iterable[Adapter], models: Mapping[str, ModelEntry], source: str) -> Tables:
        """These tables and more. What is already known and the same is passed over.

        Raises:
            ConflictError: something is declared differently by two owners; all that is, is said.
        """
        by_name, owners = dict(self.adapters), dict(self.owners)
        readers = {name: list(found) for name, found in self.readers.items()}
        declared_by = dict(self.declared_by)
        ignored = self.ignored
        names: set[str] = set()
        conflicts: list[ConflictError] = []
        plugin = source if source.startswith(PLUGIN) else ""
        for adapter in adapters:
            what = f"the adapter {adapter.name}"
            if by_name.setdefault(adapter.name, adapter) != adapter:
                conflicts.append(ConflictError(what, [declared_by[what], source]))
                continue
            declared_by.setdefault(what, source)
            ignored |= adapter.ignored
            for key, facts in adapter:
                if key in owners:
                    other = owners[key]
                    if by_name[other].layers[key] != facts:
                        both = [
                            f"the adapter {each} ({declared_by[f'the adapter {each}']})"
                            for each in (other, adapter.name)
                        ]
                        conflicts.append(ConflictError(f"the layer class {key}", both))
                    continue
                owners[key] = adapter.name
                prefix, _, name = key.partition(":")
                compiled = tuple(LayerReader(key, adapter.name, several, plugin) for several in facts)
                readers.setdefault(name, []).append((prefix, compiled))
                names.add(name)
        for name in sorted(names):
            conflicts += _nested(name, [prefix for prefix, _ in readers[name]], by_name, owners, declared_by)
        for name in models:
            what = f"the model {name}"
            if name in self.models and self.models[name] != models[name]:
                conflicts.append(ConflictError(what, [declared_by[what], source]))
            declared_by.setdefault(what, source)
        entries = self.models.adding(models)
        conflicts += _same_names(entries.heads, declared_by)
        if conflicts:
            raise ConflictError.of(conflicts)
        longest_first = {
            name: tuple(sorted(found, key=lambda candidate: -len(candidate[0]))) for name, found in readers.items()
        }
        return Tables(
            adapters=by_name,
            models=entries,
            owners=owners,
            readers=longest_first,
            declared_by=declared_by,
            ignored=ignored,
        )

    def readers_of(self, cls: type) -> Readers:
        """How layers of this class are read: by its own name or, failing that, a base's; empty for an unknown one.

        What is ignored is not read by a base of it either.
        """
        for base in cls.__mro__:
            if (readers := self._readers_of_one(base)) or self._ignores_one(base):
                return readers
        return ()

    def names(self, cls: type) -> bool:
        """Whether this class is known by its own name, so that no plugin may declare it otherwise."""
        return bool(self._readers_of_one(cls))

    def _readers_of_one(self, cls: type) -> Readers:
        for prefix, readers in self.readers.get(cls.__name__, ()):
            # As text: a class body may say anything.
            if f"{cls.__module__}.".startswith(f"{prefix}."):
                return readers
        return ()

    def ignores(self, cls: type) -> bool:
        """Whether an adapter declares that this class is none of ours."""
        return any(map(self._ignores_one, cls.__mro__))

    def _ignores_one(self, cls: type) -> bool:
        module = str(cls.__module__)
        return any(f"{module[:end]}:{cls.__name__}" in self.ignored for end in _ends_of_parts(module))


def _ends_of_parts(module: str) -> list[int]:
    return [i for i, character in enumerate(module) if character == "."] + [len(module)]


def _nested(
    name: str,
    prefixes: Iterable[str],
    adapters: Mapping[str, Adapter],
    owners: Mapping[str, str],
    declared_by: Mapping[str, str],
) -> Iterator[ConflictError]:
    """Longer prefixes by which one owner would take classes from another's shorter one.

    The longest prefix wins, and plugins are read late: what a layer is would depend on what was looked up before.
    """
    for prefix in prefixes:
        for end in _ends_of_parts(prefix)[:-1]:
            inner, outer = f"{prefix}:{name}", f"{prefix[:end]}:{name}"
            if outer not in owners or adapters[owners[inner]].layers[inner] == adapters[owners[outer]].layers[outer]:
                continue
            said = {key: declared_by[f"the adapter {owners[key]}"] for key in (outer, inner)}
            if said[outer] != said[inner]:
                yield ConflictError(
                    f"the layer class {inner}, which {outer} covers,",
                    [f"the adapter {owners[key]} ({said[key]})" for key in (outer, inner)],
                )


def _same_names(entries: Mapping[str, ModelEntry], declared_by: Mapping[str, str]) -> Iterator[ConflictError]:
    """Aliases that another model goes by as well: as its name, its alias or its Hugging Face id."""
    owners: dict[str, list[ModelEntry]] = {}
    for entry in entries.values():
        for name in dict.fromkeys(entry.names):
            owners.setdefault(name, []).append(entry)
    for name, several in owners.items():
        if len(several) > 1 and any(name in entry.aliases for entry in several):
            said = [f"the model {entry.name} ({declared_by[f'the model {entry.name}']})" for entry in several]
            yield ConflictError(f"the name {name!r}", said)
