"""Every launch variant of the dual-norm kernel over numbers of rows: where `backends/triton/tuning.py` has its table from.

    python benchmarks/dual_norm_tuning.py

Needs a GPU. CUDA graphs over rotating inputs, variants replayed in turns, beside a copy of the same bytes. Writes
`benchmarks/results/dual_norm_tuning.json`.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from environment import save
from rich.console import Console
from rich.progress import track

from layerfuse.bench.timing import Graph, time_graphs

Q, KV, ROPE = 1536, 512, 64
ROWS = (1, 8, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192, 16384, 65536)
FORMS = {"plain": (0, 0, 1), "per token": (1, 0, 1), "group 128": (2, 128, Q // 128)}
"""Name -> the kernel's QUANT and GROUP, and the scales of a row."""
VARIANTS = [
    {"split": split, "chunk": chunk, "warps": warps, "early": early}
    for split, (chunk, warps), early in product(
        (True, False), ((512, 1), (512, 2), (512, 4), (1024, 4), (2048, 4), (2048, 8)), (True, False)
    )
]


def launched(form: str, variant: dict[str, Any], weights: list[torch.Tensor], down: torch.Tensor) -> tuple[Any, ...]:
    """One launch, its results allocated as the op does."""
    from layerfuse.fusion.backends.triton.kernels import dual_norm

    quant, group, groups = FORMS[form]
    q, kv, _ = down.split([Q, KV, ROPE], -1)
    rows = down.shape[0]
    out = (
        torch.empty(rows, Q, device="cuda", dtype=torch.float8_e4m3fn if quant else down.dtype),
        torch.empty(rows, groups, device="cuda"),
        torch.empty(rows, KV, device="cuda", dtype=down.dtype),
    )
    options = {"launch_pdl": True} if variant["early"] else {}
    dual_norm[(rows * 2 if variant["split"] else rows,)](
        q, kv, *weights, *out, down.stride(0), down.stride(0), groups, 1, Q, KV, 1e-6, 1e-6, quant, group, 448.0, False,
        variant["chunk"], 512, variant["split"], variant["early"], num_warps=variant["warps"], **options,
    )  # fmt: skip
    return out


def copied(source: torch.Tensor, to: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The floor."""
    return (to.copy_(source),)


def measured(form: str, rows: int) -> dict[str, Any]:
    """All variants for one form and number of rows."""
    quant, _, groups = FORMS[form]
    moved = rows * ((Q + KV) * 2 + KV * 2 + (Q + groups * 4 if quant else Q * 2))
    sets = max(6, min(40, int(2e10 / moved / len(VARIANTS))))
    weights = [torch.rand(width, device="cuda", dtype=torch.bfloat16) + 0.5 for width in (Q, KV)]
    inputs = [torch.randn(rows, Q + KV + ROPE, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    # A round number of bytes: other lengths take CUDA's copy half as long again.
    length = moved // 2 // 64 * 64 if rows < 512 else moved // 2 // 65536 * 65536
    pairs = [torch.randint(0, 255, (2, length), device="cuda", dtype=torch.uint8) for _ in range(sets)]
    repeat = max(1, int(400 / (sets * (1.2 + rows * 0.002))))
    graphs = {"copy": Graph([partial(copied, *pair) for pair in pairs], repeat)}
    for number, variant in enumerate(VARIANTS):
        graphs[str(number)] = Graph([partial(launched, form, variant, weights, down) for down in inputs], repeat)
    times = {name: timing.us for name, timing in time_graphs(graphs, 20).items()}
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
