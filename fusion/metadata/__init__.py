"""Attention metadata from specs: heads, buffers and state, planned before any layer exists. Planning needs no torch."""

from ..._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
