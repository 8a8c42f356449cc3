"""Tables of fused all-reduces on the GPUs of one host, each figure held to its goal: about four minutes on two H200.

    python benchmarks/all_reduce_tables.py --ranks 2 --vllm FOLDER --out FOLDER --limit 400
    python benchmarks/all_reduce_tables.py --list                       # the runs with their numbers
    python benchmarks/all_reduce_tables.py --summarise --out FOLDER     # from the files of several calls; needs no GPU

The processes are started once for all runs. Beside the files of each run it writes `all_reduce_tables.md`, all of them in brief. After
`--limit` seconds no further run begins, and the last line says with which `--skip` to go on. Goals are ratios within one run, and of a
quantised form to the plain one of the same call: they are printed, and decide nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from attrs import frozen
from table_runs import chosen, parser_of

from layerfuse import bench
from layerfuse.bench.against import (
    ALONE,
    BEHIND,
    LIBRARIES,
    ONE_SHOT,
    TWO_SHOT,
    VLLM,
    best_unfused,
    of_library,
    one_shot_alone,
    ratio,
)
from layerfuse.bench.cases import forms_over_ranks
from layerfuse.bench.result import FORMAT, NOT_ASKED_FOR, Result, Row

OURS, FLASHINFER = "layerfuse (symm_mem)", "flashinfer fused"
PEERS = (
    OURS,
    FLASHINFER,
    "flashinfer two-shot",
    *(
        name + end
        for name in (LIBRARIES["cuda"], ONE_SHOT, TWO_SHOT, VLLM)
        for end in (f"{BEHIND}inductor", f"{BEHIND}layerfuse", ALONE)
    ),
)
CPU_PEERS = ("layerfuse (reference)", f"{LIBRARIES['cpu']}{BEHIND}layerfuse", f"{LIBRARIES['cpu']}{ALONE}")
PLAIN, GROUP = "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_group_quant"
TOKENS = (1, 8, 32, 80, 256, 1024, 4096)
MOST = 1 << 30


@frozen
class Goal:
    """Our time divided by another is at most this."""

    against: str
    "A word of `bench.against.AGAINST`, or the form that is not quantised."
    ratio: float
    least: int = 1
    most: int = MOST
    "Tokens between which it holds, both included."


UNFUSED = (
    Goal("best unfused", 0.85, 1, 32),
    Goal("library", 0.45, 1, 32),
    Goal("one-shot alone", 1.15, 1, 32),
    Goal("best unfused", 0.9, 33, 80),
    Goal("best unfused", 1.0, 81, 1023),
    Goal("best unfused", 0.95, 1024, 1024),
    Goal("best unfused", 1.0, 1025),
)
QUANTISED = (Goal(PLAIN, 1.05),)


@frozen(kw_only=True)
class Run:
    """One table."""

    op: str
    width: int
    tokens: tuple[int, ...] = TOKENS
    goals: tuple[Goal, ...] = ()
    slack: float = 0.0
    "How far off the goals it may be: a width that nobody tuned for."

    def __str__(self) -> str:
        return f"{self.op} {self.width}"


def runs(*, every: bool = False) -> Iterator[Run]:
    """The shapes that have goals, in the order of what matters; then, if asked for, every other form."""
    yield Run(op=PLAIN, width=2880, goals=UNFUSED)
    yield Run(op=PLAIN, width=7168, goals=UNFUSED)
    yield Run(op=GROUP, width=7168, goals=QUANTISED)
    yield Run(op=GROUP, width=2880, goals=QUANTISED)
    yield Run(op=PLAIN, width=5120, goals=UNFUSED, slack=0.1)
    for op in forms_over_ranks() if every else ():
        if op not in (PLAIN, GROUP):
            yield Run(op=op, width=2880 if op.endswith("_pad") else 7168, tokens=(8, 80, 1024))


# ---- what came of it

Plain = dict[tuple[int, int], float]
"""(width, tokens) -> our microseconds without quantisation."""


def plain_times(results: Iterable[Result]) -> Plain:
    """Of the runs of the plain form."""
    return {
        (next(iter(result.case.widths.values())), row.tokens): us
        for result in results
        if result.case.op == PLAIN
        for row in result.rows
        for us in [row.us(result.ours or "")]
        if us is not None
    }


def _ratio(run: Run, row: Row, ours: str | None, goal: Goal, plain: Plain) -> float | None:
    if goal.against != PLAIN:
        return ratio(row, ours, goal.against)
    mine, without = row.us(ours or ""), plain.get((run.width, row.tokens))
    return None if mine is None or without is None else mine / without


def misses(run: Run, row: Row, ours: str | None, plain: Plain) -> list[str]:
    """Each goal that is not reached, with the figure, and each that has none."""
    said = []
    for goal in run.goals:
        if goal.least <= row.tokens <= goal.most:
            found, bound = _ratio(run, row, ours, goal, plain), goal.ratio * (1 + run.slack)
            name = "without quantisation" if goal.against == PLAIN else goal.against
            if found is None:
                said.append(f"ours/{name} was not measured")
            elif found > bound:
                said.append(f"ours/{name} {found:.3f} > {bound:.3f}")
    return said


HEAD = ("case", "tokens", "ours", "best unfused", "which", "library + add-norm", "one-shot alone", "two-shot alone", "vLLM alone", "FlashInfer fused",
        "ours/best", "ours/library", "ours/one-shot alone", "ours/plain", "goals")  # fmt: skip


def cells(run: Run, row: Row, ours: str | None, plain: Plain) -> list[str]:
    """One line of the table."""

    def shown(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    def verdict(name: str) -> str:
        found = row.of(name)
        return "" if found is None else found.verdict if found.us is None else shown(found.us)

    best, missed = best_unfused(row), misses(run, row, ours, plain)
    quantised = _ratio(run, row, ours, QUANTISED[0], plain) if run.op != PLAIN else None
    said = "MISS " + "; ".join(missed) if missed else "ok" if run.goals else "-"
    return [
        str(run), str(row.tokens), verdict(ours or OURS), shown(best[1] if best else None), best[0] if best else "",
        shown(of_library(row)), shown(one_shot_alone(row)), *(verdict(name + ALONE) for name in (TWO_SHOT, VLLM)),
        verdict(FLASHINFER),
        *(shown(ratio(row, ours, against), 3) for against in ("best unfused", "library", "one-shot alone")),
        shown(quantised, 3), said,
    ]  # fmt: skip


def brief(results: Sequence[tuple[Run, Result]]) -> str:
    """All tables in one: microseconds, ratios, and whether the goals are reached."""
    lines = ["# Fused all-reduces in brief"]
    missed = total = 0
    for ranks in sorted({result.case.ranks for _, result in results}):
        of_these = [(run, result) for run, result in results if result.case.ranks == ranks]
        plain = plain_times(result for _, result in of_these)
        lines += ["", f"## {ranks} GPUs", "", _line(HEAD), _line(["---", *["---:"] * (len(HEAD) - 2), "---"])]
        for run, result in of_these:
            for row in result.rows:
                lines.append(_line(cells(run, row, result.ours, plain)))
                total += bool(run.goals)
                missed += bool(misses(run, row, result.ours, plain))
    first = results[0][1]
    where = f"{first.environment['device']}, torch {first.environment['torch']}, {first.date[:10]}"
    lines += ["", f"Microseconds. {total - missed} of {total} rows reach all of their goals. {where}. {first.method}."]
    lines += ["", *(f"- {said}" for said in absent(result for _, result in results))]
    return "\n".join(lines) + "\n"


def absent(results: Iterable[Result]) -> list[str]:
    """Who was asked for and is not here, once for each reason, and what else the results say of peers."""
    said: dict[str, str | None] = {}
    for result in results:
        for peer in result.peers:
            if not peer.present and peer.why_not != NOT_ASKED_FOR:
                said[f"{peer.name}: {peer.why_not}"] = None
        for row in result.rows:
            for one in row.measured:
                # That others round their sum is known; why one refuses is said once.
                if one.message and not (one.verdict == "ok" and one.peer != result.ours):
                    where = f"{result.case.op} {result.case.name}, {row.tokens} tokens"
                    said.setdefault(f"{one.peer.split()[0]} {one.verdict}: {one.message}", where)
    return [reason if where is None else f"{where}: {reason}" for reason, where in said.items()]


def _line(several: Iterable[str]) -> str:
    return f"| {' | '.join(several)} |"


def saved(folder: Path, ranks: int | None) -> list[tuple[Run, Result]]:
    """The results in a folder that belong to runs of this list, in its order; of so many ranks, where that is given."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("format") == FORMAT and data["case"]["op"] in forms_over_ranks():
            found.append(Result.from_dict(data))
    return [
        (run, result)
        for run in runs(every=True)
        for result in found
        if result.case.op == run.op
        and list(result.case.widths.values()) == [run.width]
        and ranks in (None, result.case.ranks)
    ]


