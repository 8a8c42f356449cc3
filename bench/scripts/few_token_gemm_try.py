"""Many ways to multiply by few tokens with fp8 weights, timed side by side; a search, whose winner becomes the op's kernel."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from few_token_gemm import (
    BLOCK,
    FEWEST_WEIGHTS,
    FP8,
    MOST_CACHED,
    MOST_ERROR,
    SHAPES,
    Calls,
    Weight,
    copy_speed,
    drawn,
    quantised,
    relative_error,
    right_results,
)
from torch import Tensor

from layerfuse.bench.rank_group import said
from layerfuse.bench.timing import Graph, time_graphs
from layerfuse.fusion import ops


class Way(NamedTuple):
    """A kernel with its constants."""

    file: str
    kernel: str
    columns: int
    split: int
    warps: int
    stages: int
    more: tuple[tuple[str, Any], ...]
    launch: tuple[tuple[str, Any], ...] = (("launch_pdl", True),)

    def __str__(self) -> str:
        more = " ".join(f"{name}={int(value)}" for name, value in (*self.more, *self.launch) if name != "launch_pdl")
        return f"{self.kernel} {self.columns}/{self.split} w{self.warps} s{self.stages} {more}"


INSIDE, FP8_IN, IN_FRONT = "bf16, inside", "fp8 in", "bf16, in front"
GLUON, PLAIN = "few_token_gemm_gluon", "few_token_gemm_ways"


def inputs(way: Way, tokens: int) -> tuple[str, ...]:
    """How x comes, and who quantises it."""
    if way.kernel == "boxed_mm":
        return (INSIDE,)
    if way.kernel == "both_boxed_mm":
        return (FP8_IN, IN_FRONT)
    return (INSIDE,) if tokens <= 16 else (INSIDE, FP8_IN)


def each_of(tokens: int, split: int) -> int:
    """How many tokens each program sums, if each sums some."""
    return max(2, 1 << (-(-tokens // split) - 1).bit_length())


def few(columns: int, depth: int) -> Iterator[Way]:
    """For up to 16 tokens."""
    groups = depth // BLOCK
    for width, warps, most in ((64, 4, 1050), (128, 8, 520), (128, 4, 520)):
        tiles = -(-columns // width)
        for part in (2, 3, 4, 6, 7, 8, 9, 14, 18):
            split = groups // part
            if groups % part or not 90 <= tiles * split <= most:
                continue
            if part * width <= 4 * 256 and (warps == 8 or width == 64):
                more = (("GROUPS", part), ("FIRST", True), ("AHEAD", part), ("EACH", 0))
                yield Way(PLAIN, "held_mm", width, split, warps, 3, more)
            rings = dict.fromkeys(each for each in (part, 4, 6, 3) if each <= part)
            for ring in list(rings)[: 3 if warps != 4 or width == 64 else 1]:
                once = ring == part and part <= 8
                more = (("GROUPS", part), ("RING", ring), ("FIRST", True), ("ONCE", once), ("EACH", 0))
                yield Way(GLUON, "boxed_mm", width, split, warps, 3, more)
                if once and part in (4, 7):
                    yield Way(GLUON, "boxed_mm", width, split, warps, 3, (*more[:2], ("FIRST", False), *more[3:]))
                    yield Way(GLUON, "boxed_mm", width, split, warps, 3, (*more[:3], ("ONCE", False), more[4]))


def many(columns: int, depth: int, tokens: int) -> Iterator[Way]:
    """For more of them."""
    groups = depth // BLOCK
    for width, warps in ((64, 4), (128, 4), (128, 8)):
        tiles = -(-columns // width)
        for part in (2, 3, 4, 6, 7, 8, 9, 14, 18):
            split = groups // part
            if groups % part or not 70 <= tiles * split <= 400:
                continue
            each = 0 if split == 1 else each_of(tokens, split)
            for ring in dict.fromkeys((min(part, 4), min(part, 6))) if width == 64 else (min(part, 4),):
                more = (("GROUPS", part), ("RING", ring), ("ONCE", False), ("EACH", each))
                yield Way(GLUON, "both_boxed_mm", width, split, warps, 3, more)
            if width == 64 and 7 <= part <= 9:
                yield Way(
                    PLAIN, "held_mm", width, split, 8, 3,
                    (("GROUPS", part), ("FIRST", True), ("AHEAD", 1), ("EACH", each)),
                )  # fmt: skip


def ways(columns: int, depth: int, tokens: int) -> Iterator[Way]:
    """What is worth trying for a shape and so many tokens."""
    return few(columns, depth) if tokens <= 16 else many(columns, depth, tokens)


class Product:
    """A way, with the memory that its programs share."""

    def __init__(self, way: Way, columns: int, tokens: int, comes: str) -> None:
        self.way, self.grid, self.comes = way, (way.split, -(-columns // way.columns)), comes
        self.parts = torch.empty(way.split, tokens, columns, device="cuda")
        self.arrived = torch.zeros(self.grid[1], dtype=torch.int32, device="cuda")
        self.constants = {
            "TILE_N": way.columns, "TILE_M": max(16, 1 << (tokens - 1).bit_length()), "SPLIT": way.split,
            "QUANT": comes == INSIDE, "num_warps": way.warps, "num_stages": way.stages, **dict(way.more), **dict(way.launch),
        }  # fmt: skip
        if way.file == GLUON:
            del self.constants["QUANT"], self.constants["num_stages"]
        self.kernel = getattr(import_module(way.file), way.kernel)

    def arguments(self, x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> dict[str, Any]:
        tokens, depth = x.shape
        known = {
            "x": x, "x_scales": scales, "weight": weight, "weight_scales": weight_scales, "parts": self.parts,
            "arrived": self.arrived, "tokens": tokens, "columns": len(weight), "depth": depth,
            "token_stride": scales.stride(0), "group_stride": scales.stride(1),
            "out": torch.empty(tokens, len(weight), dtype=torch.bfloat16, device="cuda"),
        }  # fmt: skip
        if self.way.file == GLUON:
            known["boxes"] = _boxes(weight, self.way.columns)
            known["x_boxes"] = _boxes(x, self.constants["TILE_M"]) if x.dtype == FP8 else None
        return {name: known[name] for name in self.kernel.arg_names if name in known}

    def __call__(self, *tensors: Tensor) -> Tensor:
        given = self.arguments(*tensors)
        self.kernel[self.grid](**given, **self.constants)
        return given["out"]

    def compile(self) -> None:
        tokens = self.parts.shape[1]
        x = torch.empty(tokens, 2048, dtype=torch.bfloat16 if self.comes == INSIDE else FP8, device="cuda")
        weight = torch.empty(256, 2048, dtype=FP8, device="cuda")
        scales = torch.empty(64, 16, device="cuda")
        self.kernel.warmup(**self.arguments(x, scales, weight, scales), grid=self.grid, **self.constants)


def _boxes(tensor: Tensor, rows: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, [rows, BLOCK], NVMMASharedLayout(128, 8, 2))


def _compile(way: Way, tokens: int, comes: str) -> None:
    Product(way, 256, tokens, comes).compile()


def in_front(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantised by a kernel of its own, which lets the next one start."""
    from few_token_gemm_ways import quantise_groups

    tokens, depth = x.shape
    groups = depth // BLOCK
    values = torch.empty(tokens, depth, dtype=FP8, device="cuda")
    scales = torch.empty(groups, -(-tokens // 4) * 4, device="cuda").t()[:tokens]
    quantise_groups[(-(-tokens * groups // 4),)](
        x, values, scales, tokens, depth, scales.stride(0), scales.stride(1), GROUPS=4, num_warps=2, launch_pdl=True
    )
    return values, scales


def calls(way: Way, comes: str, x: Tensor, weights: list[Weight]) -> Calls:
    multiply = Product(way, len(weights[0][0]), len(x), comes)
    if comes == IN_FRONT:
        return [lambda weight=weight: multiply(*in_front(x), *weight) for weight in weights]
    values, scales = quantised(x)
    return [partial(multiply, x if comes == INSIDE else values, scales, *weight) for weight in weights]


def compared(x: Tensor, weights: list[Weight], right: Tensor, rounds: int) -> list[dict[str, Any]]:
    graphs, rows, held, first = dict[Any, Graph](), list[dict[str, Any]](), list[Calls](), dict[Any, Tensor]()
    columns, depth = weights[0][0].shape
    for way in ways(columns, depth, len(x)):
        for comes in inputs(way, len(x)):
            key = (way, comes)
            try:
                held.append(calls(way, comes, x, weights))
                graphs[key] = Graph(held[-1], 1)  # type: ignore[arg-type]
                graphs[key].start()
                first[key] = torch.stack(graphs[key].results)  # type: ignore[arg-type]
            except Exception as problem:
                graphs.pop(key, None)
                rows.append({"way": str(way), "comes": comes, "us": None, "problem": said(problem)})
    key = ("layerfuse::group_quant_linear", INSIDE)
    try:
        held.append([partial(ops.group_quant_linear, x, *weight, steady=True) for weight in weights])
        graphs[key] = Graph(held[-1], 1)  # type: ignore[arg-type]
        graphs[key].start()
        first[key] = torch.stack(graphs[key].results)  # type: ignore[arg-type]
    except Exception as problem:
        graphs.pop(key, None)
        rows.append({"way": key[0], "comes": INSIDE, "us": None, "problem": said(problem)})
    for (way, comes), timing in time_graphs(graphs, rounds).items():  # type: ignore[arg-type]
        got = torch.stack(graphs[way, comes].results)  # type: ignore[arg-type]
        error = relative_error(got, right)
        problem = f"off by {error:.3g}" if error > MOST_ERROR else ""
        if not torch.equal(got, first[way, comes]):
            problem = "replays differ"
        rows.append(
            {
                "way": str(way), "comes": comes, "us": timing.us, "low": timing.low, "high": timing.high,
                "error": error if math.isfinite(error) else None, "problem": problem,
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: row["us"] if row["us"] and not row["problem"] else math.inf)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="0,2,1,3,4")
    parser.add_argument("--tokens", default="8,64,1,16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=170)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begun = time.monotonic()
    shapes = [SHAPES[int(each)] for each in given.shapes.split(",")]
    tokens = [int(each) for each in given.tokens.split(",")]
    todo = dict.fromkeys(
        (way, max(16, each), comes if comes == INSIDE else FP8_IN)
        for shape in shapes for each in tokens for way in ways(*shape, each) for comes in inputs(way, each)
    )  # fmt: skip
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("spawn")) as pool:
        for each in todo:
            pool.submit(_compile, *each)
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}: copy {speed / 1e6:.2f} TB/s, {len(todo)} compiled after "
          f"{time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bytes_per_us": speed, "rows": []}
    lines = []
    for each in tokens:
        for columns, depth in shapes:
            if time.monotonic() - begun > given.limit:
                lines.append("out of time")
                break
            torch.manual_seed(columns)
            count = max(FEWEST_WEIGHTS, -(-MOST_CACHED // (columns * depth)))
            weights = [drawn(columns, depth, "cuda") for _ in range(count)]
            x = torch.randn(each, depth, device="cuda").bfloat16()
            right = right_results(*quantised(x), weights)
            gc.collect()
            gc.freeze()
            rows = compared(x, weights, right, given.rounds)
            found["rows"] += [{"columns": columns, "depth": depth, "tokens": each, **row} for row in rows]
            for comes in dict.fromkeys(row["comes"] for row in rows):
                mine = [row for row in rows if row["comes"] == comes]
                good = [row for row in mine if row["us"] and not row["problem"]][:5]
                bad = [row for row in mine if row["problem"]]
                own = next((row for row in mine if row["way"].startswith("layerfuse::") and row["us"]), None)
                lines.append(
                    f"{columns}x{depth} {each:2} {comes} "
                    + (f"op {own['us']:.2f}{own['problem']} | " if own else "")
                    + " | ".join(f"{row['us']:.2f} {row['way']}" for row in good)
                    + (f" || {len(bad)} bad: {bad[0]['way']}: {bad[0]['problem'][:80]}" if bad else "")
                )
                print(lines[-1], flush=True)
            if given.out:
                given.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
