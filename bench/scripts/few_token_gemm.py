"""Products with few tokens, where a GEMM waits for its weights: layerfuse's linears beside what engines call.

    python bench/scripts/few_token_gemm.py --table --out FILE

In fp8 with blocks of 128 x 128 these are `group_quant_linear` and `block_scaled_linear`, with --bfloat16 `few_token_linear`, with --channels
`scaled_linear` of fp8 with a scale per token and per column of the product. `workloads.toml` has the shapes. Each entrant multiplies with so many
weights in turn, in one CUDA graph, that none is in the L2 cache. With "in front" the activations come in bfloat16 and the entrant's engine
quantises them first.
Where launches overlap, the kernel in front is the same product with another weight, which lets the next one start.
With "behind a norm" a norm stands in front of each product, which quantises where that is one launch, and its own time is taken off.

--table compiles everything at once in processes of their own, then times the five linears of DeepSeek-V3's rank of eight in fp8 and in bfloat16, and
adds up their medians: beside what the weights take at the data sheet's speed of the memory, and beside the fastest peer of each shape.
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import few_token_peers
import torch
from few_token_peers import (
    BEYOND,
    BLOCK,
    CUBLAS,
    CUTLASS,
    FLASHINFER_BELOW,
    FP8,
    INSTALLED,
    OURS,
    SCALED_MM,
    WEIGHTS_ALONE,
)
from torch import Tensor
from workloads import SAID

from layerfuse.bench.files import save
from layerfuse.bench.rank_group import said
from layerfuse.bench.timing import Graph, time_graphs
from layerfuse.fusion import ops
from layerfuse.fusion.ops.linear import MOST
from layerfuse.fusion.ops.quantisation import quantise

SHAPES = [(columns, depth) for columns, depth in SAID["few_token"]["shapes"]]
PLACES = {"blocks": "0,1,2,3,4", "bfloat16": "0,1,2,3,4", "channels": "9,10,11,12"}
"""Of the shapes that are timed by default."""
TOKENS = (1, 8, 16, 64)
LARGEST = 448.0
FEWEST_WEIGHTS, MOST_CACHED = 24, 200_000_000
MOST_HELD = 3_000_000_000
"""Bytes of all weights of a shape."""
DATA_SHEET = {"H100": 3.35e6, "H200": 4.8e6}
"""Part of a GPU's name -> bytes that its memory gives in a microsecond, of NVIDIA's data sheets (SXM)."""
DEVICE = "cuda"
MOST_ERROR = 0.02
"""Of all results together, relative to float64. Rounding the result to bfloat16 makes 0.0017."""
IN_FRONT, BEHIND = ", quantisation in front", ", behind a norm"
"""Behind an entrant's name."""
NORM = "a norm alone"

Calls = list[Callable[[], Tensor]]
Weight = tuple[Tensor, ...]
"""Values (columns, depth), and scales where they are quantised: (blocks of columns, blocks of depth), or (columns, 1)."""


def is_ours(name: str) -> bool:
    """Whether an entrant is layerfuse's."""
    return name.startswith(OURS)


