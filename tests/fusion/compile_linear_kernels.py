"""Compiles linears and experts with few tokens for GPUs that are not here, as `compile_kernels` does, and prints what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from compile_kernels import TARGETS, Compiler
from triton.backends.compiler import GPUTarget

from layerfuse.fusion.backends.triton import experts, launcher, linear
from layerfuse.fusion.linear_ops import (
    BLOCK_SCALED_EXPERTS,
    BLOCK_SCALED_LINEAR,
    FEW_TOKEN_LINEAR,
    GROUP_QUANT_LINEAR,
    SCALED_LINEAR,
)
from layerfuse.fusion.ops.linear import scales_shape

TARGETS["sm89"] = GPUTarget("cuda", 89, 32), torch.float8_e4m3fn
"""The smallest shared memory that fp8 is multiplied with. Its products are other instructions than Hopper's, with other copies in front."""

ALONE = 3072, 1536
"""A shape of which a program takes all of the depth: the most that one holds in shared memory."""
SHAPES = ((2112, 7168), (7168, 2304), ALONE, (272, 18432), (256, 65536))
FORMS = ("quantises", "quantised", "channels", "plain")
"""Whether activations come in bfloat16 to be quantised, in fp8 with scales of groups or of tokens, or are multiplied as they are."""


EXPERTS = ((4, 256, 7168), (3, 768, 2048))
"""Choices of a token, columns between the two products, and the depth of the first."""


def prepared(name: str, early: bool) -> list[dict[str, Any]]:
    """Let launches compile for a target; what they come to."""
    target, _ = TARGETS[name]
    several: list[dict[str, Any]] = []

    def first(*args: Any, **kwargs: Any) -> None:
        compiler = Compiler(name, early)
        compiler(*args, **kwargs)
        several.append(compiler.built | {"target": name, "early": early})

    launcher.first = first  # type: ignore[assignment]
    launcher.again = lambda *_: False  # type: ignore[assignment]
    launcher.wave = lambda _: target.warp_size  # type: ignore[assignment]
    launcher.HIP = target.backend == "hip"
    linear.counters = lambda device: torch.zeros(linear.MOST_TILES, dtype=torch.int32, device=device)
    linear.make_ready = lambda _: None
    launcher.interpreted = lambda _: False
    return several


def experts_built(
    name: str, choices: int, inner: int, depth: int, early: bool, numbers: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """What both kernels of routed experts compile to, for some numbers of tokens; 1, 8 and 16 are launched in other ways."""
    fp8, several = TARGETS[name][1], prepared(name, early)
    w13, w2 = torch.empty(4, 2 * inner, depth, dtype=fp8), torch.empty(4, depth, inner, dtype=fp8)
    scales = torch.ones(4, inner // 64, depth // 128), torch.ones(4, depth // 128, inner // 128)
    for tokens in numbers:
        router, ids = torch.ones(tokens, choices), torch.zeros(tokens, choices, dtype=torch.int32)
        x, x_scale, out = (
            torch.empty(tokens, depth, dtype=fp8),
            torch.ones(tokens, depth // 128),
            torch.empty(tokens, depth, dtype=torch.bfloat16),
        )
        experts.function_of(BLOCK_SCALED_EXPERTS)(
            x, x_scale, w13, scales[0], w2, scales[1], router, ids, out, True, True
        )
        yield from ({**each, "tokens": tokens, "form": each["kernel"]} for each in several)
        several.clear()


def built(name: str, columns: int, depth: int, early: bool) -> Iterator[dict[str, Any]]:
    """What one shape compiles to, in each form and for each number of tokens with a kernel of its own."""
    fp8, several = TARGETS[name][1], prepared(name, early)
    weight = torch.empty(columns, depth, dtype=fp8)
    scale = torch.ones(scales_shape(weight))
    for tokens in linear.buckets():
        for form in FORMS:
            x = torch.empty(tokens, depth, dtype=torch.bfloat16 if form in ("quantises", "plain") else fp8)
            if form == "quantised":
                given = torch.ones(tokens, scale.shape[1])
                linear.function_of(BLOCK_SCALED_LINEAR)(x, given, weight, scale, torch.bfloat16, True, "")
            elif form == "channels":
                given, channels, bias = torch.ones(tokens, 1), torch.ones(columns, 1), torch.ones(columns).bfloat16()
                scaled = linear.function_of(SCALED_LINEAR)
                scaled(x, given, weight, channels, bias, torch.bfloat16, True, "")
            elif form == "quantises":
                linear.function_of(GROUP_QUANT_LINEAR)(x, weight, scale, False, True, "")
            else:
                plain = torch.empty(columns, depth, dtype=torch.bfloat16)
                linear.function_of(FEW_TOKEN_LINEAR)(x, plain, torch.empty_like(plain[:, 0]), True)
            yield several.pop() | {"tokens": tokens, "form": form}


if __name__ == "__main__":
    everything = sys.argv[1:] == ["all"]
    found = [
        each
        for place, shape in enumerate(SHAPES)
        for number, target in enumerate(TARGETS)
        if everything or place % len(TARGETS) == number or (target, shape) == ("sm89", ALONE)
        for each in built(target, *shape, early=target == "sm90")
    ]
    found += [
        each
        for place, shape in enumerate(EXPERTS)
        for number, target in enumerate(TARGETS)
        if everything or number % len(EXPERTS) == place
        # 16 tokens hold the most of memory and registers, on every target; 1 and 8 come in turn, on NVIDIA's and on AMD's.
        for numbers in [(1, 8, 16) if everything else ((8 if target in ("gfx950", "sm90") else 1), 16)]
        for each in experts_built(target, *shape, early=target == "sm90", numbers=numbers)
    ]
    json.dump(found, sys.stdout)
