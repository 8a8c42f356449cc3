"""Whether an engine with layerfuse draws the same tokens after a sleep, beside a second engine of its process, and in a start from vLLM's cache.

    python bench/scripts/vllm_lives.py --out DIR

A small DeepSeek-V3 with random weights, one GPU, vLLM as it is installed, with layerfuse and no option (`mla_decode` is on then). Engines start beside
each other: one that sleeps (level 1) and wakes, and then has a second one of other weights beside it in its process; that second one alone; one of
vLLM alone. Then the first again, from the cache that it left. Greedy tokens of 22 texts have to be the same. How many are vLLM's own is said and
not asked for, as two of rounded numbers may be alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arm import serve
from attrs import evolve
from vllm_arm import Arm
from vllm_engine import ArmError, Engine, _Turn
from workloads import STAGES, Way
from workloads import Arm as Asked

OTHER = 1_000_000
"""Added to the seed of each weight of the other model."""
SAID = ("mla_decode", "problem", "loaded from", "Directly load", "compile cache", "sleep", "wake")
"""Parts of the lines of a log that are shown."""


class Lives(Arm):
    """An engine that sleeps, wakes, and has another one beside it."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import vllm_shapes

        vllm_shapes.FIRST_SEED = asked.get("first_seed", 0)
        self.asked = asked
        super().__init__(asked)

    def sleep_and_wake(self) -> dict[str, float]:
        """Gigabytes of the GPU that are free before a sleep of level 1, in it and behind it."""
        import torch

        free = [torch.cuda.mem_get_info()[0]]
        self.llm.sleep(level=1)
        free.append(torch.cuda.mem_get_info()[0])
        self.llm.wake_up()
        free.append(torch.cuda.mem_get_info()[0])
        return dict(zip(("before", "asleep", "awake"), (round(each / 1e9, 2) for each in free), strict=True))

    def beside(self) -> dict[str, Any]:
        """The tokens of a second engine in this process, of the other model; it lives on."""
        engine = {name: each for name, each in self.asked["engine"].items() if name != "enable_sleep_mode"}
        self.second = Lives(self.asked | {"first_seed": OTHER, "engine": engine})
        return self.second.tokens()


class Process(Engine):
    """Its process, seen from here."""

    script = Path(__file__).name

    def __init__(
        self, arm: str, name: str, work: Path, logs: Path, cache: str, asked: Asked | None, **given: Any
    ) -> None:
        self.given, self.cache = given, cache
        stage = evolve(STAGES["vllm"]["tiny"], arms={} if asked is None else {arm: asked})
        super().__init__(arm, name, stage, work, logs)

    def asked(self, way: Way, fusions: tuple[str, ...] | None, options: dict[str, Any]) -> dict[str, Any]:
        """As any, with what this one is given."""
        return (
            super().asked(way, fusions, options) | {"batches": [16], "captured": [1, 2, 4, 8, 16, 64, 512]} | self.given
        )

    def variables(self, fusions: tuple[str, ...] | None, work: Path) -> dict[str, str]:
        """As any, with a cache by its own name."""
        return super().variables(fusions, work) | {"VLLM_CACHE_ROOT": str(work / "cache" / self.cache)}


def tokens_of(found: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Name -> the tokens of each text."""
    return {name: [row[0] for row in rows] for name, rows in found.items()}


def same(first: dict[str, Any], other: dict[str, Any]) -> tuple[int, int]:
    """How many texts are the same, and of how many."""
    pairs = [pair for name, rows in tokens_of(first).items() for pair in zip(rows, tokens_of(other)[name], strict=True)]
    return sum(one == two for one, two in pairs), len(pairs)


def lived(begin: Any, until: float, turn: Any) -> dict[str, Any]:
    """All lives. `begin`: (arm, name, cache, ...) to a process that has begun; `turn`: among all such commands."""
    found: dict[str, Any] = {"same": {}}
    started: list[Any] = []

    def one(*args: Any, **given: Any) -> Any:
        started.append(begin(*args, **given))
        return started[-1]

    try:
        sleeper = one("decode", "sleeper", "decode", engine={"enable_sleep_mode": True})
        other = one("decode", "other", "other", first_seed=OTHER)
        vllm = one("vllm", "vllm", "vllm")
        found["cold"] = sleeper.answer(until)
        drawn = sleeper.ask(until, "tokens")
        other.answer(until)
        vllm.answer(until)
        turn.take()  # vLLM stops where anybody has taken memory while it goes to sleep
        found["gigabytes free"] = sleeper.ask(until, "sleep_and_wake")
        turn.share()  # more engines start
        found["same"]["after a sleep"] = same(drawn, sleeper.ask(until, "tokens"))
        alone = other.ask(until, "tokens")
        other.stop()
        found["same"]["as the other model, which has to differ"] = same(drawn, alone)
        found["same"]["as vLLM's own, which may differ"] = same(drawn, vllm.ask(until, "tokens"))
        vllm.stop()
        warm = one("decode", "warm", "decode", engine={"enable_sleep_mode": True})
        found["warm"] = warm.answer(until)
        found["same"]["from the cache"] = same(drawn, warm.ask(until, "tokens"))
        warm.stop()
        found["same"]["of a second engine in the process"] = same(alone, sleeper.ask(until, "beside"))
        found["same"]["beside a second engine"] = same(drawn, sleeper.ask(until, "tokens"))
    except ArmError as error:
        found["error"] = str(error)
    finally:
        for each in started:
            each.stop()
        turn.end()
    return found


def is_right(found: dict[str, Any]) -> bool:
    """Whether all came, tokens are the same, and those of the other model are others."""
    counts = {name: count for name, count in found["same"].items() if "may differ" not in name}
    differ = [name for name in counts if "has to differ" in name]
    return (
        "error" not in found
        and len(counts) == 5
        and all(counts[name][0] < counts[name][1] / 2 for name in differ)
        and all(count == of for name, (count, of) in counts.items() if name not in differ)
    )


def main() -> int:
    """Run all lives; 1 where tokens differ or an engine failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for what was found, and logs")
    parser.add_argument("--limit", type=float, default=240, help="seconds")
    parser.add_argument("--fusions", default="", help="of layerfuse's option; empty: no option")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    ours = Asked(tuple(given.fusions.split(","))) if given.fusions else Asked()
    with tempfile.TemporaryDirectory() as work:

        def begin(kind: str, name: str, cache: str, **more: Any) -> Process:
            return Process(kind, name, Path(work), given.out, cache, None if kind == "vllm" else ours, **more)

        found = lived(begin, began + given.limit, _Turn())
    found["seconds"], found["right"] = round(time.monotonic() - began, 1), is_right(found)
    (given.out / "lives.json").write_text(json.dumps(found, indent=1) + "\n")
    for log in sorted(given.out.glob("*.log")):
        said = [line for line in log.read_text(errors="replace").splitlines() if any(part in line for part in SAID)]
        print(f"== {log.name}", *(line[-230:] for line in said[:24]), sep="\n")
    print(json.dumps({name: each for name, each in found.items() if name not in ("cold", "warm")}, indent=1))
    print(*(f"{name}: started in {found[name]['start_s']} s" for name in ("cold", "warm") if name in found), sep="\n")
    return 0 if found["right"] else 1


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        serve(Lives)
    else:
        raise SystemExit(main())
