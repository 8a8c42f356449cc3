"""Shared by the tests of the AITER layer: stand-ins that last for one test."""

from fixtures import aiter_of, one_thread

__all__ = ["aiter_of", "one_thread"]
