"""Launch variants of the norm family's kernels beside what the rules in `backends/triton/tuning.py` choose, and beside a copy.

    python benchmarks/row_norm_tuning.py [PART ...]

Needs a GPU. CUDA graphs over rotating inputs, variants replayed in turns, beside a copy of the same bytes. Writes
`benchmarks/results/row_norm_tuning.json`; with parts of ops' names it measures those only, and writes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from environment import save
from rich.console import Console
from rich.progress import track

from layerfuse import registry
from layerfuse.bench import Case
from layerfuse.bench.cases import step_of
from layerfuse.bench.choosing import Options, make_case
from layerfuse.bench.inputs import Work, make, sets_for
from layerfuse.bench.plain_torch import copied_bytes
from layerfuse.bench.timing import Graph, repeats_for, time_graphs
from layerfuse.fusion.backends.triton import family, launcher, tuning
from layerfuse.fusion.backends.triton.tuning import Launch, power_of_two
from layerfuse.fusion.steps import GatedNorm, Quant, SiluMul

TOKENS = (1, 64, 256, 512, 1024, 2048, 4096, 16384)
ROPE = 64
LATENTS = ((1536, 512), (2304, 512), (768, 512), (1000, 384), (4096, 1024), (2048, 512), (1001, 333))
SINGLE = (128, 512, 1024, 2048, 2880, 4096, 5120, 7168, 12288, 16384)
QUANTISED = (4096, 5120, 7168)
PRODUCTS = (2048, 7168, 14336)
HEAD, HEADS = 128, (8, 32)
PER = ("static", "per_token", "group")
BEST = 5
"""How many variants are written down for each case, besides what the rules choose."""
CHOSEN = "chosen"
RULES: dict[str, Callable[..., Launch]] = {
    name: getattr(tuning, name) for name in ("launch_row", "launch_dual", "launch_gated", "launch_product")
}


def cases() -> Iterator[Case]:
    """What is measured: every kind of kernel, plain and quantised."""

    def case(name: str, *widths: int, **options: Any) -> Case:
        return make_case(name, registry=registry.default, widths=widths, options=Options(**options))

    for form, widths in product(("", "_per_token_quant", "_group_quant"), LATENTS):
        yield case(f"mla_dual_rms_norm{form}", *widths, ROPE)
    yield from (case("add_rms_norm", width) for width in SINGLE)
    yield case("add_rms_norm_pad", 2880)
    for adds, per, width in product(("", "add_"), PER, QUANTISED):
        yield case(f"{adds}rms_norm_{per}_quant", width)
    for per, width in product(PER, PRODUCTS):
        yield case(f"silu_mul_{per}_quant", width)
    for form, heads in product(("", *(f"_{per}_quant" for per in PER)), HEADS):
        yield case(f"gated_rms_norm{form}", HEAD, heads=heads)


# ---- variants --------------------------------------------------------------------------------------------------------


def variants(case: Case) -> Iterator[Launch]:
    """Launches that the kernel of a case could have. Each takes the rules' `hold`."""
    quant, group = step_of(case.form, Quant), case.group_size or 0
    width, *others = case.widths.values()
    if step_of(case.form, GatedNorm) is not None:
        yield from _gated(width, case.heads or 1, quant is not None and quant.per == "token", group)
    elif step_of(case.form, SiluMul) is not None:
        yield from _products(width, quant is not None and quant.per == "token", group or family.ELEMENTS)
    elif others:
        yield from _duals(width, others[0], group)
    else:
        yield from _rows(width, group)


