"""Every launch variant of the dual-norm kernel over numbers of rows: where `backends/triton/tuning.py` has its table from.

    python benchmarks/dual_norm_tuning.py

Needs a GPU. CUDA graphs over rotating inputs, variants replayed in turns, beside a copy of the same bytes. Writes
`benchmarks/results/dual_norm_tuning.json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from environment import save
from rich.console import Console
from rich.progress import track

Q, KV, ROPE = 1536, 512, 64
ROWS = (1, 8, 64, 256, 1024, 2048, 4096, 8192, 16384, 65536)
FORMS = {"plain": (0, 0, 1), "per token": (1, 0, 1), "group 128": (2, 128, Q // 128)}
"""Name -> the kernel's QUANT and GROUP, and the scales of a row."""
VARIANTS = [
    {"split": split, "chunk": chunk, "warps": warps, "early": early}
    for split, (chunk, warps), early in product(
        (True, False), ((512, 1), (512, 2), (512, 4), (512, 8), (1024, 4), (2048, 4), (2048, 8)), (False, True)
    )
]


def captured(calls: list[Callable[[], Any]], repeat: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph that makes all calls `repeat` times, and how many that are."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    return graph, len(calls) * repeat


def in_turns(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]]) -> dict[str, float]:
    """Median microseconds per call, over 30 replays of each graph, in ten rounds."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(10):
        for name, (graph, calls) in graphs.items():
            graph.replay()
            for _ in range(3):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                times[name].append(start.elapsed_time(stop) * 1e3 / calls)
    return {name: statistics.median(several) for name, several in times.items()}


def measured(form: str, rows: int) -> dict[str, Any]:
    """All variants for one form and number of rows."""
    from layerfuse.fusion.backends.triton.kernels import dual_norm

    quant, group, groups = FORMS[form]
    dtype = torch.bfloat16
    sets = max(4, min(20, int(2e10 / (rows * 2112 * 6))))
    weights = [torch.rand(width, device="cuda", dtype=dtype) + 0.5 for width in (Q, KV)]
    inputs = [torch.randn(rows, Q + KV + ROPE, device="cuda", dtype=dtype) for _ in range(sets)]
    outputs = [
        (
            torch.empty(rows, Q, device="cuda", dtype=torch.float8_e4m3fn if quant else dtype),
            torch.empty(rows, groups, device="cuda"),
            torch.empty(rows, KV, device="cuda", dtype=dtype),
        )
        for _ in range(sets)
    ]
    moved = rows * ((Q + KV) * 2 + KV * 2 + (Q + groups * 4 if quant else Q * 2))
    copies = [torch.randint(0, 255, (2, moved // 2), device="cuda", dtype=torch.uint8) for _ in range(sets)]
    repeat = max(1, int(300 / (sets * (1.2 + rows * 0.002))))

    def call(down: torch.Tensor, out: tuple[torch.Tensor, ...], v: dict[str, Any]) -> None:
        q, kv, _ = down.split([Q, KV, ROPE], -1)
        options = {"launch_pdl": True} if v["early"] else {}
        dual_norm[(rows * 2 if v["split"] else rows,)](
            q, kv, *weights, *out, down.stride(0), down.stride(0), groups, 1, Q, KV, 1e-6, 1e-6, quant, group, 448.0,
            False, v["chunk"], 512, v["split"], v["early"], num_warps=v["warps"], **options,
        )  # fmt: skip

    graphs = {"copy": captured([lambda pair=pair: pair[0].copy_(pair[1]) for pair in copies], repeat)}
    for number, variant in enumerate(VARIANTS):
        calls = [lambda i=i, v=variant: call(inputs[i], outputs[i], v) for i in range(sets)]
        graphs[str(number)] = captured(calls, repeat)
    times = in_turns(graphs)
    copy = times.pop("copy")
    ranked = sorted(times, key=times.__getitem__)
    return {
        "form": form, "rows": rows, "copy_us": copy, "bytes": moved, "input_sets": sets,
        "variants": [VARIANTS[int(i)] | {"us": times[i], "to_copy": times[i] / copy} for i in ranked],
    }  # fmt: skip


def main() -> None:
    """Measure every form and number of rows, and write it down."""
    console = Console(width=150)
    if not torch.cuda.is_available():
        console.print("nothing measured: this needs a GPU that torch can see")
        return
    cases = list(product(FORMS, ROWS))
    results = [measured(*case) for case in track(cases, description="variants")]
    for result in results:
        best = [next(v for v in result["variants"] if v["early"] == early) for early in (True, False)]
        console.print(
            f"{result['form']:10} {result['rows']:6} copy {result['copy_us']:7.2f} us; best to copy: "
            + "; ".join(
                f"{'overlapping' if v['early'] else 'alone'} {v['to_copy']:.3f} "
                f"(split {v['split']}, chunk {v['chunk']}, warps {v['warps']})"
                for v in best
            )
        )
    console.print(f"written to {save('dual_norm_tuning', {'gpu': torch.cuda.get_device_name(), 'cases': results})}")


if __name__ == "__main__":
    main()
