"""Output: colour and line length fit a terminal, and a pipe gets plain, unwrapped lines."""

from __future__ import annotations

import io
import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters.errors import LayerfuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console, RenderableType
    from rich.table import Table

PIPED_WIDTH = 200
"""Columns where no terminal says how many: wide enough that a line of output stays a line."""

PROSE_WIDTH = 100
"""Columns of running text there: nobody reads lines of 200 letters."""

SVG_WIDTH = 110


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr. Colours only on a terminal, and never with NO_COLOR set."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            # Rich would exit with 1, which says that the answer is no; `main` knows what to do.
            raise  # noqa: PLE0704 - called where BrokenPipeError is being handled

    stream = sys.stderr if stderr else sys.stdout
    piped = not (stream is not None and stream.isatty()) and not os.environ.get("COLUMNS")
    return Piped(stderr=stderr, highlight=False, emoji=False, markup=False, width=PIPED_WIDTH if piped else None)


def prose_width(to: Console) -> int:
    """Columns of running text: those of a terminal, or 100 where there is none."""
    return to.width if to.is_terminal or os.environ.get("COLUMNS") else min(to.width, PROSE_WIDTH)


def show(what: Any, to: Console, width: int | None = None) -> None:
    """Print something. A pipe gets no blanks at the ends of lines, with which rich fills its tables."""
    if to.is_terminal or to.record:
        to.print(what, width=width)
        return
    with to.capture() as captured:
        to.print(what, width=width)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")), file=to.file)


def show_said(said: str, to: Console) -> None:
    """Print a sentence. A word that is longer than a line is one of its own and stays whole, as it may be there to be copied."""
    from rich.text import Text

    width = prose_width(to)
    for is_long, words in groupby(said.split(" "), key=lambda word: len(word) > width):
        if is_long and not to.record:
            print(*words, sep="\n", file=to.file)
        else:
            show(Text(" ".join(words)), to, width)


def facts(rows: Iterable[tuple[RenderableType, RenderableType]]) -> Table:
    """What something is called, and what it is: a line each, of which the second is folded."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def draw(shown: Callable[[Console], object], svg: Path | None, title: str) -> None:
    """Print what `shown` prints, or write it as an SVG with this title: the same output gives the same file."""
    if svg is None:
        shown(console())
        return
    from rich.console import Console

    canvas = Console(
        record=True,
        file=io.StringIO(),
        width=SVG_WIDTH,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    shown(canvas)
    write_text(svg, canvas.export_svg(title=title, unique_id="layerfuse"))
    print(f"wrote {svg}")


def print_json(data: Any) -> None:
    """Plain JSON on stdout, never coloured."""
    print(json.dumps(data, indent=2, allow_nan=False))


class CannotWriteError(LayerfuseError, OSError):
    """A file that was asked for and cannot be written."""


def require_writable(path: Path | None) -> None:
    """Check that a file that was asked for can be written: before any work, at whose end it is too late.

    Raises:
        CannotWriteError: with the reason.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise CannotWriteError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CannotWriteError(f"{path} cannot be written: no permission")


def write_text(path: Path, text: str) -> None:
    """Write a file that was asked for.

    Raises:
        CannotWriteError: with the system's reason.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWriteError(f"{path} cannot be written: {error.strerror or error}") from None
