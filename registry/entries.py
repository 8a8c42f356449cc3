"""Declared models, each structured when it is asked for: what finds it, and what it names of others, is known before.

The file that ships with the library is taken at its word here, as the tests hold it to its schema and to itself; a user's is checked whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .catalog import ModelEntry

MODELS_TOML = Path(__file__).parent.parent / "models.toml"
"""The models that ship with the library."""

_BUILT = MODELS_TOML.with_suffix(".json")
"""The same tables, which setup.py writes into a wheel: JSON is read some forty times as fast."""


def shipped_tables() -> dict[str, dict[str, Any]]:
    """The tables of the models that ship with the library, by name, as they are written."""
    if _BUILT.is_file():
        document = json.loads(_BUILT.read_bytes())
    else:  # a checkout that is imported as it lies
        import tomllib

        document = tomllib.loads(MODELS_TOML.read_text(encoding="utf-8"))
    tables: dict[str, dict[str, Any]] = document["models"]
    return tables


class Entries(Mapping[str, "ModelEntry"]):
    """Entries by name, read-only. Those that were given as tables are structured one by one."""

    def __init__(self, heads: Mapping[str, ModelEntry], tables: Mapping[str, Mapping[str, Any]]) -> None:
        """The entry of each, or a head (`files.head`) of it, which says its names and what it names of others, where its table is given too."""
        self.heads = heads
        self._tables = tables
        self._made: dict[str, ModelEntry] = {}

    @classmethod
    def shipped(cls) -> Entries:
        """Those that ship with the library."""
        from .files import head

        tables = shipped_tables()
        return cls({name: head(name, table) for name, table in tables.items()}, tables)

    @property
    def structured(self) -> frozenset[str]:
        """The names of those whose tables were structured so far."""
        return frozenset(self._made)

    def __getitem__(self, name: str) -> ModelEntry:
        if name not in self._tables:
            return self.heads[name]
        if name not in self._made:
            from .files import one, structure

            try:
                self._made[name] = one(name, self._tables[name])
            except Exception:
                structure({"models": {name: self._tables[name]}}, MODELS_TOML.name)  # says what is wrong, and where
                raise
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self.heads

    def __iter__(self) -> Iterator[str]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __repr__(self) -> str:
        return f"Entries({', '.join(self)})"

    def adding(self, models: Mapping[str, ModelEntry]) -> Entries:
        """These and more, which are new; what was structured stays so."""
        more = models if isinstance(models, Entries) else Entries(models, {})
        both = Entries({**self.heads, **more.heads}, {**self._tables, **more._tables})
        both._made = {**self._made, **more._made}
        return both
