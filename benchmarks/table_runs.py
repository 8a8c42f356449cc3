"""What the scripts of tables share: the options that choose runs, and the runs that were chosen."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

_Run = TypeVar("_Run")


def parser_of(about: str | None, summary: str) -> argparse.ArgumentParser:
    """A parser with the options of every script of tables.

    Args:
        about: the script's docstring.
        summary: the file that `--summarise` writes.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="the folder of vLLM's compiled library")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no further run begins")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out the first runs: to go on where a limit ended one"
    )
    parser.add_argument("--only", default="", help="runs whose name holds one of these words, with commas between them")
    parser.add_argument("--tokens", help="these instead, with commas between them")
    parser.add_argument("--peers", help="these instead, with commas between them")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--list", action="store_true", help="print the runs and their numbers")
    parser.add_argument("--summarise", action="store_true", help=f"write {summary} from the files in --out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script: tiny")
    return parser


def chosen(runs: Iterable[_Run], given: argparse.Namespace) -> list[tuple[int, _Run]]:
    """The runs that `--skip` and `--only` leave, with their numbers."""
    words = [word for word in given.only.split(",") if word]
    return [
        (number, run)
        for number, run in enumerate(runs)
        if number >= given.skip and (not words or any(word in str(run) for word in words))
    ]
