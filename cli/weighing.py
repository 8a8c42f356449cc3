"""`layerfuse contract --weights`: an entry held to the headers of its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..adapters.errors import counted
from ..registry.safetensors import read_headers
from ..registry.weights import weigh
from .console import print_json
from .models import find_model, registry_with

MOST_SHOWN = 50
"""Problems that are printed before the rest is only counted; JSON has them all."""


def answer_weights(model: str, folder: Path, *, files: Sequence[Path], json: bool) -> None:
    """Print what the checkpoint says otherwise than the entry.

    Raises:
        SystemExit: with 1, after all problems, where there are some.
        UnknownModelError: no entry has this name.
        WeightsError: a file is not of its format.
    """
    registry = registry_with(files)
    entry = find_model(model, files, registry)
    tensors = read_headers(folder)
    found = weigh(entry, tensors, registry.adapters().values())
    if json:
        said = {"model": entry.name, "tensors": len(tensors), "held": found.held}
        print_json({**said, "problems": found.problems, "notes": found.notes})
    else:
        more = len(found.problems) - MOST_SHOWN
        lines = [
            *found.problems[:MOST_SHOWN],
            *([f"and {counted(more, 'more problem')}"] if more > 0 else []),
            *found.notes,
        ]
        for line in lines:
            print(line)
        print(
            f"{entry.name}: {counted(len(tensors), 'tensor')}, {counted(found.held, 'linear or norm', 'linears and norms')} as declared, {counted(len(found.problems), 'problem')}"
        )
    if found.problems:
        raise SystemExit(1)
