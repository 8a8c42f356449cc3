"""layerfuse: typed layer specs and checked kernel fusions for LLM inference engines.

    from layerfuse import registry, fusion

    spec = registry.spec_for(layer)            # what the layer is, in one language
    print(fusion.plan(registry.specs_in(model), fusion.Target.named("gfx950")))
    model = fusion.compile(model)              # torch.compile with the planned fusions
    print(model.report)                        # expected, matched, refused and why

Importing this package imports neither torch nor any engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import attach

if TYPE_CHECKING:
    from . import adapters, fusion, registry, testing
    from .adapters.errors import LayerfuseError
    from .adapters.parallel import tensor_parallel
    from .adapters.specs import (
        FinalNormSpec,
        GatedDeltaNetSpec,
        GatedMLPSpec,
        GatedNormSpec,
        GQASpec,
        MLASpec,
        MLPSpec,
        NormSpec,
        Parallel,
        ResidualSpec,
        RopeSpec,
    )

__version__ = "0.2.0"

__all__ = [
    "FinalNormSpec",
    "GQASpec",
    "GatedDeltaNetSpec",
    "GatedMLPSpec",
    "GatedNormSpec",
    "LayerfuseError",
    "MLASpec",
    "MLPSpec",
    "NormSpec",
    "Parallel",
    "ResidualSpec",
    "RopeSpec",
    "__version__",
    "adapters",
    "fusion",
    "registry",
    "tensor_parallel",
    "testing",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        **{name: f".{name}" for name in ("adapters", "fusion", "registry", "testing")},
        **dict.fromkeys(
            (
                "FinalNormSpec",
                "GQASpec",
                "GatedDeltaNetSpec",
                "GatedMLPSpec",
                "GatedNormSpec",
                "MLASpec",
                "MLPSpec",
                "NormSpec",
                "Parallel",
                "ResidualSpec",
                "RopeSpec",
            ),
            ".adapters.specs",
        ),
        "LayerfuseError": ".adapters.errors",
        "tensor_parallel": ".adapters.parallel",
    },
)