def _rows(width: int, group: int) -> Iterator[Launch]:
    """Threads and columns at once; groups in one chunk, in halves, quarters or eighths; several rows per program."""
    full = power_of_two(width)
    for warps in (1, 2, 4, 8, 16, 32):
        if 3.5 <= width / (32 * warps) <= 72:
            sizes = [full, full // 2, full // 4, full // 8] if group else [32 * warps * 4, 32 * warps * 8]
            for chunk in dict.fromkeys(max(min(size, full), group) for size in sizes):
                yield Launch(chunk, _tail(width, chunk, group) if group else 0, 0, 1, False, warps)
    if width <= 1024 and not group:
        yield from (Launch(min(full, 256), 0, 0, rows, False, rows) for rows in (2, 4, 8))


def _duals(width: int, kv_width: int, group: int) -> Iterator[Launch]:
    """The same of the query, and one or two programs per row."""
    full = power_of_two(width)
    for warps, columns, split in product((1, 2, 4, 8, 16), (4, 8, 64), (False, True)):
        held = (width + (0 if split else kv_width)) / (32 * warps)
        if 4 <= held <= 100 and (columns < 64 or group):
            chunk, kv_chunk = max(min(32 * warps * columns, full), group), min(32 * warps * 4, full)
            yield Launch(chunk, 0, kv_chunk, 1, split, warps)
            tail = _tail(width, full // 2, group) if group and columns == 64 else 0
            if tail:
                yield Launch(full // 2, tail, kv_chunk, 1, split, warps)
    if width + kv_width <= 2048 and not group:
        chunk, kv_chunk = min(full, 256), min(power_of_two(kv_width), 256)
        yield from (Launch(chunk, 0, kv_chunk, rows, False, rows) for rows in (2, 4, 8))


def _tail(width: int, chunk: int, group: int) -> int:
    """Columns of the last chunk where fewer are enough, else 0."""
    rest = width % chunk if width > chunk else 0
    tail = max(power_of_two(rest), group) if rest else 0
    return tail if tail < chunk else 0


def _gated(width: int, heads: int, per_token: bool, group: int) -> Iterator[Launch]:
    """Heads per program and threads. A scale per token takes all heads, groups within a head one."""
    block = power_of_two(width)
    several = (power_of_two(heads),) if per_token else (1,) if 0 < group < block else (1, 4, 8, 16, 32, 64)
    for rows, warps in product(several, (1, 2, 4, 8, 16)):
        if 2 <= rows * block / (32 * warps) <= 64:
            yield Launch(block, 0, 0, rows, False, warps)


def _products(width: int, per_token: bool, group: int) -> Iterator[Launch]:
    """A whole row per program, so many columns at once; or so many groups."""
    if per_token:
        for warps, columns in product((4, 8, 16, 32), (4, 8, 16)):
            if 3 <= width / (32 * warps) <= 80:
                yield Launch(min(power_of_two(width), 32 * warps * columns), 0, 0, 1, False, warps)
        return
    for columns, warps in product((512, 1024, 2048, 4096), (1, 2, 4, 8, 16)):
        if 4 <= columns / (32 * warps) <= 32:
            yield Launch(group, 0, 0, max(1, columns // group), False, warps)


def named(variant: Launch) -> str:
    """A variant in a few words."""
    tail = f"+{variant.tail}" if variant.tail else ""
    extras = [f"{variant.rows} rows"] * (variant.rows > 1) + ["split"] * variant.split
    return ", ".join([f"{variant.warps} warps", f"{variant.chunk}{tail} columns", *extras])


@contextmanager
def forced(variant: Launch | None) -> Iterator[None]:
    """Launch as a variant says, or as the rules say."""
    for name, rule in RULES.items():
        setattr(tuning, name, rule if variant is None else partial(_instead, rule, variant))
    launcher._compiled.clear()
    try:
        yield
    finally:
        for name, rule in RULES.items():
            setattr(tuning, name, rule)
        launcher._compiled.clear()


def _instead(rule: Callable[..., Launch], variant: Launch, *given: Any) -> Launch:
    return variant._replace(hold=rule(*given).hold)


# ---- measuring -------------------------------------------------------------------------------------------------------


def compile_all(case: Case) -> None:
    """Fill Triton's cache with the variants of a case, in a process of its own."""
    # A kernel with many rows is another: what it reads is marked to stay.
    for tokens in (64, max(TOKENS)):
        work = make(case, tokens, torch.device("cuda"), 1)
        for variant in (None, *variants(case)):
            with forced(variant):
                _compiles(case, work)


def _compiles(case: Case, work: Work) -> bool:
    """One call, and whether there was a kernel for it."""
    try:
        family.function_of(case.form.op)(*work.arguments(work.sets[0]))
    except triton.TritonError:  # more shared memory or registers than there are
        return False
    return True


def copied(source: torch.Tensor, to: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The floor."""
    return (to.copy_(source),)


def measured(case: Case, tokens: int) -> dict[str, Any]:
    """All variants for one case."""
    device, moved = torch.device("cuda"), case.bytes_moved(tokens)
    tried: dict[str, Launch | None] = {CHOSEN: None} | {
        named(variant): variant for variant in variants(case) if not (variant.split and tokens > 4096)
    }
    sets = sets_for(case, tokens, device, len(tried) + 1)
    work, repeats = make(case, tokens, device, sets), repeats_for(sets, moved)
    pairs = [
        torch.randint(1, 256, (2, copied_bytes(case, tokens)), device=device, dtype=torch.uint8) for _ in range(sets)
    ]
    graphs = {"copy": Graph([partial(copied, *pair) for pair in pairs], repeats)}
    function = family.function_of(case.form.op)
    for name, variant in tried.items():
        with forced(variant):
            if _compiles(case, work):
                graphs[name] = Graph([partial(function, *work.arguments(rows)) for rows in work.sets], repeats)
    for graph in graphs.values():
        graph.start()
    us = {name: timing.us for name, timing in time_graphs(graphs, 16).items()}
    kept = ["copy", CHOSEN, *[name for name in sorted(us, key=us.__getitem__) if name not in ("copy", CHOSEN)][:BEST]]
    return {
        "op": case.op, "widths": [*case.widths.values()], "heads": case.heads, "dtype": case.dtype, "rows": tokens,
        "bytes": moved, "us": {name: us[name] for name in kept},
    }  # fmt: skip


def main(parts: Sequence[str]) -> None:
    """Measure every case, and write it down."""
    console = Console(width=150)
    if not torch.cuda.is_available():
        console.print("nothing measured: this needs a GPU that torch can see")
        return
    several = [case for case in cases() if not parts or any(part in case.op for part in parts)]
    with multiprocessing.get_context("spawn").Pool(min(len(several), os.cpu_count() or 1)) as pool:
        for _ in track(pool.imap_unordered(compile_all, several), description="compiling", total=len(several)):
            pass
    results = []
    for case, tokens in track(list(product(several, TOKENS)), description="variants"):
        result = measured(case, tokens)
        us = result["us"]
        first = [f"{name} {time / us['copy']:.3f}" for name, time in us.items() if name != "copy"][:3]
        widths = "+".join(map(str, result["widths"])) + (f"x{case.heads}" if case.heads else "")
        console.print(f"{case.op:34} {widths:10} {tokens:6} copy {us['copy']:7.2f} us; {'; '.join(first)}")
        results.append(result)
    if not parts:
        console.print(f"written to {save('row_norm_tuning', {'gpu': torch.cuda.get_device_name(), 'cases': results})}")


if __name__ == "__main__":
    main(sys.argv[1:])
