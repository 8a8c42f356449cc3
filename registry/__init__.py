"""Floor 2: which adapter speaks for which layer.

The functions here ask the default registry: the built-in adapters, the models.toml that ships with the library, and
what installed plugins add. `Registry()` makes others. Importing this package imports neither torch nor any engine.
"""

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
