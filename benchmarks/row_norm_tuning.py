"""Launch variants of the norm kernels beside what the rules in `backends/triton/tuning.py` choose, and beside a copy.

    python benchmarks/row_norm_tuning.py

Needs a GPU. CUDA graphs over rotating inputs, variants replayed in turns, beside a copy of the same bytes. Writes
`benchmarks/results/row_norm_tuning.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from environment import save
from rich.console import Console
from rich.progress import track

from layerfuse.bench.timing import Graph, time_graphs
from layerfuse.fusion.backends.triton import launch, launcher, tuning

ROPE = 64
ROWS = (1, 8, 64, 256, 512, 1024, 2048, 4096, 16384, 32768)
WIDTHS = ((1536, 512), (2304, 512), (768, 512), (1000, 384), (4096, 1024), (2048, 512), (1001, 333))
SINGLE = (128, 512, 1024, 2048, 2880, 4096, 5120, 7168, 12288, 16384)
FORMS = ("plain", "per token", "group 128", "add")
BEST = 5
"""How many variants are written down for each case, besides what the rules choose."""
CHOSEN = "chosen"


def variants(form: str, width: int, kv_width: int) -> Iterator[tuning.Launch]:
    """Threads, columns per thread at once, one or two programs per row, and several rows per program."""
    least, most = (128 if form == "group 128" else 1), 1 << (width - 1).bit_length()
    for warps, columns, split in product((1, 2, 4, 8, 16), (4, 8, 64), (False, True)):
        held = (width + (0 if split else kv_width)) / (32 * warps)
        if 4 <= held <= 100 and not (split and form == "add") and (columns < 64 or form == "group 128"):
            chunk, kv_chunk = max(min(32 * warps * columns, most), least), 32 * warps * 4
            yield tuning.Launch(chunk, 0, min(kv_chunk, most) if kv_width else 0, 1, split, warps)
            if form == "group 128" and columns == 64 and least <= width % (most // 2) < most // 2:
                tail = max(1 << (width % (most // 2) - 1).bit_length(), least)
                yield tuning.Launch(most // 2, tail, kv_chunk, 1, split, warps)
    if width + kv_width <= 2048 and form != "group 128":
        for rows in (2, 4, 8):
            chunk, kv_chunk = min(most, 256), min(1 << (kv_width - 1).bit_length(), 256) if kv_width else 0
            yield tuning.Launch(chunk, 0, kv_chunk, rows, False, rows)


def named(variant: tuning.Launch) -> str:
    """A variant in a few words."""
    tail = f"+{variant.tail}" if variant.tail else ""
    extras = [f"{variant.rows} rows"] * (variant.rows > 1) + ["split"] * variant.split + ["hold"] * variant.hold
    return ", ".join([f"{variant.warps} warps", f"{variant.chunk}{tail} columns", *extras])


def launched(variant: tuning.Launch | None, op: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """One call, launched as the rules say or as a variant says."""
    rules = tuning.launch_dual, tuning.launch_single
    launcher._compiled.clear()
    if variant is not None:
        tuning.launch_dual = tuning.launch_single = lambda *_: variant  # type: ignore[assignment]
    try:
        return op(*arguments)
    finally:
        tuning.launch_dual, tuning.launch_single = rules
        launcher._compiled.clear()


def copied(source: torch.Tensor, to: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The floor."""
    return (to.copy_(source),)


def calls(form: str, width: int, kv_width: int, rows: int, sets: int) -> tuple[Callable[..., Any], list[Any]]:
    """An op, and arguments for it."""
    weights = [torch.rand(n, device="cuda", dtype=torch.bfloat16) + 0.5 for n in (width, kv_width) if n]
    if form == "add":
        pairs = [torch.randn(2, rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        return launch.add_rms_norm, [(*pair, *weights, 1e-6, 0.0) for pair in pairs]
    downs = [torch.randn(rows, width + kv_width + ROPE, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    inputs = [(*down.split([width, kv_width, ROPE], -1)[:2], *weights, 1e-6, 1e-6) for down in downs]
    e4m3 = torch.float8_e4m3fn
    if form == "plain":
        return launch.mla_dual_rms_norm, list(inputs)
    if form == "per token":
        return launch.mla_dual_rms_norm_per_token_quant, [(*given, e4m3, False) for given in inputs]
    return launch.mla_dual_rms_norm_group_quant, [(*given, e4m3, 128, False, False) for given in inputs]


def bytes_moved(form: str, width: int, kv_width: int, rows: int) -> int:
    """What must be read and written."""
    if form == "add":
        return rows * width * 8
    scales = {"plain": 0, "per token": 4, "group 128": 4 * -(-width // 128)}[form]
    return rows * (2 * width + 4 * kv_width + (width + scales if scales else 2 * width))


def measured(form: str, width: int, kv_width: int, rows: int) -> dict[str, Any]:
    """All variants for one case."""
    moved = bytes_moved(form, width, kv_width, rows)
    sets = max(3, min(32, -(-250_000_000 // moved)))
    op, arguments = calls(form, width, kv_width, rows, sets)
    # A round number of bytes: other lengths take CUDA's copy half as long again.
    length = max(moved // 2 // 65536 * 65536 if rows >= 512 else moved // 2 // 64 * 64, 64)
    pairs = [torch.randint(0, 255, (2, length), device="cuda", dtype=torch.uint8) for _ in range(sets)]
    repeats = max(1, int(300 / (sets * max(1.3, moved / 3.5e6))))
    graphs = {"copy": Graph([partial(copied, *pair) for pair in pairs], repeats)}
    tried: dict[str, tuning.Launch | None] = {CHOSEN: None} | {
        named(variant): variant for variant in variants(form, width, kv_width) if not (variant.split and rows > 4096)
    }
    for name, variant in tried.items():
        graphs[name] = Graph([partial(launched, variant, op, given) for given in arguments], repeats)
    us = {name: timing.us for name, timing in time_graphs(graphs, 16).items()}
    kept = ["copy", CHOSEN, *[name for name in sorted(us, key=us.__getitem__) if name not in ("copy", CHOSEN)][:BEST]]
    return {
        "form": form, "widths": [width, kv_width] if kv_width else [width], "dtype": "bf16", "rows": rows,
        "bytes": moved, "us": {name: us[name] for name in kept},
    }  # fmt: skip


def main() -> None:
    """Measure every case, and write it down."""
    console = Console(width=150)
    if not torch.cuda.is_available():
        console.print("nothing measured: this needs a GPU that torch can see")
        return
    cases = [(form, *widths) for form, widths in product(FORMS[:3], WIDTHS)] + [("add", width, 0) for width in SINGLE]
    results = [measured(*case, rows) for case, rows in track(list(product(cases, ROWS)), description="variants")]
    for result in results:
        us = result["us"]
        first = [f"{name} {time / us['copy']:.3f}" for name, time in us.items() if name != "copy"][:3]
        widths = "+".join(map(str, result["widths"]))
        console.print(
            f"{result['form']:10} {widths:10} {result['rows']:6} copy {us['copy']:7.2f} us; {'; '.join(first)}"
        )
    console.print(f"written to {save('row_norm_tuning', {'gpu': torch.cuda.get_device_name(), 'cases': results})}")


if __name__ == "__main__":
    main()
