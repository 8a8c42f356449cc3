"""Every fusion: the files of this folder, and what other packages declare by an entry point.

A package adds fusions by an entry point of the group `layerfuse.fusions` whose object is a `Fusion`, or several in a
list. It may not replace one that exists. Nothing here imports torch, though a plugin may.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any

import attrs

from ...adapters.errors import FOREIGN, LayerfuseError, did_you_mean, said, shown
from ...registry.entry_points import entry_points, package_of
from ..chain import Fusion, FusionError

GROUP = "layerfuse.fusions"
"""The group of entry points."""


class FusionPluginError(FusionError):
    """A plugin whose fusions cannot be used. `plugin` is its entry point, `package` the distribution."""

    def __init__(self, plugin: str, package: str, problem: str) -> None:
        self.plugin = plugin
        self.package = package
        self.problem = problem
        super().__init__(f"entry point {plugin!r} of {package}: {problem}. Fix the package, or uninstall it.")


class UnknownFusionError(LayerfuseError, KeyError):
    """No fusion has this name. `known` holds the names of the catalog."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(name, self.known)

    def __str__(self) -> str:
        others = did_you_mean(self.name, self.known) or f". Known: {', '.join(self.known)}."
        return f"no fusion is called {shown(self.name)}{others}"


def built_in() -> Iterator[Fusion]:
    """The fusions of this folder: `FUSION` of every file, longest chain first, then by name."""
    found = [importlib.import_module(f"{__name__}.{each.name}").FUSION for each in pkgutil.iter_modules(__path__)]
    yield from sorted(found, key=lambda fusion: (-len(fusion.chain), fusion.name))


def installed() -> Iterator[tuple[metadata.EntryPoint, str]]:
    """The entry points of other packages with the names of their distributions, in a stable order."""
    for point in sorted(entry_points(GROUP), key=lambda point: (point.name, point.value)):
        yield point, package_of(point.dist) if point.dist is not None else "an unnamed package"


def of_plugin(point: metadata.EntryPoint, package: str) -> tuple[Fusion, ...]:
    """The fusions that one entry point declares.

    Raises:
        FusionPluginError: it cannot be imported, or is no fusion.
    """
    try:
        content: Any = point.load()
    except FOREIGN as error:  # a plugin may fail in any way
        raise FusionPluginError(point.name, package, f"importing raised {said(error)}") from error
    try:
        several = tuple(content) if isinstance(content, list | tuple) else (content,)
    except FOREIGN as error:  # the object may be anything, and break as it likes
        raise FusionPluginError(point.name, package, f"reading it raised {said(error)}") from error
    if not all(isinstance(each, Fusion) for each in several):
        raise FusionPluginError(point.name, package, f"expected a Fusion or a list of them, got {shown(content)}")
    return tuple(attrs.evolve(fusion, owner=package) for fusion in several)


def add(fusions: dict[str, Fusion], fusion: Fusion) -> None:
    """Take in one more fusion.

    Raises:
        FusionError: its name, or its op's, is taken; the message names both owners.
    """
    for other in fusions.values():
        if fusion.name == other.name:
            raise FusionError(
                f"two fusions are called {fusion.name!r}: one of {other.owner}, one of {fusion.owner}. Rename one of them."
            )
        twice = {form.op.name for form in fusion.forms} & {form.op.name for form in other.forms}
        if twice and fusion.op is not other.op:
            raise FusionError(
                f"two ops are called {twice.pop()!r}: that of {other.name} ({other.owner}) and that of {fusion.name} "
                f"({fusion.owner}). Rename one of them."
            )
    fusions[fusion.name] = fusion


class Catalog(Mapping[str, Fusion]):
    """The fusions by name, in the order in which plans list them: read once, when first asked."""

    def __init__(self) -> None:
        self._fusions: dict[str, Fusion] | None = None
        self._lock = threading.RLock()

    def _all(self) -> dict[str, Fusion]:
        if self._fusions is None:
            with self._lock:
                if self._fusions is None:
                    found: dict[str, Fusion] = {}
                    for fusion in built_in():
                        add(found, fusion)
                    for point, package in installed():
                        for fusion in of_plugin(point, package):
                            add(found, fusion)
                    self._fusions = found
        return self._fusions

    def check(self, name: str) -> None:
        """Refuse a name that no fusion has.

        Raises:
            UnknownFusionError: with the closest names.
        """
        if not isinstance(name, str) or name not in self:
            raise UnknownFusionError(name, self)

    def __getitem__(self, name: str) -> Fusion:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"Catalog({', '.join(self)})"

    def forget(self) -> None:
        """Read again when next asked: for tests that install a package."""
        with self._lock:
            self._fusions = None


FUSIONS = Catalog()
"""Every fusion by name."""
