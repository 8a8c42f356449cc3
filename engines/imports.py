"""Do something when a module has been imported, whenever that is: so that waiting for an engine's modules costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]

_waiting: dict[str, list[Then]] = {}
_asking: set[str] = set()


def when_imported(name: str, then: Then) -> None:
    """Call `then` with a module: now if it is imported already, else right after its import."""
    module = sys.modules.get(name)
    if module is not None and not _being_imported(module):
        then(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(then)


def _being_imported(module: ModuleType) -> bool:
    spec = module.__spec__
    return bool(getattr(spec, "_initializing", False))


class _Finder(MetaPathFinder):
    """Finds what is waited for as every other finder does, with a loader that tells when it is done."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        # Asked again below, for what the other finders say.
        if fullname not in _waiting or fullname in _asking:
            return None
        _asking.add(fullname)
        try:
            found = find_spec(fullname)
        finally:
            _asking.discard(fullname)
        if found is not None and found.loader is not None:
            found.loader = _Telling(found.loader)
        return found


class _Telling(Loader):
    """A loader that tells those who wait when a module is ready."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # What others ask of the module's loader (its source, its data) is the real one's to answer.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for then in _waiting.pop(module.__name__, ()):
            then(module)
