"""Two engines under a load, asked in turns: while one is timed, the other waits. One round before those that count is not counted.

A round in which an engine compiled kernels (`compiled`) is not counted either: to compile one takes longer than a round. Another round follows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

from vllm_engine import _Turn
from workloads import SHAPES

from layerfuse.bench.environment import environment

Asked = dict[str, Callable[[int], dict[str, Any]]]
"""Arm -> what one round with a seed gives of it."""


def parsed(
    about: str | None, engine: str, folder: Path, cache: int, of_cache: str, *more: tuple[str, dict[str, Any]]
) -> Any:
    """The command's options: those of all, and one engine's own."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*SHAPES], metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=3, help="that count, as far as --limit lets them")
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--cache", type=int, default=cache, help=of_cache)
    for name, how in more:
        parser.add_argument(name, **how)
    parser.add_argument("--limit", type=float, default=480, help="seconds, behind which no round begins")
    parser.add_argument("--out", type=Path, default=Path(f"{engine}_serve.json"))
    parser.add_argument("--logs", type=Path, default=folder / "logs")
    return parser.parse_args()


def in_rounds(given: Any, until: float, started: AbstractContextManager[Asked]) -> dict[str, list[dict[str, Any]]]:
    """Arm -> what its rounds gave. `started`: the engines, ready inside of it and ended behind it."""
    alone = _Turn()
    try:
        with started as arms:
            print(f"{given.shape}: ready", flush=True)
            alone.take()
            rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
            for turn in count():
                for arm in [*arms][:: 1 if turn % 2 else -1]:
                    found = arms[arm](turn)
                    print(turn, arm, found, flush=True)
                    rounds[arm] += [found] if turn else []
                if time.monotonic() > until or min(map(len, counted(rounds).values())) >= given.rounds:
                    break
    finally:
        alone.end()
    return rounds


def counted(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Those of each arm in which nothing was compiled."""
    return {arm: [each for each in several if not each.get("compiled")] for arm, several in rounds.items()}


def write(given: Any, rounds: dict[str, list[dict[str, Any]]], keys: Iterable[str], **more: Any) -> None:
    """Put the shape's result into the file, with the medians of its rounds."""
    results = json.loads(given.out.read_text()) if given.out.exists() else {"shapes": {}}
    results["environment"] = {**environment(), "ended": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())}
    clean = {arm: several for arm, several in counted(rounds).items() if several}
    results["shapes"][given.shape] = {
        **more, "requests": given.requests, "at_once": given.at_once, "rounds": rounds,
        "median": {arm: {key: statistics.median(each[key] for each in several) for key in keys} for arm, several in clean.items()},
    }  # fmt: skip
    given.out.write_text(json.dumps(results, indent=1) + "\n")
