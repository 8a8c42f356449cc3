"""Finding declared models: one by its name, quickly, or all of them with files and plugins."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..adapters.errors import shown
from ..registry.entries import Entries
from ..registry.errors import UnknownModelError

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry
    from ..registry.inspect import Inspection
    from ..registry.lookup import Registry


class NoConfigError(UnknownModelError):
    """A path that leads to no config.json."""

    def __str__(self) -> str:
        there = f"there is no config.json {'in' if os.path.isdir(self.name) else 'at'}"
        return (
            f"{there} {shown(self.name, 400)}: expected the path of a config.json or of the folder that holds it, or the name or Hugging Face "
            f"id of a declared model (`layerfuse models` lists all {len(self.known)})"
        )


def _is_path(name: str) -> bool:
    """Whether this means a file and no model: names have no slash, and Hugging Face's ids have one."""
    return (
        os.path.exists(name)
        or name.startswith(("/", "./", "../", "~"))
        or name.endswith(".json")
        or name.count("/") > 1
    )


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


def inspected(path: Path, registry: Registry, name: str | None = None) -> Inspection:
    """What a config.json says, or the one in a folder; called by its folder where it has no name.

    Raises:
        ConfigError: it does not say enough; everything missing is listed.
    """
    from ..registry.inspect import inspect, read_config, read_modelopt

    config = read_config(path)
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    named = path.stem if path.stem != "config" and not path.is_dir() else folder.name
    unnamed = None if config.get("_name_or_path") else named or None
    modelopt = read_modelopt(path)
    return inspect(config, registry=registry, name=name, file=str(path), folder=unnamed, modelopt=modelopt)


def find_model(name: str, files: Sequence[Path] = ()) -> ModelEntry:
    """The entry that `found_model` gives."""
    return found_model(name, files)[0]


def found_model(name: str, files: Sequence[Path] = ()) -> tuple[ModelEntry, str | None]:
    """One model by its name, an alias of it or its Hugging Face id; or that of a config.json, by its path or folder, and the file that says how its checkpoint is quantised.

    A model that ships with the library is read alone: looking for plugins would take longer than everything else that
    `plan` does.

    Raises:
        UnknownModelError: with the closest names.
        ConfigError: a config.json does not say enough.
        CatalogError: one of `files` holds mistakes.
    """
    if not files:
        shipped = Entries.shipped()
        for key, head in shipped.heads.items():
            if name.lower() in head.names:
                return shipped[key], None
    registry, config = registry_with(files), os.path.join(name, "config.json") if os.path.isdir(name) else name
    try:
        return registry.model(name), None
    except UnknownModelError as error:
        if not os.path.isfile(config) or not config.endswith(".json"):
            if _is_path(name):
                raise NoConfigError(name, error.known) from None
            raise
    found = inspected(Path(config), registry)
    from ..registry.inspect import MODELOPT

    beside = any(kind.source.startswith(MODELOPT) for kind in found.entry.quant.values())
    says = os.path.join(os.path.dirname(config), MODELOPT) if beside else config
    if found.unread is not None:
        print(f"layerfuse: {config}: {found.unread}", file=sys.stderr)
    if found.same_as:
        import attrs

        # The layers of a declared model; how this copy of it is quantised, its own config says.
        return attrs.evolve(registry.model(found.same_as[0]), quant=found.entry.quant), says
    said = f"layerfuse: {config} was read alone; `layerfuse inspect` holds what it says to the model's own code"
    print(said, file=sys.stderr)
    return found.entry, says
