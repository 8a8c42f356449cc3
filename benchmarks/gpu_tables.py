"""Tables of single ops on one GPU, each figure held to what was set as its goal: about eight minutes on an H200.

    python benchmarks/gpu_tables.py --aiter FOLDER --vllm FOLDER --out FOLDER --limit 480
    python benchmarks/gpu_tables.py --list                       # the runs with their numbers
    python benchmarks/gpu_tables.py --summarise --out FOLDER     # from the files of several calls; needs no GPU

Beside the tables of each run it writes `gpu_tables.md`, all of them in brief. What matters most comes first. After `--limit`
seconds no further run begins, and the last line says with which `--skip` to go on. Goals are ratios within one run: they are
printed, and decide nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from table_runs import chosen, parser_of

from layerfuse import bench, registry
from layerfuse.bench.cases import Case, forms
from layerfuse.bench.choosing import Options, make_case
from layerfuse.bench.peers import OURS
from layerfuse.bench.result import FORMAT, Result, Row

COPY, AITER, VLLM, FLA = "copy", "aiter triton", "vllm", "fla"
COMPILERS = ("inductor", "inductor combo_kernels")
OTHERS = ("liger", FLA, "quack", "flashinfer", VLLM)
PEERS = ("layerfuse (triton)", *COMPILERS, AITER, *OTHERS, COPY)
BEST = "best of the others"
INDUCTOR = "better Inductor"
MOST = 1 << 30


@frozen
class Goal:
    """Somebody's time divided by ours is at least this; of the copy, ours divided by its time is at most this."""

    peer: str
    ratio: float
    least: int = 1
    most: int = MOST
    "Tokens between which it holds, both included."


USERS = (Goal(VLLM, 1.1, 1, 64), Goal(VLLM, 1.0, 65), Goal(FLA, 1.1, 1, 64), Goal(FLA, 1.0, 65))
"""What users of NVIDIA GPUs have today."""
SINGLE = (*USERS, Goal(AITER, 1.15), Goal(COPY, 1.08, 4096))
ADD = (*USERS, Goal(BEST, 1.0, 1, 64), Goal(BEST, 0.98, 65))
ADD_GROUP = (
    *USERS,
    Goal(AITER, 1.2, 1, 64),
    Goal(INDUCTOR, 2.2, 1, 64),
    Goal(COPY, 1.05, 1024),
    Goal(INDUCTOR, 1.7, 1024),
)
PADDED = (Goal(AITER, 1.2, 1, 99), Goal(COPY, 1.02, 16384))
GATED = (Goal(AITER, 1.4, 1, 64), Goal(COPY, 1.25, 1, 64), Goal(AITER, 1.25, 1024), Goal(COPY, 1.08, 1024))

TOKENS = (1, 64, 1024, 16384)
TWO = (64, 16384)


@frozen(kw_only=True)
class Run:
    """One table."""

    op: str
    widths: tuple[int, ...]
    tokens: tuple[int, ...] = TOKENS
    goals: tuple[Goal, ...] = ()
    slack: float = 0.0
    "How far off the goals it may be: widths that nobody tuned for."
    options: dict[str, Any] = field(factory=dict)

    def __str__(self) -> str:
        more = "".join(f" {name}={value}" for name, value in self.options.items())
        return f"{self.op} {','.join(map(str, self.widths))}{more}"

    def case(self) -> Case:
        """What is measured."""
        return make_case(self.op, registry=registry.default, widths=self.widths, options=Options(**self.options))


def _named() -> Iterator[Run]:
    """The shapes that have goals of their own, in the order of what matters."""
    sigmoid = {"heads": 32, "activation": "sigmoid"}
    yield Run(op="gated_rms_norm_group_quant", widths=(128,), goals=GATED, options=sigmoid)
    yield Run(op="add_rms_norm_group_quant", widths=(7168,), goals=ADD_GROUP)
    yield Run(op="add_rms_norm_pad", widths=(2880,), goals=PADDED)
    for width in (2880, 4096, 7168):
        yield Run(op="add_rms_norm", widths=(width,), goals=ADD)
    for op in ("add_rms_norm_per_token_quant", "add_rms_norm_static_quant", "rms_norm_per_token_quant",
               "rms_norm_static_quant", "rms_norm_group_quant"):  # fmt: skip
        yield Run(op=op, widths=(7168,), goals=SINGLE)
    for op, width in (
        ("silu_mul_group_quant", 18432),
        ("silu_mul_per_token_quant", 2304),
        ("silu_mul_static_quant", 14336),
    ):
        yield Run(op=op, widths=(width,), goals=SINGLE)
    yield Run(op="gated_rms_norm", widths=(128,), goals=USERS, options={"heads": 32})
    yield Run(op="gated_rms_norm", widths=(128,), goals=USERS, options=sigmoid)


