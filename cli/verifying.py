"""`layerfuse verify`: a progress bar while it works, then what was expected, what matched, why not, and by how much."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import console, facts, require_writable, show, write_text
from .kinds import kinds_of, rows_of
from .models import registry_with
from .progress import progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..verify import Verified


def answer_verify(
    names: Sequence[str], *, all_small: bool, files: Sequence[Path], device: str | None, json: Path | None
) -> None:
    """Verify the models and print what came of them.

    Raises:
        SystemExit: with 1, after everything, where a model is not verified.
        CannotVerifyError: something that is needed is not installed.
        CannotWriteError: the file for the results cannot be written.
        FusionConfigError: LAYERFUSE_FUSIONS names a fusion that does not exist.
        BackendError: LAYERFUSE_BACKEND names a backend that no op has.
    """
    from ..fusion import FusionConfig, backends

    # Before minutes of work:
    FusionConfig.from_environment()
    backends.check_declared()
    require_writable(json)
    from .. import verify as job

    registry = registry_with(files)
    if all_small:
        entries = job.buildable(registry.models().values())
    else:
        entries = [registry.model(name) for name in names or job.FOUR]
    out = console()
    results: list[Verified] = []
    total = len(entries) * job.steps_per_model()
    with progress() as step:
        job.require(entries, device)  # importing torch and transformers takes a while
        quiet()
        for entry in entries:
            result = job.verify(
                entry,
                registry=registry,
                device=device,
                step=lambda doing, name=entry.name: step(f"{name}: {doing}", total),  # type: ignore[misc]
            )
            results.append(result)
            _show(result, out)
    bad = [result for result in results if result.problems]
    if json is not None:
        import json as codec

        write_text(json, codec.dumps([result.to_dict() for result in results], indent=2))
    _verdict(results, bad, out)
    if bad:
        raise SystemExit(1)


def quiet() -> None:
    """Turn off warnings and logs of torch and transformers."""
    warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
    import torch
    import transformers

    torch._logging.set_logs(dynamo=logging.ERROR)

    transformers.utils.logging.set_verbosity_error()


def _show(result: Verified, to: Console) -> None:
    from rich.text import Text

    verdict = ("not verified", "bold red") if result.problems else ("verified", "bold green")
    to.print()
    to.print(Text.assemble((result.model, "bold"), ": ", verdict, f" on {result.device} in {result.seconds:.0f} s"))
    grid = facts(())
    for kind in kinds_of(result.specs):
        spec = "; ".join(map(" ".join, rows_of(kind.spec)))
        grid.add_row("  spec", f"{len(kind.paths)} x {kind.family}: {spec}")
    for fusion, found in result.fusions.items():
        if not (found["expected"] or found["refused"] or found["fallback"]):
            continue  # no site of this model can take it
        grid.add_row("  fusion", _counts(fusion, found))
        for word in ("refused", "not_applicable"):
            for reason, count in Counter(found[word].values()).items():
                grid.add_row("", f"{count} x {word.replace('_', ' ')}: {reason}")
    for comparison in result.comparisons:
        eager, compiled, plain = (
            f"{difference.absolute:.1e} ({difference.relative:.1e})"
            for difference in (comparison.fused_to_eager, comparison.fused_to_compiled, comparison.compiled_to_eager)
        )
        grid.add_row(
            f"  {comparison.dtype}",
            f"fused to eager {eager}, fused to compiled {compiled}, compiled to eager {plain}; "
            f"allowed ({comparison.tolerance:.0e})",
        )
    if result.kept:
        names = ", ".join(function.rpartition(".")[2] for function in result.kept)
        grid.add_row("  note", f"kept out of compilation, as one op each: {names}")
    for problem in result.problems:
        grid.add_row(Text("  problem", style="red"), problem)
    show(grid, to)


def _counts(fusion: str, found: dict[str, Any]) -> str:
    return (
        f"{fusion}: {len(found['expected'])} expected, {len(found['matched'])} matched, {len(found['refused'])} refused, "
        f"{len(found['not_applicable'])} not applicable; {found['last_call']} ran fused in one call, by the backend "
        f"{found['backend']}"
    )


def _verdict(results: Sequence[Verified], bad: Sequence[Verified], to: Console) -> None:
    from rich.text import Text

    expected = sum(len(found["expected"]) for result in results for found in result.fusions.values())
    matched = sum(len(found["matched"]) for result in results for found in result.fusions.values())
    to.print()
    to.print("Differences are the largest of any logit, and in brackets the same relative to the largest logit.")
    specs = "" if bad else "specs as declared, "
    verified = f"{len(results) - len(bad)} of {len(results)} models verified"
    text = f"{verified}: {specs}{matched} of {expected} expected fusions matched"
    to.print(Text(text, style="bold red" if bad else "bold green"))
