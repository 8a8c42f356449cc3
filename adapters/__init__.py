"""Floor 1: what a layer says, in one language. Specs, and the adapters that read layers into them."""

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