UNTUNED = (2304, 5120, 6144, 12288, 5001, 3072)
_ON_ALL_WIDTHS = (
    ("add_rms_norm_group_quant", ADD_GROUP),
    ("add_rms_norm", ADD),
    ("add_rms_norm_per_token_quant", SINGLE),
    ("silu_mul_group_quant", SINGLE),
    ("add_rms_norm_static_quant", SINGLE),
    ("add_rms_norm_pad", PADDED),
)


def _untuned() -> Iterator[Run]:
    for op, goals in _ON_ALL_WIDTHS:
        for width in UNTUNED:
            yield Run(op=op, widths=(width,), goals=goals, tokens=TWO, slack=0.1)
    for heads, width in ((16, 128), (48, 64), (8, 256)):
        given = {"heads": heads, **({"group_size": 64} if width == 64 else {})}
        yield Run(op="gated_rms_norm_group_quant", widths=(width,), goals=GATED, tokens=TWO, slack=0.1, options=given)


def _rest(named: Iterable[str]) -> Iterator[Run]:
    """Every other form of the catalog once, and what changes how a kernel reads or writes."""
    for options in (
        {"tma_aligned": True},
        {"ue8m0": True},
        {"weight_dtype": "fp32"},
        {"weight_offset": 1.0},
        {"group_size": 32},
    ):
        yield Run(op="add_rms_norm_group_quant", widths=(7168,), tokens=TWO, options=options)
    for name, (fusion, form) in forms().items():
        if name in named or fusion.owner != "layerfuse":
            continue
        widths = (1536, 512, 64) if name.startswith("mla_") else (128,) if name.startswith("gated") else (7168,)
        given = {"heads": 32} if name.startswith("gated") else {}
        yield Run(op=form.op.name, widths=widths, tokens=TWO, options=given)


def runs() -> list[Run]:
    """All of them."""
    several = [*_named(), *_untuned()]
    return [*several, *_rest({run.op for run in several})]


# ---- what came of it


def _times(row: Row, ours: str) -> dict[str, float]:
    """Microseconds by peer, and of the better of the two Inductors and the best of all others."""
    times = {one.peer: one.us for one in row.measured if one.us is not None}
    groups = {INDUCTOR: COMPILERS, BEST: tuple(name for name in times if name not in (ours, COPY))}
    better = {name: min(times[peer] for peer in group if peer in times)
              for name, group in groups.items() if any(peer in times for peer in group)}  # fmt: skip
    return {**times, **better}


def misses(run: Run, row: Row, ours: str | None) -> list[str]:
    """Each goal that is not reached, with the figure."""
    times = {} if ours is None else _times(row, ours)
    if ours is None or ours not in times:
        return ["ours has no time"]
    said = []
    for goal in run.goals:
        if goal.peer not in times or not goal.least <= row.tokens <= goal.most:
            continue
        if goal.peer == COPY:
            ratio, bound = times[ours] / times[COPY], goal.ratio * (1 + run.slack)
            if ratio > bound:
                said.append(f"ours/copy {ratio:.2f} > {bound:.2f}")
        else:
            ratio, bound = times[goal.peer] / times[ours], goal.ratio * (1 - run.slack)
            if ratio < bound:
                said.append(f"{goal.peer} {ratio:.2f} < {bound:.2f}")
    return said


HEAD = ("case", "tokens", "ours", "copy", "Inductor", "combo", "AITER", "vLLM", "fla", "other", "ours/copy", "Inductor/ours",
        "AITER/ours", "vLLM/ours", "goals")  # fmt: skip


