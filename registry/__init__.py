"""Floor 2: which adapter speaks for which layer.

The functions here ask the default registry: the built-in adapters, the models.toml that ships with the library, and
what installed plugins add. `Registry()` makes others. Importing this package imports neither torch nor any engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..adapters.parallel import tensor_parallel
from .errors import CatalogError, ConflictError, PluginError, UnknownModelError
from .lookup import Registry

if TYPE_CHECKING:
    from .catalog import ModelEntry


def _fill(registry: Registry) -> None:
    from pathlib import Path

    from ..adapters import BUILTIN
    from .plugins import load_plugins

    for adapter in BUILTIN:
        registry.register_adapter(adapter)
    registry.load(Path(__file__).parent.parent / "models.toml")
    registry.on_miss(load_plugins)


def fresh() -> Registry:
    """A new registry with the built-in content and plugins, independent of the default one."""
    return Registry(fill=_fill)


default = fresh()
"""The registry behind this package's functions."""

spec_for = default.spec_for
specs_in = default.specs_in
unknown_in = default.unknown_in
adapter_for = default.adapter_for
models = default.models
model = default.model
adapters = default.adapters
layer_classes = default.layer_classes
register_adapter = default.register_adapter
register_model = default.register_model
load = default.load


def __getattr__(name: str) -> Any:
    # The typed entries need cattrs' neighbours only when they are used.
    if name == "ModelEntry":
        from .catalog import ModelEntry

        return ModelEntry
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CatalogError",
    "ConflictError",
    "ModelEntry",
    "PluginError",
    "Registry",
    "UnknownModelError",
    "adapter_for",
    "adapters",
    "default",
    "fresh",
    "layer_classes",
    "load",
    "model",
    "models",
    "register_adapter",
    "register_model",
    "spec_for",
    "specs_in",
    "tensor_parallel",
    "unknown_in",
]
