"""`layerfuse check`: the problems of models files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..adapters.errors import LayerfuseError, counted


def answer_check(files: Sequence[Path]) -> None:
    """Print every problem of every file, or what is declared.

    Each file is checked against the built-in models and plugins, and against the other files.

    Raises:
        SystemExit: with 1, after the problems.
    """
    from .models import loaded, registry_with

    registry = registry_with([])
    found: list[str] = []
    models = classes = 0
    for file, entries in zip(files, loaded(registry, files), strict=True):
        if isinstance(entries, LayerfuseError):
            found += str(entries).splitlines()
            continue
        if not entries:
            found.append(f"{file}: declares no models; expected a table [models.<name>] @ $")
        models += len(entries)
        classes += sum(len(entry.layer_classes) for entry in entries.values())
    if found:
        print("\n".join(found))
        raise SystemExit(1)
    print(f"{counted(models, 'model')}, {counted(classes, 'layer class', 'layer classes')}: all fine")
