"""Compiles the linear with few tokens for GPUs that are not here, as `compile_kernels` does, and prints what came out."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_kernels import TARGETS, Compiler

from layerfuse.fusion.backends.triton import launcher, linear
from layerfuse.fusion.linear_ops import GROUP_QUANT_LINEAR
from layerfuse.fusion.ops.linear import MOST, scales_shape

SHAPES = ((2112, 7168), (3072, 1536), (7168, 2304), (272, 18432))


def built(name: str, columns: int, depth: int, early: bool) -> dict[str, Any]:
    """What one shape compiles to."""
    compiler = Compiler(name, early)
    target, fp8 = TARGETS[name]
    launcher.first = compiler  # type: ignore[assignment]
    launcher.again = lambda *_: False  # type: ignore[assignment]
    launcher.wave = lambda _: target.warp_size  # type: ignore[assignment]
    linear._counters = lambda device: torch.zeros(1024, dtype=torch.int32, device=device)
    launcher.interpreted = lambda _: False
    weight = torch.empty(columns, depth, dtype=fp8)
    x = torch.empty(MOST, depth, dtype=torch.bfloat16)
    linear.function_of(GROUP_QUANT_LINEAR)(x, weight, torch.ones(scales_shape(weight)), False, True, "")
    return compiler.built | {"target": name, "early": early}


if __name__ == "__main__":
    found = [
        built(target, *shape, early=target == "sm90")
        for place, shape in enumerate(SHAPES)
        for number, target in enumerate(TARGETS)
        if sys.argv[1:] == ["all"] or place % len(TARGETS) == number
    ]
    json.dump(found, sys.stdout)
