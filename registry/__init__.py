"""Floor 2: which adapter speaks for which layer.

The functions here ask the default registry: the built-in adapters, the models.toml that ships with the library, and
what installed plugins add. `Registry()` makes others. Importing this package imports neither torch nor any engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..adapters.parallel import tensor_parallel
    from .catalog import ModelEntry
    from .defaults import (
        adapter_for,
        adapters,
        default,
        explain,
        fresh,
        layer_classes,
        load,
        model,
        models,
        register_adapter,
        register_model,
        spec_for,
        specs_in,
        unknown_in,
    )
    from .errors import CatalogError, ConflictError, PluginError, UnknownEngineError, UnknownModelError
    from .lookup import Registry

__all__ = [
    "CatalogError",
    "ConflictError",
    "ModelEntry",
    "PluginError",
    "Registry",
    "UnknownEngineError",
    "UnknownModelError",
    "adapter_for",
    "adapters",
    "default",
    "explain",
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

_ERRORS = ("CatalogError", "ConflictError", "PluginError", "UnknownEngineError", "UnknownModelError")
_ELSEWHERE = {
    **dict.fromkeys(_ERRORS, ".errors"),
    "ModelEntry": ".catalog",
    "Registry": ".lookup",
    "tensor_parallel": "..adapters.parallel",
}
__getattr__, __dir__ = attach(__name__, {name: _ELSEWHERE.get(name, ".defaults") for name in __all__})
