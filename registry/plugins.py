"""What installed packages add: adapters and models, found by entry point and imported only when needed."""

from __future__ import annotations

import warnings
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..adapters.base import Adapter
from ..adapters.errors import said, shown
from .errors import PluginError

if TYPE_CHECKING:
    from .lookup import Registry

ADAPTERS = "layerfuse.adapters"
"""Entry-point group. The object is an Adapter, or a list of them."""

MODELS = "layerfuse.models"
"""Entry-point group. The object is the path of a TOML file, or a package that holds a `models.toml`."""


def installed() -> list[EntryPoint]:
    """The plugins that are installed, without importing any."""
    return [*entry_points(group=ADAPTERS), *entry_points(group=MODELS)]


def load_plugins(registry: Registry) -> None:
    """Register what every installed plugin brings.

    A plugin that cannot be imported is reported as a warning, so that it does not take down an engine that never
    needed it. One that redeclares what is known is an error.

    Raises:
        ConflictError: a plugin redeclares something; both owners are named.
        CatalogError, FactsError: what a plugin declares is malformed.
    """
    for plugin in installed():
        package = "" if plugin.dist is None else f" of {plugin.dist.name}"
        owner = f"the plugin {plugin.name}{package} ({plugin.value})"
        try:
            content = plugin.load()
        except (Exception, SystemExit) as error:  # a script that was never meant to be imported ends in sys.exit
            warnings.warn(f"{owner} cannot be imported: {said(error)}", RuntimeWarning, stacklevel=2)
            continue
        if plugin.group == ADAPTERS:
            for adapter in _adapters(content, owner):
                registry.register_adapter(adapter, owner)
        else:
            from .files import read_file

            registry.register_models(read_file(_path(content, owner)), owner)


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
