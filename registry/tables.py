"""What a registry knows, as one value that is never changed: registering makes a new one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from ..adapters.base import Adapter
from ..adapters.reader import LayerReader
from .errors import ConflictError

if TYPE_CHECKING:
    from .catalog import ModelEntry

Readers = tuple[LayerReader, ...]
"""How the layers of one class are read: usually one way, several where a class is two kinds of layer at once."""


@frozen(kw_only=True)
class Tables:
    """Adapters, models and layer classes that agree with each other."""

    adapters: Mapping[str, Adapter] = field(factory=dict)
    "By name."
    models: Mapping[str, ModelEntry] = field(factory=dict)
    "By name."
    owners: Mapping[str, str] = field(factory=dict)
    "Layer class (`package:ClassName`) -> the name of its adapter."
    readers: Mapping[str, tuple[tuple[str, Readers], ...]] = field(factory=dict)
    "Class name -> (module prefix, readers), the longest prefix first."
    declared_by: Mapping[str, str] = field(factory=dict)
    "`the adapter NAME` or `the model NAME` -> who declared it, for messages."
    ignored: frozenset[str] = frozenset()
    "Classes that look like attention and are none of ours."

    def adding(self, adapters: Iterable[Adapter], models: Mapping[str, ModelEntry], source: str) -> Tables:
        """These tables and more. What is already known and the same is passed over.

        Raises:
            ConflictError: something is declared differently by two owners.
        """
        by_name, owners, entries = dict(self.adapters), dict(self.owners), dict(self.models)
        readers = {name: list(found) for name, found in self.readers.items()}
        declared_by = dict(self.declared_by)
        ignored = self.ignored
        for adapter in adapters:
            what = f"the adapter {adapter.name}"
            if by_name.setdefault(adapter.name, adapter) != adapter:
                raise ConflictError(what, [declared_by[what], source])
            declared_by.setdefault(what, source)
            ignored |= adapter.ignored
            for key, facts in adapter:
                owner = owners.setdefault(key, adapter.name)
                if by_name[owner].layers[key] != facts:
                    raise ConflictError(f"the layer class {key}", [owner, adapter.name])
                prefix, _, name = key.partition(":")
                if owner == adapter.name and prefix not in (known for known, _ in readers.get(name, ())):
                    compiled = tuple(LayerReader(key, owner, several) for several in facts)
                    readers.setdefault(name, []).append((prefix, compiled))
        for name, entry in models.items():
            what = f"the model {name}"
            if entries.setdefault(name, entry) != entry:
                raise ConflictError(what, [declared_by[what], source])
            declared_by.setdefault(what, source)
        _check_names(entries, declared_by)
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
        """How layers of this class are read: by its own name or, failing that, a base's; empty for an unknown one."""
        for base in cls.__mro__:
            for prefix, readers in self.readers.get(base.__name__, ()):
                if base.__module__ == prefix or base.__module__.startswith(f"{prefix}."):
                    return readers
        return ()

    def ignores(self, cls: type) -> bool:
        """Whether an adapter declares that this class is none of ours."""
        return any(
            f"{base.__module__[:end]}:{base.__name__}" in self.ignored
            for base in cls.__mro__
            for end in _ends_of_parts(base.__module__)
        )


def _ends_of_parts(module: str) -> list[int]:
    return [i for i, character in enumerate(module) if character == "."] + [len(module)]


def _check_names(entries: Mapping[str, ModelEntry], declared_by: Mapping[str, str]) -> None:
    """Refuse an alias that another model goes by as well: as its name, its alias or its Hugging Face id."""
    owners: dict[str, list[ModelEntry]] = {}
    for entry in entries.values():
        for name in dict.fromkeys(entry.names):
            owners.setdefault(name, []).append(entry)
    for name, several in owners.items():
        if len(several) > 1 and any(name in entry.aliases for entry in several):
            said = [f"the model {entry.name} ({declared_by[f'the model {entry.name}']})" for entry in several]
            raise ConflictError(f"the name {name!r}", said)
