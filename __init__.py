"""layerfuse: typed layer specs and checked kernel fusions for LLM inference engines.

    from layerfuse import registry, fusion

    spec = registry.spec_for(layer)            # what the layer is, in one language
    print(fusion.plan(registry.specs_in(model), fusion.Target.named("gfx950")))
    model = fusion.compile(model)              # torch.compile with the planned fusions
    print(model.report)                        # expected, matched, refused and why

Importing this package imports neither torch nor any engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .adapters.errors import LayerfuseError
from .adapters.parallel import tensor_parallel
from .adapters.specs import (
    GatedDeltaNetSpec,
    GatedNormSpec,
    GQASpec,
    MLASpec,
    NormSpec,
    Parallel,
    ResidualSpec,
)

if TYPE_CHECKING:
    from . import adapters, fusion, registry, testing

__version__ = "0.1.0"

__all__ = [
    "GQASpec",
    "GatedDeltaNetSpec",
    "GatedNormSpec",
    "LayerfuseError",
    "MLASpec",
    "NormSpec",
    "Parallel",
    "ResidualSpec",
    "__version__",
    "adapters",
    "fusion",
    "registry",
    "tensor_parallel",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in ("adapters", "fusion", "registry", "testing"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
