"""Dynamo's `specialize_float` while a model is called: without it a module's floats become inputs of its graph.

That happens with dynamic=True, and otherwise as soon as a float changes between layers. An epsilon that is an input
cannot be compared with the spec's.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from torch._dynamo import config
from torch.utils import _config_module


class _Counted(AbstractContextManager[None]):
    """For torch before 2.13, whose config is one for all threads: set while any thread is inside, then restored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = config.specialize_float
                config.specialize_float = True
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                config.specialize_float = self._before


_counted = _Counted()
_PER_CONTEXT = "ContextVar" in vars(_config_module)


def floats_as_constants() -> AbstractContextManager[None]:
    """A context in which Dynamo takes floats as constants."""
    patch: AbstractContextManager[None] = config.patch(specialize_float=True) if _PER_CONTEXT else _counted
    return patch
