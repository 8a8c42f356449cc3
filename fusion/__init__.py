"""Floor 3: fusions from specs. Planning needs no torch; ops, rewriting and compile load when they are first used."""

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
