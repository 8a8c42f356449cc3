"""SGLang's engine with and without layerfuse under a load as `sglang.bench_serving` makes it: tokens per second, times to the first and next token.

    python bench/scripts/sglang_serve.py SHAPE [--rounds 3] [--at-once 64] [--requests 256] --out serve.json --logs FOLDER

Two engines with the same random weights of a shape of `vllm_shapes` stand on one GPU and are asked in turns: while one is timed, the other waits.
Each round asks both for the same random prompts of 1024 tokens and answers of 128, so many at once, by the engine's asynchronous interface: no server
is around it and no text is made. One round before them is not counted. The second engine has every fusion of `sglang_engine.ALL` named, with what
goes with a latent. Without a GPU: `tiny-qwen3`, as `sglang_engine` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_engine import ALL, CPU, Engine
from vllm_engine import _gpus, _Turn
from vllm_shapes import SHAPES
from vllm_stages import Arm, Stage, Way

from layerfuse.bench.environment import environment

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
ARMS = {"all": Arm((*ALL, "mla_dual_rms_norm_group_quant"), "sglang")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*SHAPES], metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs=2, default=(1024, 128), help="tokens of prompts and of answers")
    parser.add_argument("--cache", type=int, default=100_000, help="tokens that each engine keeps")
    parser.add_argument("--limit", type=float, default=480, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("sglang_serve.json"))
    work = Path(tempfile.gettempdir()) / "sglang_engine"
    parser.add_argument("--logs", type=Path, default=work / "logs")
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + given.limit
    sizes = {"max_running_requests": given.at_once, "cuda_graph_bs_decode": [*SIZES]}
    more: dict[str, Any] = {"engine": {}, "variables": {}} if _gpus() else CPU
    stage = Stage(
        given.shape,
        ARMS,
        {"sglang": Way()},
        variables=more["variables"],
        engine=sizes | more["engine"],
        cache=given.cache,
    )
    alone = _Turn()
    engines = {arm: Engine(arm, f"serve-{given.shape}.{arm}", stage, work, given.logs) for arm in ("sglang", *ARMS)}
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in engines}
    try:
        ready = {arm: engine.answer(until) for arm, engine in engines.items()}
        print(f"{given.shape}: ready", flush=True)
        alone.take()
        for turn in range(given.rounds + 1):
            for arm in [*engines][:: 1 if turn % 2 else -1]:
                found = engines[arm].ask(until, "serve", given.requests, given.at_once, *given.lengths, turn)
                print(turn, arm, found, flush=True)
                rounds[arm] += [found] if turn else []
    finally:
        for engine in engines.values():
            engine.stop()
        alone.end()
    reports = {arm: given.logs / f"serve-{given.shape}.{arm}.report.json" for arm in ARMS}
    results = json.loads(given.out.read_text()) if given.out.exists() else {"shapes": {}}
    results["environment"] = {**environment(), "ended": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())}
    results["shapes"][given.shape] = {
        "lengths": given.lengths, "requests": given.requests, "at_once": given.at_once, "ready": ready, "rounds": rounds,
        "median": {arm: {key: statistics.median(each[key] for each in several) for key in several[0]} for arm, several in rounds.items()},
        "fusions": {arm: ARMS[arm].fusions for arm in ARMS},
        "missed": {arm: [each["missed"] for each in json.loads(path.read_text())["modules"].values()] for arm, path in reports.items()},
    }  # fmt: skip
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
