"""SGLang's engine with and without layerfuse under a load as `sglang.bench_serving` makes it: tokens per second, times to the first and next token.

    python bench/scripts/sglang_serve.py SHAPE [--rounds 3] [--at-once 64] [--requests 256] --out serve.json --logs FOLDER

Two engines with the same random weights of a shape of `vllm_shapes` stand on one GPU and are asked in turns: while one is timed, the other waits.
Each round asks both for the same random prompts of 1024 tokens and answers of 128, so many at once, by the engine's asynchronous interface: no server
is around it and no text is made. One round before them is not counted. The second engine is the arm `all` of `sglang_engine`'s stages of DeepSeek-V3.
Without a GPU: `tiny-qwen3`, as `sglang_engine` says.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import serving
from sglang_engine import Engine
from vllm_engine import _gpus
from workloads import Stage, stage

ROUND = 600
"""Seconds that a round of one engine may take: one that has begun is waited for behind the limit too."""
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
WORK = Path(tempfile.gettempdir()) / "sglang_engine"


@contextmanager
def started(given: Any, served: Stage, until: float, ready: dict[str, Any]) -> Iterator[serving.Asked]:
    """Both engines. `ready`: takes what they say of themselves."""
    engines = {arm: Engine(arm, f"serve-{given.shape}.{arm}", served, WORK, given.logs) for arm in ("sglang", "all")}
    try:
        ready |= {arm: engine.answer(until) for arm, engine in engines.items()}

        def asked(engine: Engine, seed: int) -> dict[str, Any]:
            begun = time.monotonic()
            found: dict[str, Any] = engine.ask(
                begun + ROUND, "serve", given.requests, given.at_once, *given.lengths, seed
            )
            return found

        yield {arm: lambda seed, engine=engine: asked(engine, seed) for arm, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.stop()


def main() -> None:
    lengths = {"type": int, "nargs": 2, "default": (1024, 128), "help": "tokens of prompts and of answers"}
    given = serving.parsed(__doc__, "sglang", WORK, 100_000, "tokens that each engine keeps", ("--lengths", lengths))
    given.logs.mkdir(parents=True, exist_ok=True)
    until, gpus = time.monotonic() + given.limit, _gpus()
    engine = {"max_running_requests": given.at_once, **({"cuda_graph_bs_decode": [*SIZES]} if gpus else {})}
    served = stage(
        "sglang", ["mla"], settings=[] if gpus else ["cpu"], shape=given.shape, engine=engine, cache=given.cache
    )
    ready: dict[str, Any] = {}
    rounds = serving.in_rounds(given, until, started(given, served, until, ready))
    report = json.loads((given.logs / f"serve-{given.shape}.all.report.json").read_text())["modules"].values()
    serving.write(
        given, rounds, next(iter(rounds["all"]), {}), lengths=given.lengths, ready=ready,
        fusions={"all": served.arms["all"].fusions}, missed={"all": [each["missed"] for each in report]},
    )  # fmt: skip


if __name__ == "__main__":
    main()
