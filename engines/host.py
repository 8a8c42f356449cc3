"""Which engine a process runs, as far as what all engines share has to know of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class Host:
    """One engine."""

    name: str
    "As sentences have it."
    package: str
    "The package that it is imported as, which is its distribution too. Its loggers are below that name."
    tested: tuple[str, ...]
    "The releases that the tests run. What lies between and after is held to the check of the hooks."
    ranks: Callable[[], tuple[int, int, Any]]
    "This process's rank in its tensor-parallel group, how many there are, and the group on CPUs; 0, 1 and None before there is one."
    group: Callable[[], str]
    "Torch's name of that group."
    report_file: Callable[[Any], tuple[Path, str]]
    "Where the report of a `CompiledModule` goes if nobody else writes there, and by what its engine is told from others on this host."

    captures: Callable[[], bool] | None = None
    """Whether it captures CUDA graphs now, the runs before included: once it has, what stands at modules stands there meanwhile, and steps whose
    ops the host launches one by one are the engine's own. None: `tokens` say which steps these are."""
    tokens: Callable[[Any, Sequence[Any], Mapping[str, Any]], int | None] | None = None
    """Of a call of a model, or of a module in it, with these arguments: the tokens of the step, or None where they do not say. None: all steps are
    fused where `captures` is None too."""
    kernels: frozenset[str] = frozenset()
    "Packages of kernels that its code calls, and that are no part of it. What stands in the place of theirs is not looked into."
    fp8_dtype: Callable[[], Any]
    "The dtype that its linears quantise to."

    @property
    def logger(self) -> logging.Logger:
        """Below the engine's own, so that its handlers and levels hold."""
        return logging.getLogger(f"{self.package}.layerfuse")

    def version(self) -> str:
        """Its version, or what stands in a sentence in its place."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "of an unknown version"


_entered: list[Host] = []


def enter(host: Host) -> None:
    """From now on this process is that engine's."""
    _entered[:] = [host]


def here() -> Host:
    """The engine of this process.

    Raises:
        RuntimeError: none has called its `register`.
    """
    if not _entered:
        raise RuntimeError("layerfuse is in no engine here: an engine's package calls `register` first")
    return _entered[0]