def cells(run: Run, row: Row, ours: str | None) -> list[str]:
    """One line of the table."""
    times = _times(row, ours or "")
    mine = times.get(ours or "")

    def us(name: str) -> str:
        found = row.of(name)
        return f"{times[name]:.2f}" if name in times else "" if found is None else found.verdict

    def ratio(above: float | None, below: float | None) -> str:
        return f"{above / below:.2f}" if above is not None and below is not None else ""

    rest = [f"{name} {times[name]:.2f}" for name in ("liger", "quack", "flashinfer") if name in times]
    missed = misses(run, row, ours)
    verdict = "MISS " + "; ".join(missed) if missed else "ok" if run.goals else "-"
    return [
        str(run), str(row.tokens), us(ours or ""), *(us(name) for name in (COPY, *COMPILERS, AITER, VLLM, FLA)),
        ", ".join(rest), ratio(mine, times.get(COPY)), *(ratio(times.get(name), mine) for name in (INDUCTOR, AITER, VLLM)),
        verdict,
    ]  # fmt: skip


def brief(results: Sequence[tuple[Run, Result]]) -> str:
    """All tables in one: microseconds, ratios, and whether the goals are reached."""
    lines = ["# Single ops in brief", "", _line(HEAD), _line(["---", *["---:"] * 9, *["---:"] * 4, "---"])]
    missed = total = 0
    for run, result in results:
        for row in result.rows:
            lines.append(_line(cells(run, row, result.ours)))
            total += bool(run.goals)
            missed += bool(run.goals and misses(run, row, result.ours))
    first = results[0][1]
    where = f"{first.environment['device']}, torch {first.environment['torch']}, {first.date[:10]}"
    lines += ["", f"Microseconds. {total - missed} of {total} rows reach all of their goals. {where}. {first.method}."]
    return "\n".join(lines) + "\n"


def _line(several: Iterable[str]) -> str:
    return f"| {' | '.join(several)} |"


def saved(folder: Path) -> list[tuple[Run, Result]]:
    """The results in a folder that belong to runs of this list, in its order."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("format") == FORMAT:
            found.append(Result.from_dict(data))
    return [(run, result) for run in runs() for case in (run.case(),) for result in found if result.case == case]


# ---- the command


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "gpu_tables.md")
    parser.add_argument("--aiter", type=Path, help="a checkout of ROCm/aiter")
    return parser.parse_args()


def _measure(run: Run, given: argparse.Namespace) -> Result | None:
    tokens = run.tokens if given.device == "cuda" else (1, 5)
    if given.tokens:
        tokens = tuple(map(int, given.tokens.split(",")))
    peers = given.peers.split(",") if given.peers else PEERS if given.device == "cuda" else ("layerfuse", "eager", COPY)
    try:
        return bench.run(
            run.op, widths=run.widths, tokens=tokens, peers=peers, aiter=given.aiter, vllm=given.vllm, device=given.device,
            rounds=given.rounds, quick=given.device == "cpu", **run.options,
        )  # fmt: skip
    except (bench.BenchError, bench.CannotMeasureError) as error:
        print(f"left out: {run}: {error}", flush=True)
        return None


def main() -> int:
    """Measure and write; 1 where one of our own results was wrong or failed."""
    given = _arguments()
    wanted = chosen(runs(), given)
    if given.list:
        print(*(f"{number:3} {run}, {len(run.tokens)} token counts" for number, run in wanted), sep="\n")
        return 0
    if given.summarise:
        text = brief(saved(given.out))
        (given.out / "gpu_tables.md").write_text(text)
        print(text)
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: this needs a GPU that torch can see")
        return 0
    begun, results, bad = time.perf_counter(), [], 0
    absent: dict[str, str] = {}
    print(*HEAD, sep=" | ", flush=True)
    for number, run in wanted:
        spent = time.perf_counter() - begun
        if spent > given.limit:
            print(f"stopped after {spent:.0f} s: go on with --skip {number}", flush=True)
            break
        result = _measure(run, given)
        if result is None:
            continue
        bench.write(result, given.out)
        results.append((run, result))
        for row in result.rows:
            print(*cells(run, row, result.ours), sep=" | ", flush=True)
            for one in row.measured:
                if one.verdict != "ok":
                    bad += one.peer.startswith(OURS)
                    print(f"    {one.peer} {one.verdict} at {row.tokens}: {one.message}", flush=True)
        absent.update({peer.name: peer.why_not or "" for peer in result.peers
                       if not peer.present and peer.name in OTHERS and (peer.why_not or "").partition(" ")[0] not in ("not", "left") and "no kernel" not in (peer.why_not or "")})  # fmt: skip
        (given.out / "gpu_tables.md").write_text(brief(results))
    print(*(f"{name}: {why}" for name, why in absent.items()), sep="\n")
    print(f"{time.perf_counter() - begun:.0f} s in all; written to {given.out}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
