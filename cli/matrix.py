"""`layerfuse plan --all-tp`: every model against tensor-parallel degrees.

MLA models with their local heads, padded heads and waste; all models with the tokens up to which all-reduces are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..adapters.errors import SpecError
from ..adapters.specs import MLASpec, ResidualSpec
from ..fusion import FUSIONS, Target, plan
from ..fusion.metadata import HeadsRefusedError, plan_heads, releases_named
from .console import draw, print_json, require_writable, show

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..registry.catalog import ModelEntry

DEGREES = (1, 2, 4, 8, 16, 32)
FUSED = "all_reduce_add_rms_norm"


def matrix_data(
    entries: Sequence[ModelEntry], *, target: str, kv: str, release: str | None, queries: int
) -> dict[str, Any]:
    """The matrix as plain data. Models without MLA have no row among `models`.

    Raises:
        UnknownReleaseError: nothing is recorded of this release of AITER.
        UnknownTargetError: no such target.
    """
    device, release = Target.named(target), releases_named(release).last
    reduced = attrs.evolve(device, aiter=release)
    rows, sums = [], []
    for entry in entries:
        sums.append({"model": entry.name, "cells": [_reduced(entry, size, reduced) for size in DEGREES]})
        spec = next((spec for _, spec in entry.specs() if isinstance(spec, MLASpec)), None)
        if spec is not None:
            cells = [_cell(spec, size, device, kv, release, queries) for size in DEGREES]
            rows.append({"model": entry.name, "num_heads": spec.num_heads, "cells": cells})
    return {
        "target": device.to_dict(),
        "kv": kv,
        "aiter": release,
        "queries": queries,
        "degrees": list(DEGREES),
        "models": rows,
        "all_reduce": sums,
    }


def _reduced(entry: ModelEntry, size: int, target: Target) -> dict[str, Any]:
    """Up to how many tokens the all-reduce after an attention block is fused with the add and the norm."""
    cell: dict[str, Any] = {"tp": size, "tokens": None, "stages": [], "reason": None, "refused": None}
    try:
        spec, *others = (spec for _, spec in entry.specs(size, 0) if isinstance(spec, ResidualSpec))
    except SpecError as error:
        return {**cell, "refused": error.problems[0]}
    name = "layer:post_attention"
    if spec.is_one_block and others:  # what its mixer gives is added in front of the next layer's norm
        spec, name = others[0], "layer:input"
    decided = plan([("layer", spec)], target)
    site = decided.site[name]
    found = [d for d in decided.at(site.name) if d.fusion == FUSED]
    expected = next((d for d in found if d.applies), None)
    if expected is None:
        return {**cell, "refused": found[0].reason}
    fusion = FUSIONS[FUSED]
    limit = None if fusion.limit is None else fusion.limit(site, target, None)
    stages = [] if limit is None else list(limit.stages)
    return {**cell, "tokens": expected.tokens.last, "stages": stages, "reason": expected.reason}


def _cell(spec: MLASpec, size: int, target: Target, kv: str, release: str | None, queries: int) -> dict[str, Any]:
    cell: dict[str, Any] = {"tp": size, "local_heads": None, "kernel_heads": None, "how": None, "waste_percent": None}
    try:
        local = spec.shard(size)
        cell["local_heads"] = local.num_local_heads
        plan = plan_heads(local, target, release, q_dtype=kv, kv_dtype=kv, max_query_length=queries)
    except SpecError as error:
        return {**cell, "refused": error.problems[0]}
    except HeadsRefusedError as error:
        return {**cell, "refused": error.reason}
    return {
        **cell,
        "kernel_heads": plan.kernel_heads,
        "how": plan.how,
        "waste_percent": round(100 * plan.waste, 1),
        "refused": None,
    }


def show_matrix(data: dict[str, Any], to: Console) -> None:
    """The matrix for people: what is refused has a number, and its reason below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    reasons: dict[str, int] = {}
    arrow = "→" if to.encoding.startswith("utf") else "->"

    def table_of(rows: Sequence[dict[str, Any]], shown: Callable[[dict[str, Any], dict[str, int]], Text]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("model", no_wrap=True)
        for degree in data["degrees"]:
            table.add_column(f"TP {degree}", justify="right", no_wrap=True)
        for row in rows:
            table.add_row(row["model"], *(shown(cell, reasons) for cell in row["cells"]))
        return table

    arch, release = data["target"]["arch"], f"AITER {data['aiter']}"
    if data["models"]:
        to.print(
            f"heads of a rank {arrow} heads of the kernel, and the share that is thrown away "
            f"({arch}, {data['kv']}, {release})\n"
        )
        show(table_of(data["models"], partial(_shown, arrow=arrow)), to)
        to.print()
    abouts = {
        "amd": f", in one stage / in two ({arch}, 16 bits, {release})",
        "nvidia": f", in one shot ({arch}, 16 bits)",
    }
    about = abouts.get(data["target"]["vendor"], f" ({arch})")
    to.print(f"tokens up to which all-reduce, add and norm are one op{about}\n")
    show(table_of(data["all_reduce"], _shown_reduced), to)
    if reasons:
        to.print()
    for reason, number in reasons.items():
        to.print(Text(f"[{number}] {reason}", style="dim"))


def _shown_reduced(cell: dict[str, Any], reasons: dict[str, int]) -> Text:
    from rich.text import Text

    if cell["refused"] is not None:
        return Text(f"[{reasons.setdefault(cell['refused'], len(reasons) + 1)}]", style="red")
    return Text(" / ".join(map(str, cell["stages"])) or "any", style="green")


def _shown(cell: dict[str, Any], reasons: dict[str, int], arrow: str) -> Text:
    from rich.text import Text

    if cell["refused"] is not None:
        return Text(f"[{reasons.setdefault(cell['refused'], len(reasons) + 1)}]", style="red")
    if cell["local_heads"] == cell["kernel_heads"]:
        return Text(str(cell["local_heads"]), style="green")
    waste = cell["waste_percent"]
    return Text(
        f"{cell['local_heads']}{arrow}{cell['kernel_heads']} {waste:.0f}%", style="yellow" if waste <= 50 else "magenta"
    )


def answer_matrix(
    model: str | None,
    *,
    target: str,
    kv: str,
    release: str | None,
    queries: int,
    files: Sequence[Path],
    json: bool,
    svg: Path | None,
) -> None:
    """Print the matrix, or write it as a picture."""
    from .models import find_model, registry_with

    require_writable(svg)
    entries = list(registry_with(files).models().values()) if model is None else [find_model(model, files)]
    data = matrix_data(entries, target=target, kv=kv, release=release, queries=queries)
    if json:
        print_json(data)
    else:
        draw(partial(show_matrix, data), svg, f"layerfuse plan --all-tp --target {target} --kv {kv}")
