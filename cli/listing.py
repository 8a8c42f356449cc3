"""`layerfuse models`: what is declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .console import console, print_json, show
from .models import registry_with


def list_models(files: Sequence[Path], json: bool) -> None:
    """Print every declared model: name, Hugging Face id, adapter, and its layers by kind."""
    entries = registry_with(files).models().values()
    if json:
        print_json(
            [
                {
                    "model": entry.name,
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
    from rich import box
    from rich.table import Table

    table = Table("model", "Hugging Face id", "adapter", "layers", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for entry in entries:
        each = f", {entry.attentions_per_layer} attentions each" if entry.attentions_per_layer > 1 else ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(entry.kind_at()).items())
        table.add_row(entry.name, entry.hf_id or "", entry.adapter, kinds + each)
    show(table, console())
