"""What the command line knows of the catalog: names for the shell's completion, and `layerfuse bench --list`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from .console import console, show

if TYPE_CHECKING:
    from ..fusion.chain import Fusion


def fusion_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Names for the shell's completion: what `layerfuse bench` measures."""
    from ..bench.cases import forms, forms_over_ranks

    return [name for name in forms() | forms_over_ranks() if name.startswith(incomplete)]


def list_fusions(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print every name that `layerfuse bench` measures, then the fusions that something else does, and exit.

    Raises:
        LayerfuseError: of a plugin that cannot be used.
    """
    if not wanted:
        return
    from rich.table import Table
    from rich.text import Text

    from ..bench.cases import forms, forms_over_ranks, measured_elsewhere
    from ..fusion.catalog import FUSIONS

    def rows(said: Iterable[tuple[str, str]]) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for name, doc in said:
            grid.add_row(Text(name, style="bold"), Text(doc))
        return grid

    def doc_of(fusion: Fusion) -> str:
        return fusion.doc if fusion.owner == "layerfuse" else f"{fusion.doc} ({fusion.owner})"

    to = console()
    show(
        rows(
            (name, doc_of(fusion) if form.op is fusion.op else f"another form of {fusion.name}")
            for name, (fusion, form) in (forms() | forms_over_ranks()).items()
        ),
        to,
    )
    to.print("\nNot measured here, as they stand in engines alone, but by what is named last:")
    others = ((name, fusion, measured_elsewhere(fusion)) for name, fusion in FUSIONS.items())
    show(rows((name, f"{doc_of(fusion)}; {where}") for name, fusion, where in others if where is not None), to)
    ctx.exit()
