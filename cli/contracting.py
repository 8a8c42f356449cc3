"""`layerfuse contract`: the scenarios of docs/contract.md on one model, a line each as they come."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..adapters.errors import LayerfuseError
from ..testing.infer_from_code import ask_code
from ..testing.models import why_not
from .console import console, print_json
from .models import found_model, registry_with

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


class CannotTestError(LayerfuseError, RuntimeError):
    """What the contract runs on is not there. A contract that nothing was held to is not kept."""


def answer_contract(model: str, *, files: Sequence[Path], json: bool) -> None:
    """Run the contract and print what came of each scenario.

    Raises:
        SystemExit: with 1, after all scenarios, where one failed.
        UnknownModelError: no entry has this name.
        ConfigError: a config.json does not say enough.
        CannotTestError: torch or transformers is not installed, or transformers cannot build the model.
    """
    registry = registry_with(files)
    found = found_model(model, files, registry)
    entry = found.entry
    if found.inspection is not None and entry.name not in registry.models():
        entry = ask_code(found.inspection, registry).entry
        registry.register_model(entry)
    if (reason := why_not(entry)) is not None:
        raise CannotTestError(
            f"{entry.name} was held to nothing: {reason}. Give the model yourself: a subclass of "
            "layerfuse.testing.AdapterContract with a build() of your own, and pytest"
        )
    warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
    try:
        from ..testing.run import iter_contract

        results = []
        for result in iter_contract(entry.name, registry=registry):
            results.append(result)
            if not json:
                _print(result.scenario, result.title, result.outcome, result.reason)
    except ModuleNotFoundError as error:
        raise CannotTestError(f"{error.name} is not installed; pip install 'layerfuse[hf]'") from None
    counts: Counter[str] = Counter(result.outcome for result in results)
    if json:
        print_json(
            [
                {
                    "scenario": r.scenario,
                    "title": r.title,
                    "outcome": r.outcome,
                    "reason": r.reason,
                    "seconds": r.seconds,
                }
                for r in results
            ]
        )
    else:
        print(f"{entry.name}: " + ", ".join(f"{counts[word]} {word}" for word in _STYLES))
    if counts["failed"]:
        raise SystemExit(1)


def _print(scenario: str, title: str, outcome: str, reason: str) -> None:
    from rich.text import Text

    line = Text.assemble((f"{outcome:8}", _STYLES[outcome]), f"{scenario:4} {title}")
    console().print(line)
    for sentence in reason.splitlines():
        console().print(f"             {sentence}")