def entrants(
    kind: str, names: Sequence[str], x: Tensor, weights: Sequence[Weight]
) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Name, and what makes the calls. x: (tokens, depth) in bfloat16."""
    ones, behind = torch.ones_like(x[0]), False
    for name in names:
        peer, calls = few_token_peers.made(kind, name), partial(_calls, kind, name, len(x), weights)
        if isinstance(peer, Exception):
            yield name, partial(calls, tuple)  # which says why
            continue
        if peer.few and peer.beyond is None and len(x) > MOST:
            continue
        if peer.quantise is None:
            yield name, partial(calls, lambda: (x,))
        else:
            quantise = partial(peer.quantise, x)
            yield name, partial(calls, cache(quantise))
            yield f"{name}{IN_FRONT}", partial(calls, quantise)
        if peer.behind_norm is not None:
            behind = True
            yield f"{name}{BEHIND}", partial(calls, partial(peer.behind_norm, x, ones))
    if behind:
        yield NORM, lambda: [partial(few_token_peers.vllm_norm, x, ones)] * len(weights)


def _calls(
    kind: str, name: str, tokens: int, weights: Sequence[Weight], given: Callable[[], Sequence[Tensor]]
) -> Calls:
    """One for each weight. `given`: what is multiplied, at each call."""
    peer = few_token_peers.peer(kind, name)
    if peer.beyond is not None and tokens > MOST:
        peer = few_token_peers.peer(kind, peer.beyond(tokens))
    loaded = [peer.load(*weight) for weight in weights]
    return [lambda weight=weight: peer.multiply(*given(), *weight) for weight in loaded]


def dequantised(values: Tensor, scales: Tensor, rows_per_scale: int) -> Tensor:
    """In float32; `rows_per_scale`: 1 for activations, 128 for weights."""
    wide = scales.repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values.float() * wide.repeat_interleave(rows_per_scale, 0)[: values.shape[0]]


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, depth) to e4m3 and float32 scales, column by column."""
    return quantise(x.float(), FP8, BLOCK, column_major=True, use_ue8m0=False)


def drawn(kind: str, columns: int, depth: int, device: str) -> Weight:
    """A random weight, with a scale per column of the product or in blocks of 128 x 128, of which the last may be cut off, if it is quantised."""
    wide = torch.randn(columns, depth, device=device) * depth**-0.5
    if kind == "bfloat16":
        return (wide.bfloat16(),)
    if kind == "channels":
        scales = wide.abs().amax(1, keepdim=True) / LARGEST
        return (wide / scales).to(FP8), scales
    padded = torch.nn.functional.pad(wide, (0, 0, 0, -columns % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-10) / LARGEST
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:columns]
    return values.to(FP8), scales


def right(kind: str, x: Tensor, weights: Sequence[Weight], *, as_it_is: bool = False) -> Tensor:
    """(weights, tokens, columns) in float64, of activations that are quantised first where the weights are, unless they are taken as they are."""
    rows = x.double()
    if kind == "channels":
        values, scales = ops.quantise_per_token(x)
        rows = values.double() * scales
    elif kind == "blocks" and not as_it_is:
        rows = dequantised(*quantised(x), 1).double()
    wide = {
        "bfloat16": lambda weight: weight.double(),
        "channels": lambda values, scales: values.double() * scales,
        "blocks": lambda values, scales: dequantised(values, scales, BLOCK).double(),
    }[kind]
    return torch.stack([rows @ wide(*weight).t() for weight in weights])


def relative_error(got: Tensor, right: Tensor) -> float:
    """Of all of them together; not a number counts as infinite."""
    error = float((got.double() - right).norm() / right.norm())
    return math.inf if math.isnan(error) else error


class Row(NamedTuple):
    """One entrant with so many tokens: the median and quartiles in microseconds, or why there are none."""

    us: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    from_first: float | None = None
    "The largest difference of a result from CUTLASS's or cuBLAS's."
    problem: str = ""


