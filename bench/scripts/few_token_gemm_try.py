"""Many ways to multiply by few tokens with fp8 weights, timed side by side; a search, whose winner goes into `few_token_gemm`."""

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


def loop(columns: int, split: int, stages: int, ahead: bool, warps: int = 4) -> Way:
    return Way(
        "few_token_gemm_kernel", "few_token_mm", columns, split, warps, stages,
        (("BOXES", False), ("EARLY", True), ("AHEAD", ahead)),
    )  # fmt: skip


def gluon_ways(columns: int, depth: int, tokens: int) -> Iterator[Way]:
    """Of the kernel whose weights come by TMA before the kernel in front has ended."""
    groups = depth // BLOCK
    tiles = -(-columns // 64)
    for part in (2, 3, 4, 6, 7, 8, 9, 14):
        split = groups // part
        if groups % part or not 100 <= tiles * split <= 700:
            continue
        for ring in dict.fromkeys((part, min(part, 4), min(part, 6), min(part, 3))):
            if ring < 3 and part > ring:
                continue
            for first in (False, True) if ring == part else (True,):
                yield Way(
                    "few_token_gemm_gluon", "boxed_mm", 64, split, 4, 3,
                    (("GROUPS", part), ("RING", ring), ("FIRST", first), ("AHEAD", part if tokens <= 16 else 1)),
                )  # fmt: skip
    for part in (2, 3, 4, 6, 7, 8):
        split = groups // part
        if groups % part or not 60 <= -(-columns // 128) * split <= 400:
            continue
        yield Way(
            "few_token_gemm_gluon", "boxed_mm", 128, split, 8, 3,
            (("GROUPS", part), ("RING", min(part, 4)), ("FIRST", True), ("AHEAD", part if tokens <= 16 else 1)),
        )  # fmt: skip


def plain_ways(columns: int, depth: int, tokens: int) -> Iterator[Way]:
    """What is worth trying for a shape and so many tokens."""
    groups = depth // BLOCK
    few = tokens <= 16
    tiles = -(-columns // 64)
    known = {2112: (8, 5), 3072: (6, 5), 7168: (2, 5), 4608: (4, 5)}
    split, stages = known[columns]
    yield loop(64, split, stages, False)
    yield loop(64, split, stages, True)
    for part in (2, 3, 4, 6, 7, 8, 9):
        split = -(-groups // part)
        if groups % part or not 100 <= tiles * split <= 1000:
            continue
        for first in (False, True) if part in (4, 7) and few else (True,):
            for ahead in ((part,) if few else (1,)):
                for warps in (4,) if few else (4, 8):
                    yield Way(
                        "few_token_gemm_ways", "held_mm", 64, split, warps, 3,
                        (("GROUPS", part), ("FIRST", first), ("AHEAD", ahead)),
                    )  # fmt: skip
    for part in (2, 3, 4, 6, 7):
        split = -(-groups // part)
        if groups % part or not 100 <= -(-columns // 128) * split <= 700:
            continue
        yield Way(
            "few_token_gemm_ways", "held_mm", 128, split, 8, 3,
            (("GROUPS", part), ("FIRST", True), ("AHEAD", part if few else 1)),
        )  # fmt: skip
    if few:
        for wide, stages, width in ((4, 3, 16), (8, 3, 16), (4, 3, 32)):
            for split in (1, 2):
                yield Way(
                    "few_token_gemm_ways", "narrow_mm", width, split, wide, stages, (("WIDE", wide), ("FIRST", True))
                )


def kinds(tokens: int, inputs: list[bool]) -> list[bool]:
    """Whether x comes in bfloat16."""
    return inputs if tokens <= 16 else [True, False]


WAYS = {"plain": plain_ways, "gluon": gluon_ways}


def ways(columns: int, depth: int, tokens: int) -> Iterator[Way]:
    """Of the kinds that are asked for; a variable of the environment, as processes of a pool read it too."""
    for kind in os.environ.get("WAYS", "plain,gluon").split(","):
        yield from WAYS[kind](columns, depth, tokens)


class Product:
    """A way, with the memory that its programs share."""

    def __init__(self, way: Way, columns: int, tokens: int, quantises: bool) -> None:
        self.way, self.grid = way, (-(-columns // way.columns), way.split)
        self.parts = torch.empty(way.split, tokens, columns, device="cuda")
        self.arrived = torch.zeros(self.grid[0], dtype=torch.int32, device="cuda")
        self.constants = {
            "TILE_N": way.columns, "TILE_M": max(16, 1 << (tokens - 1).bit_length()), "SPLIT": way.split,
            "QUANT": quantises, "num_warps": way.warps, "num_stages": way.stages, **dict(way.more), **dict(way.launch),
        }  # fmt: skip
        self.kernel = getattr(import_module(way.file), way.kernel)

    def arguments(self, x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> dict[str, Any]:
        tokens, depth = x.shape
        known = {
            "x": x, "x_scales": scales, "weight": weight, "weight_boxes": weight, "weight_scales": weight_scales,
            "parts": self.parts, "arrived": self.arrived, "tokens": tokens, "columns": len(weight), "depth": depth,
            "token_stride": scales.stride(0), "group_stride": scales.stride(1),
            "out": torch.empty(tokens, len(weight), dtype=torch.bfloat16, device="cuda"),
        }  # fmt: skip
        if "boxes" in self.kernel.arg_names:
            from triton.experimental.gluon.language import NVMMASharedLayout
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            known["boxes"] = TensorDescriptor.from_tensor(
                weight, [self.way.columns, BLOCK], NVMMASharedLayout(128, 8, 2)
            )
        return {name: known[name] for name in self.kernel.arg_names if name in known}

    def __call__(self, *tensors: Tensor) -> Tensor:
        given = self.arguments(*tensors)
        self.kernel[self.grid](**given, **self.constants)
        return given["out"]

    def compile(self) -> None:
        tokens = self.parts.shape[1]
        x = torch.empty(tokens, 2048, dtype=torch.bfloat16 if self.constants["QUANT"] else FP8, device="cuda")
        weight = torch.empty(256, 2048, dtype=FP8, device="cuda")
        scales = torch.empty(64, 16, device="cuda")
        self.kernel.warmup(**self.arguments(x, scales, weight, scales), grid=self.grid, **self.constants)


def _compile(way: Way, tokens: int, quantises: bool) -> None:
    Product(way, 256, tokens, quantises).compile()


def calls(way: Way, quantises: bool, x: Tensor, weights: list[Weight]) -> Calls:
    multiply = Product(way, len(weights[0][0]), len(x), quantises)
    values, scales = quantised(x)
    return [partial(multiply, x if quantises else values, scales, *weight) for weight in weights]


def compared(x: Tensor, weights: list[Weight], right: Tensor, rounds: int, inputs: list[bool]) -> list[dict[str, Any]]:
    graphs, rows, held, first = dict[Any, Graph](), list[dict[str, Any]](), list[Calls](), dict[Any, Tensor]()
    columns, depth = weights[0][0].shape
    for way in ways(columns, depth, len(x)):
        for quantises in inputs:
            key = (way, quantises)
            try:
                held.append(calls(way, quantises, x, weights))
                graphs[key] = Graph(held[-1], 1)  # type: ignore[arg-type]
                graphs[key].start()
                first[key] = torch.stack(graphs[key].results)  # type: ignore[arg-type]
            except Exception as problem:
                graphs.pop(key, None)
                rows.append({"way": str(way), "quantises": quantises, "us": None, "problem": said(problem)})
    for (way, quantises), timing in time_graphs(graphs, rounds).items():  # type: ignore[arg-type]
        got = torch.stack(graphs[way, quantises].results)  # type: ignore[arg-type]
        error = relative_error(got, right)
        problem = f"off by {error:.3g}" if error > MOST_ERROR else ""
        if not torch.equal(got, first[way, quantises]):
            problem = "replays differ"
        rows.append(
            {
                "way": str(way), "quantises": quantises, "us": timing.us, "low": timing.low, "high": timing.high,
                "error": error if math.isfinite(error) else None, "problem": problem,
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: row["us"] if row["us"] and not row["problem"] else math.inf)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="0,2,1,3,4")
    parser.add_argument("--tokens", default="8,64,1,16")
    parser.add_argument("--inputs", default="1", help="1: bfloat16, quantised inside; 0: fp8; both where there are more than 16 tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=170)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begun = time.monotonic()
    shapes = [SHAPES[int(each)] for each in given.shapes.split(",")]
    tokens = [int(each) for each in given.tokens.split(",")]
    inputs = [bool(int(each)) for each in given.inputs.split(",")]
    todo = dict.fromkeys(
        (way, max(16, each), quantises)
        for shape in shapes for each in tokens for way in ways(*shape, each) for quantises in kinds(each, inputs)
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
            rows = compared(x, weights, right, given.rounds, kinds(each, inputs))
            found["rows"] += [{"columns": columns, "depth": depth, "tokens": each, **row} for row in rows]
            for quantises in kinds(each, inputs):
                mine = [row for row in rows if row["quantises"] == quantises]
                good = [row for row in mine if row["us"] and not row["problem"]][:4]
                bad = [row for row in mine if row["problem"]]
                lines.append(
                    f"{columns}x{depth} {each:2} {'bf16' if quantises else 'fp8 '} "
                    + " | ".join(f"{row['us']:.2f} {row['way']}" for row in good)
                    + (f" || {len(bad)} bad: {bad[0]['way']}: {bad[0]['problem'][:80]}" if bad else "")
                )
                print(lines[-1], flush=True)
            if given.out:
                given.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
