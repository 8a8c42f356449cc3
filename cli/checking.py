"""`layerfuse check`: the problems of models files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..adapters.errors import LayerfuseError


def answer_check(files: Sequence[Path]) -> None:
    """Print every problem of every file, or what is declared.

    Each file is checked against the built-in models and plugins, and against the files before it.

    Raises:
        SystemExit: with 1, after the problems.
    """
    from .models import registry_with

    registry = registry_with([])
    found: list[str] = []
    models = classes = 0
    for file in files:
        try:
            entries = registry.load(file)
        except LayerfuseError as error:
            found += str(error).splitlines()
            continue
        if not entries:
            found.append(f"{file}: declares no models; expected a table [models.<name>] @ $")
        models += len(entries)
        classes += sum(len(entry.layer_classes) for entry in entries.values())
    if found:
        print("\n".join(found))
        raise SystemExit(1)
    print(f"{count(models, 'model')}, {count(classes, 'layer class', 'layer classes')}: all fine")


def count(number: int, one: str, many: str = "") -> str:
    """A number and what is counted: `1 line`, `2 lines`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
