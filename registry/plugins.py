"""What installed packages add: adapters and models, found by entry point and imported only when needed."""

from __future__ import annotations

import warnings
from importlib.metadata import EntryPoint
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..adapters.base import Adapter
from ..adapters.errors import FOREIGN, LayerfuseError, cut, said, shown
from .entry_points import entry_points, package_of
from .errors import CatalogError, PluginError
from .tables import PLUGIN

if TYPE_CHECKING:
    from .lookup import Registry

ADAPTERS = "layerfuse.adapters"
"""Entry-point group. The object is an Adapter, or a list of them."""

MODELS = "layerfuse.models"
"""Entry-point group. The object is the path of a TOML file, or a package that holds a `models.toml`."""


def installed() -> list[EntryPoint]:
    """The plugins that are installed, without importing any: adapters first, in a stable order."""
    return sorted(entry_points(ADAPTERS, MODELS), key=lambda plugin: (plugin.group, plugin.name, plugin.value))


def load_plugins(registry: Registry) -> None:
    """Register what every installed plugin brings.

    A plugin that cannot be imported, or brings something else, is left out with a warning that names it, so that it does not take
    down an engine that never needed it. One that redeclares what is known, or what another brings, is an error.

    Raises:
        ConflictError: as `register_content`.
    """
    for plugin in installed():
        try:
            register_content(registry, plugin, import_plugin(plugin))
        except PluginError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        except CatalogError as error:
            warnings.warn(f"{owner_of(plugin)} cannot be read: {error}", RuntimeWarning, stacklevel=2)


def import_plugin(plugin: EntryPoint) -> Any:
    """The object that a plugin's entry point names.

    Raises:
        PluginError: importing it raises, or ends in `sys.exit`.
    """
    try:
        return plugin.load()
    except FOREIGN as error:  # a script that was never meant to be imported ends in sys.exit
        raise PluginError(f"{owner_of(plugin)} cannot be imported: {said(error)}") from error


def register_content(registry: Registry, plugin: EntryPoint, content: Any) -> None:
    """Register what one plugin brings, all or none.

    Raises:
        PluginError: it is neither an adapter nor a models file, or cannot be read.
        ConflictError: it redeclares something; both owners are named.
        CatalogError: its models file holds mistakes, or names what is not known.
    """
    owner = owner_of(plugin)
    try:
        if plugin.group == ADAPTERS:
            registry.register_adapters(_adapters(content, owner), owner)
        else:
            from .files import read_file

            registry.register_models(read_file(_path(content, owner)), owner)
    except LayerfuseError:
        raise
    except FOREIGN as error:  # the object may be anything, and break as it likes
        raise PluginError(f"{owner}: reading it raised {said(error)}") from error


def owner_of(plugin: EntryPoint) -> str:
    """What messages call a plugin: its entry point, its package and the object."""
    package = "" if plugin.dist is None else f" of {package_of(plugin.dist)}"
    return f"{PLUGIN}{cut(plugin.name)}{package} ({cut(plugin.value)})"


def _adapters(content: Any, owner: str) -> list[Adapter]:
    listed = list(content) if isinstance(content, (list, tuple)) else [content]
    if not all(isinstance(adapter, Adapter) for adapter in listed):
        raise PluginError(f"{owner}: expected an Adapter or a list of them, got {shown(content)}")
    return listed


def _path(content: Any, owner: str) -> Path:
    if isinstance(content, ModuleType):
        return Path(str(files(content) / "models.toml"))
    if isinstance(content, (str, Path)):
        return Path(content)
    raise PluginError(f"{owner}: expected a path or a package with a models.toml, got {shown(content)}")
