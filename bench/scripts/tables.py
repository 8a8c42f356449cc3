"""Tables of the repository, each figure held to what was set as its goal: about eight minutes on one H200, four on two.

    python bench/scripts/tables.py gpu --aiter FOLDER --out FOLDER --limit 480
    python bench/scripts/tables.py all_reduce --ranks 2 --out FOLDER
    python bench/scripts/tables.py gpu --list                       # the runs with their numbers
    python bench/scripts/tables.py gpu --summarise --out FOLDER     # from the files of several calls; needs no GPU

Beside the files of each run it writes `gpu_tables.md` or `all_reduce_tables.md`, all of them in brief. What matters most comes first.
After `--limit` seconds no further run begins, and the last line says with which `--skip` to go on. Goals are ratios within one run,
and of a quantised form to the plain one of the same call: they are printed, and decide nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from table_runs import BEST, BEST_UNFUSED, COMPILERS, COPY, INDUCTOR, PLAIN, SUITES, UNQUANTISED, Run, Suite

from layerfuse import bench
from layerfuse.bench.against import AGAINST, best_unfused
from layerfuse.bench.peers import OURS
from layerfuse.bench.report import remarks
from layerfuse.bench.result import FORMAT, Result, Row

Results = Sequence[tuple[Run, Result]]
Plain = dict[tuple[int, int, int], float]
"""(ranks, width, tokens) -> our microseconds without quantisation."""


def plain_times(results: Results) -> Plain:
    """Of the runs of the plain all-reduce."""
    return {
        (result.case.ranks, *run.widths, row.tokens): us
        for run, result in results
        for row in result.rows
        if run.op == PLAIN and (us := row.us(result.ours or "")) is not None
    }


def times(row: Row, ours: str, plain: float | None = None) -> dict[str, float]:
    """Microseconds by peer, and by whatever else a goal may name; `plain`: of the form that is not quantised."""
    found = {one.peer: one.us for one in row.measured if one.us is not None}
    others = {INDUCTOR: COMPILERS, BEST: [name for name in found if name not in (ours, COPY)]}
    more = {name: min((found[peer] for peer in peers if peer in found), default=None) for name, peers in others.items()}
    more |= {UNQUANTISED: plain, **{name: of(row) for name, of in AGAINST.items()}}
    return found | {name: us for name, us in more.items() if us is not None}


def misses(run: Run, row: Row, ours: str | None, plain: float | None = None) -> list[str]:
    """Each goal that is not reached, with the figure. Who was not measured misses nothing."""
    us = times(row, ours or "", plain)
    if ours not in us:
        return ["ours has no time"]
    goals = [goal for goal in run.goals if goal.against in us and goal.least <= row.tokens <= goal.most]
    found = [(goal.against, us[ours] / us[goal.against], goal.ratio * (1 + run.slack)) for goal in goals]
    return [f"ours/{name} {ratio:.3f} > {bound:.3f}" for name, ratio, bound in found if ratio > bound + 1e-9]


def head(suite: Suite) -> list[str]:
    """Of the table."""
    return ["case", "tokens", "ours", *suite.columns, *(f"ours / {name}" for name in suite.ratios), "goals"]


def cells(suite: Suite, run: Run, row: Row, result: Result, plain: Plain) -> list[str]:
    """One line of it."""
    ours, without = result.ours or "", plain.get((result.case.ranks, run.widths[0], row.tokens))
    us, best = times(row, ours, None if run.op == PLAIN else without), best_unfused(row)

    def shown(name: str) -> str:
        measured = row.of(name)
        said = f"{us[name]:.2f}" if name in us else "" if measured is None else measured.verdict
        return f"{said} ({best[0]})" if name == BEST_UNFUSED and best else said

    ratios = (f"{us[ours] / us[name]:.3f}" if {ours, name} <= {*us} else "" for name in suite.ratios)
    missed = misses(run, row, ours, without)
    verdict = "MISS " + "; ".join(missed) if missed else "ok" if run.goals else "-"
    return [str(run), str(row.tokens), *map(shown, (ours, *suite.columns)), *ratios, verdict]


def brief(suite: Suite, results: Results) -> str:
    """All tables in one: microseconds, ratios, and whether the goals are reached."""
    text, reached, plain = [f"# {suite.title}"], [], plain_times(results)
    for ranks in sorted({result.case.ranks for _, result in results}):
        text += ["", f"## {ranks} GPU{'s' if ranks > 1 else ''}", "", _line(head(suite))]
        text += [_line(["---", *["---:"] * (len(head(suite)) - 2), "---"])]
        for run, result in results:
            if result.case.ranks == ranks:
                lines = [cells(suite, run, row, result, plain) for row in result.rows]
                text += map(_line, lines)
                reached += [line[-1] == "ok" for line in lines if run.goals]
    first = results[0][1]
    where = f"{first.environment['device']}, torch {first.environment['torch']}, {first.date[:10]}"
    text += [
        "",
        f"Microseconds. {sum(reached)} of {len(reached)} rows reach all of their goals. {where}. {first.method}.",
    ]
    said = dict.fromkeys(remark for _, result in results if result.case.ranks > 1 for remark in remarks(result))
    return "\n".join([*text, "", *(f"- {remark}" for remark in said)]).rstrip() + "\n"


def _line(several: Iterable[str]) -> str:
    return f"| {' | '.join(several)} |"


def saved(suite: Suite, folder: Path) -> Results:
    """The results in a folder that belong to runs of a suite, in its order."""
    read = [data for path in sorted(folder.rglob("*.json")) if isinstance(data := json.loads(path.read_text()), dict)]
    found = [Result.from_dict(data) for data in read if data.get("format") == FORMAT]
    return [(run, each) for run in suite.runs() for each in found if each.case == run.case(each.case.ranks)]


def measured(
    suite: Suite, wanted: Iterable[tuple[int, Run]], given: argparse.Namespace
) -> Iterator[tuple[Run, Result]]:
    """Run after run, each written when it is done."""
    begun, on_gpus = time.perf_counter(), given.device == "cuda"
    with bench.Ranks(given.ranks, given.device) if suite.gpus > 1 else contextlib.nullcontext() as ranks:
        for number, run in wanted:
            spent = time.perf_counter() - begun
            if spent > given.limit:
                print(f"stopped after {spent:.0f} s: go on with --skip {number}", flush=True)
                return
            try:
                result = bench.run(
                    run.op, widths=run.widths, tokens=given.tokens or (run.tokens if on_gpus else (1, 5)), ranks=ranks,
                    peers=given.peers or (suite.peers if on_gpus else suite.on_a_cpu), aiter=given.aiter, device=given.device,
                    rounds=given.rounds, quick=not on_gpus, **run.options,
                )  # fmt: skip
            except (bench.BenchError, bench.CannotMeasureError) as error:
                print(f"left out: {run}: {error}", flush=True)
                continue
            bench.write(result, given.out)
            yield run, result


def main() -> int:
    """Measure and write; 1 where one of our own results was wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES, nargs="?", default="gpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no further run begins")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out the first runs: to go on where a limit ended one"
    )
    parser.add_argument(
        "--only", type=_words, default=[], help="runs whose name holds one of these words, with commas between them"
    )
    parser.add_argument(
        "--tokens", type=lambda said: [*map(int, said.split(","))], help="these instead, with commas between them"
    )
    parser.add_argument("--peers", type=_words, help="these instead, with commas between them")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--aiter", type=Path, help="a checkout of ROCm/aiter")
    parser.add_argument("--ranks", type=int, help="processes, one per GPU; all GPUs if not given, two on a CPU")
    parser.add_argument("--list", action="store_true", help="print the runs and their numbers")
    parser.add_argument("--summarise", action="store_true", help="write the tables in brief from the files in --out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script: tiny")
    given = parser.parse_args()
    suite, summary = SUITES[given.suite], given.out / f"{given.suite}_tables.md"
    wanted = [(number, run) for number, run in enumerate(suite.runs()) if number >= given.skip]
    wanted = [(number, run) for number, run in wanted if not given.only or any(word in str(run) for word in given.only)]
    if given.list:
        print(*(f"{number:3} {run}, {len(run.tokens)} token counts" for number, run in wanted), sep="\n")
        return 0
    if given.summarise:
        summary.write_text(brief(suite, saved(suite, given.out)))
        print(summary.read_text())
        return 0
    if given.device == "cuda" and torch.cuda.device_count() < suite.gpus:
        print(f"nothing measured: this needs {suite.gpus} GPU{'s' if suite.gpus > 1 else ''} that torch can see")
        return 0
    results: list[tuple[Run, Result]] = []
    print(*head(suite), sep=" | ", flush=True)
    for run, result in measured(suite, wanted, given):
        results.append((run, result))
        for row in result.rows:
            print(*cells(suite, run, row, result, plain_times(results)), sep=" | ", flush=True)
        print(*(f"    {remark}" for remark in remarks(result)), sep="\n", flush=True)
        summary.write_text(brief(suite, results))
    print(f"written to {given.out}")
    every = [one for _, result in results for row in result.rows for one in row.measured]
    return int(any(one.peer.startswith(OURS) and one.verdict in ("wrong", "failed") for one in every))


def _words(said: str) -> list[str]:
    return [word for word in said.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
