"""What the command line knows of the catalog: names for the shell's completion, and `layerfuse bench --list`."""

from __future__ import annotations

import click

from .console import console, show


def fusion_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Names of fusions for the shell's completion."""
    from ..fusion.catalog import FUSIONS

    return [name for name in FUSIONS if name.startswith(incomplete)]


def list_fusions(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print every fusion of the catalog, other packages' with their owners, and exit.

    Raises:
        LayerfuseError: of a plugin that cannot be used.
    """
    if not wanted:
        return
    from rich.table import Table
    from rich.text import Text

    from ..fusion.catalog import FUSIONS

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for name, fusion in FUSIONS.items():
        owner = "" if fusion.owner == "layerfuse" else f" ({fusion.owner})"
        grid.add_row(Text(name, style="bold"), Text(f"{fusion.doc}{owner}"))
    show(grid, console())
    ctx.exit()
