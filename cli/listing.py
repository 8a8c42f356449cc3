"""`layerfuse models`: what is declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .console import console, print_json, show
from .models import registry_with

if TYPE_CHECKING:
    from rich.console import Console

ID, ALIASES = "Hugging Face id", "also called"
LEAST_ID, LEAST_ALIASES, LEAST_LAYERS, BETWEEN = 20, 12, 12, 3
"""Columns of the terminal that an id, aliases and a list of layers need to be readable, and those between two columns."""


def list_models(files: Sequence[Path], json: bool) -> None:
    """Print every declared model: name, aliases, Hugging Face id, adapter, and its layers by kind."""
    entries = registry_with(files).models().values()
    if json:
        print_json(
            [
                {
                    "model": entry.name,
                    "aliases": entry.aliases,
                    "hf_id": entry.hf_id,
                    "adapter": entry.adapter,
                    "num_hidden_layers": entry.num_hidden_layers,
                    "attentions_per_layer": entry.attentions_per_layer,
                    "kinds": dict(Counter(entry.kind_at())),
                }
                for entry in entries
            ]
        )
        return
    rows = []
    for entry in entries:
        each = f", {entry.attentions_per_layer} attentions each" if entry.attentions_per_layer > 1 else ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(entry.kind_at()).items())
        about = {ALIASES: ", ".join(entry.aliases), ID: entry.hf_id or "", "adapter": entry.adapter}
        rows.append({"model": entry.name, **about, "layers": kinds + each})
    _show(rows, console())


def _show(rows: Sequence[Mapping[str, str]], to: Console) -> None:
    """A table. Where the line is too short, the ids are shortened first, then the aliases. Names are never cut."""
    from rich import box
    from rich.table import Table

    wide = {name: max(map(len, (name, *(row[name] for row in rows)))) for name in ("model", "adapter")}
    left = to.width - sum(wide.values()) - LEAST_LAYERS - 3 * BETWEEN
    if left + BETWEEN < 0:
        for row in rows:
            to.print(row["model"], soft_wrap=True)
            to.print(f"  {row['adapter']}: {row['layers']}")
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    aliases = [ALIASES] if left >= LEAST_ALIASES + BETWEEN else []
    ids = [ID] if left >= LEAST_ID + len(aliases) * (LEAST_ALIASES + BETWEEN) else []
    columns = ["model", *aliases, *ids, "adapter", "layers"]
    for name in columns:
        table.add_column(name, no_wrap=name in wide, overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    show(table, to)
