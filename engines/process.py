"""What one process knows of layerfuse inside an engine beside its plans, and its lines in the engine's log, each of them once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from ..adapters.errors import first_of
from ..adapters.variables import unknown_variables
from .host import here


class Process:
    """What a new process begins with."""

    def __init__(self) -> None:
        self.registered = False
        self.off: str | None = None
        "Why the engine is left alone, or None."
        self.read: WeakSet[Any] = WeakSet()
        "The models that were loaded in a place that layerfuse stands at."
        self._engines: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.waiting: WeakSet[Any] = WeakSet()
        "The modules that will be compiled at their first call. Each holds its own `CompiledModule`, so that nothing here keeps it."
        self.running: list[Any] = []
        "The compiled modules that are at their first call, the innermost last."
        self.said: set[str] = set()

    def knows(self, engine: Any) -> bool:
        """Whether a model was read, or was said not to be, of the engine that an object stands for."""
        return id(engine) in self._engines

    def know(self, engine: Any) -> None:
        """From now on it is known, and what was said of the one before is said of it too."""
        if not self.knows(engine):
            self.said.clear()
        self._engines[id(engine)] = engine


this = Process()
"""This one."""


def say_if_untested() -> None:
    """Say once that nobody has tested this release of the engine, where that is so."""
    host, said = here(), "layerfuse: %s %s is not tested (%s are); its hooks are as expected"
    if host.version().partition("+")[0] not in host.tested:
        once(logging.INFO, said, host.name, host.version(), ", ".join(host.tested))


def say_unknown(others: Iterable[str] = ()) -> None:
    """Warn once, on the first rank, of variables that look like this library's and are read by nothing, and of these others."""
    for said in (*unknown_variables(), *others):
        if here().ranks()[0] == 0:
            once(logging.WARNING, "layerfuse: %s", said)


def leave_alone(reason: str) -> None:
    """Do nothing from now on, and say why once."""
    if this.off is None:
        this.off = reason
        host, said = here(), "layerfuse leaves %s %s alone (tested with %s): %s"
        host.logger.warning(said, host.name, host.version(), ", ".join(host.tested), reason)


def troubled(doing: str, error: Exception) -> None:
    """Take note of an error of layerfuse's own: a warning, and in `strict` an error once the model has run."""
    text = f"{doing} failed: {type(error).__name__}: {error}"
    for compiled in this.running[-1:]:
        if text not in compiled.trouble:
            compiled.trouble.append(text)
    once(logging.WARNING, "layerfuse: %s", text)
    here().logger.debug("layerfuse: %s", doing, exc_info=error)


def of_each_class(unknown: Mapping[str, str]) -> Iterator[str]:
    """Each class that no adapter knows, with the first of its layers and how many more there are: a line each, however deep a model is.

    Args:
        unknown: layer -> class.
    """
    for cls in dict.fromkeys(unknown.values()):
        yield f"{cls} ({first_of([layer for layer, each in unknown.items() if each == cls])})"


def once(level: int, message: str, *arguments: Any) -> None:
    """Log a line, unless this process has. What is no warning is the same on every rank, and the first one says it."""
    text = message % arguments
    if text not in this.said and (level > logging.INFO or here().ranks()[0] == 0):
        this.said.add(text)
        here().logger.log(level, "%s", text)
