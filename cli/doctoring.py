"""`layerfuse doctor`: what was found, a line each or one for all that is as expected, and what it enables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from .console import console, print_json, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.table import Table

    from ..doctor import Finding

_MARKS = {"found": ("yes", "green"), "absent": ("no", "dim"), "broken": ("broken", "bold red")}


def answer_doctor(json: bool) -> None:
    """Print the diagnosis.

    Raises:
        SystemExit: with 1, after everything, where something installed cannot work.
    """
    from ..doctor import diagnose

    diagnosis = diagnose()
    if json:
        print_json(diagnosis.to_dict())
    else:
        from rich.text import Text

        out = console()
        show(_grid(diagnosis.findings), out)
        for title, more in (
            ("Where layerfuse stands in vLLM, by its source", list(_together("place", diagnosis.vllm))),
            ("Where layerfuse stands in SGLang, by its source", list(_together("place", diagnosis.sglang))),
            ("What layerfuse calls of AITER, by its source", diagnosis.aiter),
        ):
            if more:
                out.print()
                out.print(Text(title, style="bold"))
                show(_grid(more), out)
        out.print()
        out.print(Text("What this enables", style="bold"))
        for sentence in diagnosis.enables:
            out.print(f"  {sentence}")
    if diagnosis.problems:
        raise SystemExit(1)


def _together(what: str, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Those that are as expected as one line with their number, and each of the others."""
    fine = [found for found in findings if found.state == "found"]
    if fine:
        more = what if len(fine) == 1 else f"{what}s"
        yield attrs.evolve(fine[0], name=f"{len(fine)} {more}", detail="as expected; --json lists them")
    yield from (found for found in findings if found.state != "found")


def _grid(findings: Iterable[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for found in findings:
        word, style = _MARKS[found.state]
        grid.add_row(found.name, Text(word, style=style), Text(found.detail))
    return grid
