"""Importing one stand-in after the other into one process, and leaving nothing of it behind."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[2]
"""`tests/`, which pytest puts on the path, so that its folder `aiter` looks like a namespace package of that name."""


def _forget() -> None:
    for name in [name for name in sys.modules if name == "aiter" or name.startswith("aiter.")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@contextlib.contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """With these folders first on the path, no module `aiter` loaded, and `tests/` out of the way.

    Whatever is imported of `aiter` inside is forgotten at the end, with the finders it put on `sys.meta_path`.
    Without a folder it is a machine on which no `aiter` is installed.
    """
    path, finders = list(sys.path), list(sys.meta_path)
    before = {name: module for name, module in sys.modules.items() if name == "aiter" or name.startswith("aiter.")}
    searched = set(sys.path_importer_cache)
    _forget()
    sys.path[:] = [*map(str, folders), *(entry for entry in path if Path(entry or ".").resolve() != TESTS)]
    try:
        yield
    finally:
        _forget()
        for entry in sys.path_importer_cache.keys() - searched:  # thousands of folders would slow down every import
            del sys.path_importer_cache[entry]
        sys.modules.update(before)
        sys.path[:], sys.meta_path[:] = path, finders


@contextlib.contextmanager
def imported(folder: Path) -> Iterator[ModuleType]:
    """`import aiter`, fresh, from the package under `folder`; forgotten at the end."""
    with on_path(folder):
        yield importlib.import_module("aiter")
