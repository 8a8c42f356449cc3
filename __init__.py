"""layerfuse: typed layer specs and checked kernel fusions for LLM inference engines.

    from layerfuse import registry, fusion

    spec = registry.spec_for(layer)            # what the layer is, in one language
    print(fusion.plan(registry.specs_in(model), fusion.Target.named("gfx950")))
    model = fusion.compile(model)              # torch.compile with the planned fusions
    print(model.report)                        # expected, matched, refused and why

Importing this package imports neither torch nor any engine.
"""

from ._lazy import attach

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