def compared(
    several: Iterable[tuple[str, Callable[[], Calls]]], right: Tensor, rounds: int, unquantised: Tensor | None = None
) -> dict[str, Row]:
    """By entrant. Results are compared after all replays, and with those of the first. `unquantised`: what is right of `WEIGHTS_ALONE`."""
    graphs, first, rows = {}, {}, dict[str, Row]()
    held: list[Calls] = []  # a graph does not hold what its calls read
    for name, made in several:
        try:
            held.append(made())
            graphs[name] = Graph(held[-1], 1)  # type: ignore[arg-type]
            graphs[name].start()
            first[name] = torch.stack(graphs[name].results)  # type: ignore[arg-type]
        except Exception as problem:  # whatever is not installed here, or does not run
            graphs.pop(name, None)
            rows[name] = Row(problem=said(problem))
    reference = next((first[name] for name in (CUTLASS, CUBLAS, SCALED_MM) if name in first), None)
    for name, timing in time_graphs(graphs, rounds).items():
        if name == NORM:
            rows[name] = Row(timing.us, timing.low, timing.high)
            continue
        got = torch.stack(graphs[name].results)  # type: ignore[arg-type]
        error = relative_error(got, unquantised if name == WEIGHTS_ALONE and unquantised is not None else right)
        problem = f"off by {error:.3g}" if error > MOST_ERROR else ""
        if is_ours(name) and not torch.equal(got, first[name]):
            problem = "replays differ"
        away = None if reference is None else float((got.float() - reference.float()).abs().max())
        error = error if math.isfinite(error) else None
        rows[name] = Row(timing.us, timing.low, timing.high, error, away, problem)
    alone = rows.get(NORM, Row()).us
    for name, row in rows.items():
        if name.endswith(BEHIND) and row.us is not None and row.low is not None and row.high is not None:
            if alone is None:
                rows[name] = Row(problem="its norm was not timed")
            else:
                rows[name] = row._replace(us=row.us - alone, low=row.low - alone, high=row.high - alone)
    return rows


def copy_speed() -> float:
    """Bytes per microsecond, read and written."""
    source, copy = torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda")
    graph = Graph([lambda: copy.copy_(source)], 4)  # type: ignore[arg-type,return-value]
    return 2 * source.numel() / time_graphs({"copy": graph}, rounds=9)["copy"].us


def lines(rows: dict[int, dict[str, Row]], floors: dict[int, float]) -> Iterator[str]:
    """A shape's table: an entrant per line, a column per number of tokens, then what there is to say."""
    yield f"{'floor':40}" + "".join(f"{floor:8.1f}" for floor in floors.values())
    for name in dict.fromkeys(name for several in rows.values() for name in several):
        each = [several.get(name) for several in rows.values()]  # some enter for few tokens alone
        times = [row.us if row and row.us and not row.problem else math.nan for row in each]
        notes = dict.fromkeys(row.problem for row in each if row and row.problem)
        yield f"{name:40}" + "".join(f"{us:8.1f}" for us in times) + "  " + " | ".join(notes)


def kinds_of(given: argparse.Namespace) -> tuple[str, ...]:
    """What is multiplied by."""
    if given.table:
        return "blocks", "bfloat16"
    return ("bfloat16" if given.bfloat16 else "channels" if given.channels else "blocks",)


def shapes_of(given: argparse.Namespace, kind: str) -> list[tuple[int, int]]:
    """Columns and depth of those that are asked for."""
    return [SHAPES[int(each)] for each in (given.shapes or PLACES[kind]).split(",")]


def as_a_norm_gives(tokens: int, depth: int) -> Tensor:
    """(tokens, depth) in bfloat16, whose rows have a mean square of one."""
    x = torch.randn(tokens, depth, device=DEVICE)
    return (x * x.square().mean(1, keepdim=True).rsqrt()).bfloat16()


def compiled(given: argparse.Namespace) -> int:
    """Call everybody once, each number of tokens by itself: what is compiled for that is then on the disk."""
    for kind in kinds_of(given):
        for columns, depth in shapes_of(given, kind):
            x, weights = as_a_norm_gives(max(given.tokens), depth), [drawn(kind, columns, depth, DEVICE)]
            for each in given.tokens:
                for _, made in entrants(kind, few_token_peers.names_of(kind, given.peers), x[:each], weights):
                    with suppress(Exception):  # it is said where it is timed
                        for call in made():
                            call()
            torch.cuda.synchronize()
    return 0


def compile_at_once(given: argparse.Namespace) -> None:
    """`compiled` in a process for each shape."""
    tokens = ",".join(map(str, given.tokens))
    asked = [sys.executable, __file__, "--table", "--compile", "--tokens", tokens, "--peers", given.peers]
    places = (given.shapes or PLACES["blocks"]).split(",")
    for each in [subprocess.Popen([*asked, "--shapes", place]) for place in places]:
        each.wait()