# ---- the command


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "all_reduce_tables.md")
    parser.add_argument("--ranks", type=int, help="processes, one per GPU; all GPUs if not given, two on a CPU")
    parser.add_argument("--flashinfer", type=Path, help="the folder of FlashInfer's compiled all-reduces")
    parser.add_argument("--every", action="store_true", help="the other forms too")
    return parser.parse_args()


def _measure(run: Run, given: argparse.Namespace, ranks: bench.Ranks) -> Result:
    on_gpus = given.device == "cuda"
    tokens = tuple(map(int, given.tokens.split(","))) if given.tokens else run.tokens if on_gpus else (1, 5)
    peers = given.peers.split(",") if given.peers else PEERS if on_gpus else CPU_PEERS
    return bench.run(
        run.op, widths=(run.width,), tokens=tokens, peers=peers, vllm=given.vllm, flashinfer=given.flashinfer, rounds=given.rounds, quick=not on_gpus, ranks=ranks,
    )  # fmt: skip


def main() -> int:
    """Measure and write; 1 where one of our own results was wrong or failed."""
    given = _arguments()
    wanted = chosen(runs(every=given.every), given)
    if given.list:
        print(*(f"{number:3} {run}, {len(run.tokens)} token counts" for number, run in wanted), sep="\n")
        return 0
    summary = given.out / "all_reduce_tables.md"
    if given.summarise:
        summary.write_text(brief(saved(given.out, given.ranks)))
        print(summary.read_text())
        return 0
    if given.device == "cuda" and torch.cuda.device_count() < 2:
        print("nothing measured: this needs two GPUs that torch can see")
        return 0
    begun, results, bad = time.perf_counter(), [], 0
    given.out.mkdir(parents=True, exist_ok=True)
    with bench.Ranks(given.ranks, given.device) as ranks:
        print(f"{ranks.size} ranks started in {time.perf_counter() - begun:.0f} s", flush=True)
        print(*HEAD, sep=" | ", flush=True)
        for number, run in wanted:
            spent = time.perf_counter() - begun
            if spent > given.limit:
                print(f"stopped after {spent:.0f} s: go on with --skip {number}", flush=True)
                break
            result = _measure(run, given, ranks)
            bench.write(result, given.out)
            results.append((run, result))
            plain = plain_times(each for _, each in results)
            for row in result.rows:
                print(*cells(run, row, result.ours, plain), sep=" | ", flush=True)
            bad += sum(one.peer.startswith("layerfuse (") and one.verdict in ("wrong", "failed")
                       for row in result.rows for one in row.measured)  # fmt: skip
            summary.write_text(brief(results))
    print(*absent(result for _, result in results), sep="\n")
    print(f"{time.perf_counter() - begun:.0f} s in all; written to {given.out}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
