"""`layerfuse bench`: a progress bar while it measures, then the tables, who was missing, and where the files are."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import console, print_json, show
from .models import registry_with
from .progress import progress

if TYPE_CHECKING:
    from ..bench.result import Result

REPOSITORY_RESULTS = Path("bench") / "results"


def answer_bench(
    names: Sequence[str],
    *,
    tokens: str | None,
    widths: str | None,
    files: Sequence[Path],
    out: Path | None,
    json: bool,
    ranks: int | None,
    device: str | None,
    **options: Any,
) -> None:
    """Measure, print, write: these fusions, or all.

    Raises:
        SystemExit: with 1, after everything, where a result was wrong or a peer failed.
        LayerfuseError: it cannot be measured as asked; see `bench.run`.
    """
    from .. import bench
    from ..bench.cases import forms, forms_over_ranks, known_form
    from ..bench.files import writable

    for name in names:
        known_form(name)
    wanted = names or (*forms(), *forms_over_ranks())
    over_ranks = [name for name in wanted if name in forms_over_ranks()]
    counts, by_hand = _numbers("--tokens", tokens), _numbers("--widths", widths)
    folder = writable(_default_folder() if out is None else out)
    registry = registry_with(files)
    warnings.filterwarnings("ignore", module=r"(torch|triton)\b")
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    results: list[Result] = []
    unknown: bench.UnknownPeerError | None = None
    with contextlib.ExitStack() as processes:

        def shared() -> bench.Ranks:
            """Once for all; the first call starts the processes."""
            made = bench.Ranks(ranks, device)
            processes.callback(made.close)
            return made

        # What was asked for is refused before anything is measured.
        together = shared() if over_ranks and (names or ranks is not None) else None
        for name in dict.fromkeys(wanted):
            try:
                with progress() as step:
                    if name in over_ranks:
                        together = together or shared()
                    result = bench.run(
                        name,
                        tokens=counts,
                        widths=by_hand,
                        registry=registry,
                        step=step,
                        ranks=together if name in over_ranks else None if over_ranks else ranks,
                        device=device,
                        **options,
                    )
            except (bench.BenchError, bench.UnknownPeerError) as error:
                if names:
                    raise
                unknown = error if isinstance(error, bench.UnknownPeerError) else unknown
                console(stderr=True).print(f"left out: {error}", soft_wrap=True)  # of all, some do not fit the question
                continue
            written = bench.write(result, folder)
            results.append(result)
            if not json:
                _print(result, written)
    if unknown is not None and not results:
        raise unknown
    if json:
        plain = [result.to_dict() for result in results]
        print_json(plain[0] if len(names) == 1 else plain)
    if any(one.verdict in ("wrong", "failed") for result in results for row in result.rows for one in row.measured):
        raise SystemExit(1)


def _print(result: Result, written: Sequence[Path]) -> None:
    from rich.text import Text

    from ..bench.plot import why_not
    from ..bench.report import heading, remarks, rich_table, tables

    to = console()
    to.print(heading(result), soft_wrap=True)
    to.print(f"{result.method[0].upper()}{result.method[1:]}.", soft_wrap=True)
    for table in tables(result):
        to.print()
        to.print(Text(table.title, style="bold"))
        show(rich_table(table), to)
    to.print()
    for remark in remarks(result):
        to.print(f"- {remark}", soft_wrap=True)
    if (reason := why_not()) is not None:
        to.print(f"- the plot was left out: {reason}", soft_wrap=True)
    to.print(f"{result.seconds:.0f} s; wrote {', '.join(map(str, written))}", soft_wrap=True)


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    import click

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"whole numbers with commas between them, got {text!r}", param_hint=option) from None


def _default_folder() -> Path:
    """Where the repository keeps its results, when run from its root; else here."""
    return REPOSITORY_RESULTS if REPOSITORY_RESULTS.is_dir() and Path("models.toml").is_file() else Path()
