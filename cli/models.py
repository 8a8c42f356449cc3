"""Finding declared models: one by its name, quickly, or all of them with files and plugins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry
    from ..registry.lookup import Registry


def shipped() -> dict[str, Any]:
    """The tables of the models.toml that ships with the library, by name."""
    import tomllib

    text = (Path(__file__).parent.parent / "models.toml").read_text(encoding="utf-8")
    tables: dict[str, Any] = tomllib.loads(text)["models"]
    return tables


def registry_with(files: Sequence[Path]) -> Registry:
    """The built-in models and plugins, and those of `files`.

    Raises:
        CatalogError: a file holds mistakes; all are listed.
        ConflictError: a file redeclares something differently.
    """
    from ..registry.defaults import fresh

    registry = fresh()
    for file in files:
        registry.load(file)
    return registry


def find_model(name: str, files: Sequence[Path] = ()) -> ModelEntry:
    """One model by its name, an alias of it or its Hugging Face id.

    A model that ships with the library is read alone: checking all others, and looking for plugins, would take longer
    than everything else that `plan` does.

    Raises:
        UnknownModelError: with the closest names.
        CatalogError: one of `files` holds mistakes.
    """
    if not files:
        wanted = name.lower()
        for key, table in shipped().items():
            if wanted in (key, table.get("hf_id", "").lower(), *table.get("aliases", ())):
                from ..registry.files import structure

                return structure({"models": {key: table}}, "models.toml")[key]
    return registry_with(files).model(name)
