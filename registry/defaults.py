"""The default registry, and its methods as functions."""

from __future__ import annotations

from ..adapters.builtin import BUILTIN
from .entries import MODELS_TOML, Entries
from .lookup import Registry
from .plugins import load_plugins


def _fill(registry: Registry) -> None:
    for adapter in BUILTIN:
        registry.register_adapter(adapter, "layerfuse itself")
    registry.register_models(Entries.shipped(), str(MODELS_TOML))
    registry.on_miss(load_plugins)


def fresh() -> Registry:
    """A new registry with the built-in content and plugins, independent of the default one."""
    return Registry(fill=_fill)


default = fresh()
"""The registry behind this package's functions."""

spec_for = default.spec_for
explain = default.explain
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
