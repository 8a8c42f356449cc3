"""Every table of single ops in `benchmarks/results`, in one run on one GPU: about five minutes on an H200.

    python benchmarks/gpu_tables.py --aiter FOLDER --out FOLDER --limit 300

Beside the tables of each run it writes `gpu_tables.md`, all runs in brief, and `untuned_widths.md`, ours at widths that
nobody tuned for. What matters most comes first; after `--limit` seconds no further run begins, and those left are named.
Inductor's max-autotune takes minutes by itself and takes part only with `--max-autotune`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from layerfuse import bench
from layerfuse.fusion import FUSIONS

TOKENS = (1, 8, 64, 256, 1024, 4096, 16384, 65536)
STREAM_TOKENS = TOKENS[:-1]
"""Rows of the residual stream are wide: 65536 of them take gigabytes for each peer."""
UNTUNED_TOKENS = (1, 64, 512, 4096, 32768)

PEERS = ("layerfuse", "eager", "inductor", "inductor combo_kernels", "aiter triton", "liger", "fla", "quack", "flashinfer",
         "vllm", "copy")  # fmt: skip
AUTOTUNE = "inductor max-autotune"
COMPILERS = ("inductor", "inductor combo_kernels")


@frozen
class Run:
    """One table."""

    fusion: str
    model: str = "deepseek-v3"
    dtype: str = "bf16"
    tokens: tuple[int, ...] = TOKENS
    widths: tuple[int, ...] | None = None

    def __str__(self) -> str:
        what = self.model if self.widths is None else ",".join(map(str, self.widths))
        return f"{self.fusion}, {what}, {self.dtype}"


NAMED = (
    Run("mla_dual_rms_norm"),
    Run("add_rms_norm", tokens=STREAM_TOKENS),
    Run("mla_dual_rms_norm_group_quant"),
    Run("mla_dual_rms_norm", dtype="bf16", tokens=UNTUNED_TOKENS, widths=(1000, 384, 64)),
    Run("mla_dual_rms_norm_group_quant", dtype="fp16", tokens=UNTUNED_TOKENS, widths=(4096, 1024, 64)),
    Run("mla_dual_rms_norm_per_token_quant"),
    Run("add_rms_norm", "gpt-oss-20b", tokens=STREAM_TOKENS),
    Run("mla_dual_rms_norm_group_quant", "kimi-k3", "fp16"),
    Run("mla_dual_rms_norm", "glm-4.7-flash", "fp16"),
    Run("mla_dual_rms_norm", "kimi-k3", "fp16"),
)


def runs() -> Iterator[Run]:
    """The named ones, then DeepSeek-V3's widths for whatever else is in the catalog."""
    yield from (run for run in NAMED if run.fusion in FUSIONS)
    named = {run.fusion for run in NAMED}
    yield from (Run(name, tokens=STREAM_TOKENS) for name in FUSIONS if name not in named)


def brief(results: list[tuple[Run, bench.Result]], title: str) -> str:
    """Microseconds of copy and ours, and the others as multiples of ours; one block of rows for each run."""
    head = ("case", "tokens", "copy, us", "ours, us", "ours / copy", "Inductor / ours", "combo kernels / ours",
            "better of the two / ours", "AITER Triton / ours")  # fmt: skip
    lines = [f"# {title}", "", _line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for run, result in results:
        for row in result.rows:
            copy, ours = row.us("copy"), None if result.ours is None else row.us(result.ours)
            plain, combo = (row.us(name) for name in COMPILERS)
            better = min((us for us in (plain, combo) if us is not None), default=None)
            ratios = [_ratio(us, ours) for us in (plain, combo, better, row.us("aiter triton"))]
            lines.append(_line([str(run), str(row.tokens), _us(copy), _us(ours), _ratio(ours, copy), *ratios]))
    first = results[0][1]
    lines += [
        "",
        f"{first.environment['device']}, torch {first.environment['torch']}, {first.date[:10]}. {first.method}.",
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.2f}"


def _ratio(above: float | None, below: float | None) -> str:
    return "" if above is None or below is None else f"{above / below:.2f}"


def main() -> int:
    """Measure all, write all; 1 where a result was wrong or a peer failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiter", type=Path, help="a checkout of ROCm/aiter")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--limit", type=float, default=360.0, help="seconds after which no further run begins")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out the first runs: to go on where a limit ended one"
    )
    parser.add_argument("--max-autotune", action="store_true")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script: tiny, and no tables"
    )
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: this needs a GPU that torch can see")
        return 0
    peers = (*PEERS, AUTOTUNE) if given.max_autotune else PEERS
    begun, results, wrong = time.perf_counter(), [], 0
    for run in list(runs())[given.skip :]:
        spent = time.perf_counter() - begun
        if spent > given.limit:
            print(f"left out after {spent:.0f} s: {run}", flush=True)
            continue
        tokens = run.tokens if given.device == "cuda" else (1, 5)
        try:
            result = bench.run(
                run.fusion, model=run.model, widths=run.widths, dtype=run.dtype, tokens=tokens, peers=peers,
                aiter=given.aiter, device=given.device, quick=given.device == "cpu",
            )  # fmt: skip
        except (
            bench.BenchError,
            bench.CannotMeasureError,
        ) as error:  # a fusion of another package may have no site in the model
            print(f"left out: {run}: {error}", flush=True)
            continue
        bench.write(result, given.out)
        results.append((run, result))
        bad = [one for row in result.rows for one in row.measured if one.verdict != "ok"]
        wrong += len(bad)
        print(
            f"{result.seconds:.0f} s: {run}", *(f"{one.peer} {one.verdict}: {one.message}" for one in bad), sep="\n  "
        )
        print(
            bench.markdown(result).split("## Microseconds of the host")[0].split("replays are checked")[-1], flush=True
        )
        untuned = [each for each in results if each[0].widths is not None]
        (given.out / "gpu_tables.md").write_text(brief(results, "All tables in brief"))
        if untuned:
            (given.out / "untuned_widths.md").write_text(brief(untuned, "Widths that nobody tuned for"))
    print(f"{time.perf_counter() - begun:.0f} s in all; written to {given.out}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
