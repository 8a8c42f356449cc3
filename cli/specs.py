"""`layerfuse specs`: the specs of a model on one rank, for people and as JSON for engines in other languages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..registry.spec_json import to_json
from .console import print_json
from .kinds import kinds_of, mixtures_of, ranges
from .models import find_model, registry_with
from .planning import sharded


def answer_names(model: str, *, files: Sequence[Path]) -> None:
    """Print, as JSON, names for other machinery that follow from the specs of the model as transformers builds it.

    Raises:
        NotBuildableError: transformers has no such model.
    """
    from ..registry.machinery import kernel_fusions, packed_modules
    from ..testing.models import full_model

    registry = registry_with(files)
    entry = find_model(model, files, registry)
    specs = registry.specs_in(full_model(entry))
    print_json(
        {"model": entry.name, "packed_modules_mapping": packed_modules(specs), "kernel_fusions": kernel_fusions(specs)}
    )


def answer_specs(
    model: str, *, tp: int, rank: int, engine: str | None, published: bool, files: Sequence[Path], json: bool
) -> None:
    """Print the spec of every layer on one rank.

    Raises:
        UnknownModelError: no entry has this name.
        TooManyRanksError: the model cannot be sharded that way.
    """
    entry = find_model(model, files)
    specs = sharded(entry, tp, rank, engine, published)
    if json:
        print_json({"model": entry.name, "tp": tp, "rank": rank, "engine": engine, **to_json(specs)})
        return
    for kind in (*kinds_of(specs), *mixtures_of(specs)):
        print(f"{kind.name} of layers {ranges(kind.indices)}" if kind.indices else kind.name)
        print(f"  {kind.spec}")
