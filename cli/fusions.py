"""What the command line knows of the catalog: names for the shell's completion, and a list in a command's help."""

from __future__ import annotations

import click

from ..adapters.errors import LayerfuseError


def fusion_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Names of fusions for the shell's completion."""
    from ..fusion.catalog import FUSIONS

    return [name for name in FUSIONS if name.startswith(incomplete)]


class CommandOnFusions(click.Command):
    """A command whose help ends with every fusion of the catalog, other packages' included."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list, or why there is none."""
        from ..fusion.catalog import FUSIONS

        try:
            rows = [
                (name, fusion.doc if fusion.owner == "layerfuse" else f"{fusion.doc} ({fusion.owner})")
                for name, fusion in FUSIONS.items()
            ]
        except LayerfuseError as error:  # of a plugin; help should help all the same
            rows = [("", str(error))]
        with formatter.section("Fusions"):
            formatter.write_dl(rows)
        super().format_epilog(ctx, formatter)
