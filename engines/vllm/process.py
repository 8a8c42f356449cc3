"""What one process knows of layerfuse inside vLLM beside its plans, and its lines in vLLM's log, each of them once."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from .hooks import TESTED

logger = logging.getLogger("vllm.layerfuse")
# Below "vllm", so that vLLM's own handlers and levels hold.


class Process:
    """What a new process begins with."""

    def __init__(self) -> None:
        self.registered = False
        self.off: str | None = None
        "Why vLLM is left alone, or None."
        self.read: WeakSet[Any] = WeakSet()
        "The models that were loaded in a place that layerfuse stands at."
        # By the scheduler's config: vLLM copies its config for parts of a model, for drafts and for kernels, and keeps that.
        self._engines: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.waiting: dict[int, tuple[Any, Any]] = {}
        "The modules that vLLM will compile at their first call, each with its `CompiledModule`, by identity."
        self.running: list[Any] = []
        "The units of the modules that are at their first call, the innermost last."
        self.said: set[str] = set()

    def knows(self, vllm_config: Any) -> bool:
        """Whether a model of this engine was read, or was said not to be."""
        return id(vllm_config.scheduler_config) in self._engines

    def know(self, vllm_config: Any) -> None:
        """From now on it is known, and what was said of the one before is said of it too."""
        if not self.knows(vllm_config):
            self.said.clear()
        self._engines[id(vllm_config.scheduler_config)] = vllm_config.scheduler_config


this = Process()
"""This one."""


def version() -> str:
    """The version of vLLM, or what stands in a sentence in its place."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def say_if_untested() -> None:
    """Say once that nobody has tested this release of vLLM, where that is so."""
    if version().partition("+")[0] not in TESTED:
        known = ", ".join(TESTED)
        once(logging.INFO, "layerfuse: vLLM %s is not tested (%s are); its hooks are as expected", version(), known)


def leave_alone(reason: str) -> None:
    """Do nothing from now on, and say why once."""
    if this.off is None:
        this.off = reason
        known = ", ".join(TESTED)
        logger.warning("layerfuse leaves vLLM %s alone (tested with %s): %s", version(), known, reason)


def troubled(doing: str, error: Exception) -> None:
    """Take note of an error of layerfuse's own: a warning, and in `strict` an error once the model has run."""
    text = f"{doing} failed: {type(error).__name__}: {error}"
    for unit in this.running[-1:]:
        if text not in unit.trouble:
            unit.trouble.append(text)
    once(logging.WARNING, "layerfuse: %s", text)
    logger.debug("layerfuse: %s", doing, exc_info=error)


def of_each_class(unknown: Mapping[str, str]) -> Iterator[str]:
    """Each class that no adapter knows, with the first of its layers and how many more there are: a line each, however deep a model is.

    Args:
        unknown: layer -> class.
    """
    for cls, count in Counter(unknown.values()).items():
        first = next(layer for layer, each in unknown.items() if each == cls)
        yield f"{cls} ({first or 'the model itself'}{f' and {count - 1} more' if count > 1 else ''})"


def once(level: int, message: str, *arguments: Any) -> None:
    """Log a line, unless this process has. What is no warning is the same on every rank, and the first one says it."""
    text = message % arguments
    if text not in this.said and (level > logging.INFO or _is_first()):
        this.said.add(text)
        logger.log(level, "%s", text)


def _is_first() -> bool:
    """Whether this is the first rank of its tensor-parallel group, or there is no group yet."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return True
    return bool(state.get_tp_group().rank_in_group == 0)