Shapes = dict[str, dict[int, dict[str, Row]]]
"""Shape -> tokens -> entrant -> how long it took."""


def summed(shapes: Shapes, named: Callable[[str, int], bool]) -> dict[int, float]:
    """Tokens -> the medians of all shapes together, of the fastest entrant of each that is meant with so many; not a number where a shape has none."""
    found: dict[int, float] = {}
    for tokens in dict.fromkeys(each for rows in shapes.values() for each in rows):
        found[tokens] = 0.0
        for rows in shapes.values():
            several = rows.get(tokens, {}).items()
            us = [row.us for name, row in several if named(name, tokens) and row.us is not None and not row.problem]
            found[tokens] += min(us, default=math.nan)
    return found


def is_policys(name: str, tokens: int) -> bool:
    """Whether it is what a linear in vLLM calls with layerfuse where nothing in front quantises: with many tokens vLLM's own."""
    if tokens <= MOST:
        return name == f"{OURS}, bfloat16 in"
    return name == (INSTALLED if tokens < FLASHINFER_BELOW else f"{BEYOND}{IN_FRONT}")


def table(kind: str, shapes: Shapes, held: float, gpu: str) -> dict[str, dict[int, float]]:
    """What the goals are of.

    Args:
        kind: of the weights.
        shapes: what was timed.
        held: bytes of a weight of each shape together.
        gpu: its name.

    Returns:
        Line -> tokens -> microseconds of all shapes together, or a ratio; empty where nothing was timed.
    """
    names = dict.fromkeys(name for rows in shapes.values() for by_name in rows.values() for name in by_name)
    if not names:
        return {}
    found = {name: summed(shapes, lambda each, _, name=name: each == name) for name in names}

    def peers(*ends: str) -> dict[int, float]:
        return summed(shapes, lambda name, _: not is_ours(name) and name.endswith(ends))

    best, own = peers(""), {OURS: found[OURS]}
    if kind == "blocks":
        best = peers(IN_FRONT, ", bfloat16 in")
        own = {
            "layerfuse from bfloat16, as policy has it": summed(shapes, is_policys),
            "layerfuse from fp8, as a fusion in front gives it": found[OURS],
        }
    found["the fastest peer of each shape, from bfloat16"] = best
    floor = held / next((speed for part, speed in DATA_SHEET.items() if part in gpu), math.nan)
    for name, times in own.items():
        found[f"the fastest peer / {name}"] = {tokens: us / times[tokens] for tokens, us in best.items()}
        found[f"{name} / weights at the data sheet's speed"] = {tokens: us / floor for tokens, us in times.items()}
    if kind == "blocks":
        times, beside = found[f"{OURS}{BEHIND}"], peers(BEHIND)
        found[f"the fastest peer / {OURS}{BEHIND}"] = {tokens: us / times[tokens] for tokens, us in beside.items()}
    return found


def measured(given: argparse.Namespace) -> int:
    """Time all shapes; 1 where one of ours is wrong."""
    begun = time.monotonic()
    if given.table:
        compile_at_once(given)
        print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bytes_per_us": copy_speed()}
    print(f"{found['gpu']}: a copy moves {found['bytes_per_us'] / 1e6:.2f} TB/s", flush=True)
    wrong = False
    for kind in kinds_of(given):
        timed_here = found.setdefault(kind if given.table else "shapes", {})
        shapes, held, wrong_here = timed(given, kind, begun, found, timed_here)
        wrong |= wrong_here
        if given.table:
            found[f"{kind}, all together"] = sums = table(kind, shapes, held, found["gpu"])
            head = "".join(f"{each:8}" for each in given.tokens)
            print(f"\n{f'{kind}: {len(shapes)} shapes together, us with':80}{head}")
            for name, by in sums.items():
                print(f"{name:80}" + "".join(f"{by.get(each, math.nan):8.2f}" for each in given.tokens), flush=True)
        if given.out:
            save(given.out, _without_nan(found))
    return int(wrong)


