"""Compiles the linear with few tokens for GPUs that are not here, as `compile_kernels` does, and prints what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from compile_kernels import TARGETS, Compiler

from layerfuse.fusion.backends.triton import launcher, linear
from layerfuse.fusion.linear_ops import BLOCK_SCALED_LINEAR, FEW_TOKEN_LINEAR, GROUP_QUANT_LINEAR
from layerfuse.fusion.ops.linear import scales_shape

SHAPES = ((2112, 7168), (3072, 1536), (7168, 2304), (272, 18432))
FORMS = ("quantises", "quantised", "plain")
"""Whether activations come in bfloat16 to be quantised, in fp8, or are multiplied as they are."""


def built(name: str, columns: int, depth: int, early: bool) -> Iterator[dict[str, Any]]:
    """What one shape compiles to, in each form and for each number of tokens with a kernel of its own."""
    target, fp8 = TARGETS[name]
    launcher.again = lambda *_: False  # type: ignore[assignment]
    launcher.wave = lambda _: target.warp_size  # type: ignore[assignment]
    launcher.HIP = target.backend == "hip"
    linear._counters = lambda device: torch.zeros(1024, dtype=torch.int32, device=device)
    linear._make_ready = lambda _: None
    launcher.interpreted = lambda _: False
    weight = torch.empty(columns, depth, dtype=fp8)
    scale = torch.ones(scales_shape(weight))
    for tokens in linear._buckets():
        for form in FORMS:
            compiler = Compiler(name, early)
            launcher.first = compiler  # type: ignore[assignment]
            x = torch.empty(tokens, depth, dtype=fp8 if form == "quantised" else torch.bfloat16)
            if form == "quantised":
                given = torch.ones(tokens, scale.shape[1])
                linear.quantised_function_of(BLOCK_SCALED_LINEAR)(x, given, weight, scale, torch.bfloat16, True, "")
            elif form == "quantises":
                linear.function_of(GROUP_QUANT_LINEAR)(x, weight, scale, False, True, "")
            else:
                plain = torch.empty(columns, depth, dtype=torch.bfloat16)
                linear.plain_function_of(FEW_TOKEN_LINEAR)(x, plain, torch.empty_like(plain[:, 0]), True)
            yield compiler.built | {"target": name, "early": early, "tokens": tokens, "form": form}


if __name__ == "__main__":
    found = [
        each
        for place, shape in enumerate(SHAPES)
        for number, target in enumerate(TARGETS)
        if sys.argv[1:] == ["all"] or place % len(TARGETS) == number
        for each in built(target, *shape, early=target == "sm90")
    ]
    json.dump(found, sys.stdout)
