"""Results as files, each whole or not at all: a run's JSON, Markdown and picture, and what a script has found."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ..adapters.arguments import expect
from . import plot
from .errors import CannotMeasureError
from .report import markdown
from .result import Result


def save(path: Path, found: dict[str, Any]) -> None:
    """Write what a script has found as JSON, with what it was measured on, and say where."""
    from .environment import environment

    path.parent.mkdir(parents=True, exist_ok=True)
    _whole(path, json.dumps({"environment": environment(), **found}, indent=1) + "\n")
    print(f"written to {path}")


def write(result: Result, folder: str | Path) -> list[Path]:
    """Write `<slug>.json`, `.md` and, where matplotlib is installed, `.svg`; each whole or not at all.

    Raises:
        CannotMeasureError: the folder cannot be written.
    """
    expect("result", result, Result, "what bench.run gives")
    expect("folder", folder, (str, Path), "a folder")
    folder = writable(folder)
    files = {
        "json": json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n",
        "md": markdown(result),
    }
    if plot.why_not() is None:
        files["svg"] = plot.svg(result)
    try:
        return [_whole(folder / f"{result.slug}.{ending}", text) for ending, text in files.items()]
    except OSError as error:
        raise _not_written(folder, error) from None


def writable(folder: str | Path) -> Path:
    """The folder, made if it was not there: asked before anything takes minutes.

    Raises:
        CannotMeasureError: it cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise _not_written(folder, error) from None


def _not_written(folder: Path, error: OSError) -> CannotMeasureError:
    return CannotMeasureError(
        f"the folder {folder.absolute()} cannot be written: {error.strerror or error}; on the command line --out gives another"
    )


def _whole(path: Path, text: str) -> Path:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)  # mkstemp's own is for the owner alone
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