def _without_nan(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _without_nan(each) for key, each in found.items()}
    return None if isinstance(found, float) and math.isnan(found) else found


def timed(
    given: argparse.Namespace, kind: str, begun: float, found: dict[str, Any], timed_here: dict[str, Any]
) -> tuple[Shapes, float, bool]:
    """All shapes of one kind, the bytes of a weight of each together, and whether one of ours is wrong. After each shape all that is found is written."""
    names = few_token_peers.names_of(kind, given.peers)
    for name in names:
        few_token_peers.made(kind, name)
    print(f"begun after {time.monotonic() - begun:.0f} s", flush=True)
    shapes: Shapes = {}
    held, wrong = 0, False
    for columns, depth in shapes_of(given, kind):
        if time.monotonic() - begun > given.limit:
            print(f"out of time before {columns} x {depth}")
            break
        torch.manual_seed(columns)
        count = max(min(FEWEST_WEIGHTS, MOST_HELD // (columns * depth)), -(-MOST_CACHED // (columns * depth)))
        x = as_a_norm_gives(max(given.tokens), depth)
        weights = [drawn(kind, columns, depth, DEVICE) for _ in range(count)]
        exact, unquantised = right(kind, x, weights), None
        if WEIGHTS_ALONE in names:
            unquantised = right(kind, x, weights, as_it_is=True)
        held += (own := sum(each.nbytes for each in weights[0]))
        gc.collect()
        gc.freeze()  # or each graph looks through all that was imported
        rows, floors = dict[int, dict[str, Row]](), dict[int, float]()
        for each in given.tokens:
            if time.monotonic() - begun > given.limit:
                print(f"out of time before {each} tokens")
                break
            moved = own + each * ((1 + (kind == "bfloat16")) * depth + 2 * columns)
            floors[each] = moved / found["bytes_per_us"]
            as_is = None if unquantised is None else unquantised[:, :each]
            rows[each] = compared(entrants(kind, names, x[:each], weights), exact[:, :each], given.rounds, as_is)
        wrong |= any(row.problem != "" for by in rows.values() for name, row in by.items() if is_ours(name))
        print(f"\n{f'{columns} x {depth}, us with':40}" + "".join(f"{each:8}" for each in rows) + " tokens")
        print("\n".join(lines(rows, floors)), f"\nafter {time.monotonic() - begun:.0f} s", flush=True)
        shapes[f"{columns}x{depth}"] = rows
        entered = {each: {name: row._asdict() for name, row in by.items()} for each, by in rows.items()}
        timed_here[f"{columns}x{depth}"] = {"floors": floors, "entrants": entered}
        if given.out:
            save(given.out, _without_nan(found))
    return shapes, held, wrong


def numbers(words: str) -> list[int]:
    """Of an option: with commas between them."""
    return [*map(int, words.split(","))]


def main() -> int:
    """Time each entrant and print a table per shape, in microseconds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bfloat16", action="store_true", help="weights in bfloat16, beside cuBLAS")
    parser.add_argument("--channels", action="store_true", help="fp8 with a scale per token and per column")
    parser.add_argument("--table", action="store_true", help="blocks, then bfloat16, compiled beforehand, and added up")
    parser.add_argument("--compile", action="store_true", help="call each once, and time nothing")
    parser.add_argument(
        "--shapes", help=f"places in {SHAPES}; else {PLACES['blocks']}, with --channels {PLACES['channels']}"
    )
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="up to 64")
    parser.add_argument("--peers", default="vLLM,DeepGEMM,FlashInfer,torch", help="parts of names; empty: none")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--limit", type=float, default=150, help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path, help="a JSON file, written after each shape")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing measured: the kernels take a GPU")
        return 0
    return compiled(given) if given.compile else measured(given)


if __name__ == "__main__":
    raise SystemExit(main())
