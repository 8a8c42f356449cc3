"""How far a command is that takes minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .console import console


@contextmanager
def progress() -> Iterator[Callable[[str, int | None], None]]:
    """A bar on a terminal; a line per step elsewhere, so that a log shows where the time goes. Both on stderr.

    Yields:
        What is called as each step begins, with what is done in it and how many steps there are in all, or None where nobody knows.
    """
    if not sys.stderr.isatty():
        done = 0

        def line(doing: str, total: int | None) -> None:
            nonlocal done
            done += 1
            print(f"[{done if total is None else f'{done}/{total}'}] {doing}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns,
        console=console(stderr=True),
        transient=True,
        # What is printed meanwhile goes above the bar, or where stdout goes.
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        task = bar.add_task("starting", total=None)

        def advance(doing: str, total: int | None) -> None:
            bar.update(task, description=doing, advance=1, total=total)

        yield advance
