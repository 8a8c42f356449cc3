"""Compiles the kernels of the MLA decode layer for GPUs that are not here, as `compile_kernels` does, and prints what came out."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_kernels import FEW, MANY, TARGETS, Compiler

from layerfuse.fusion.backends.triton import absorb, latents, launcher, queries, tuning
from layerfuse.fusion.latent_ops import MLA

OPS = {op.name: op for op in MLA}
FORMS = {"plain": 576, "fp8": 576, "fp8_ds_mla": 656}
TOKENS, HEADS = 8, 16
WIDEST = (
    (64, 16, 128, torch.bfloat16),
    (16, 128, 128, torch.bfloat16),
    (16, 64, 192, torch.bfloat16),
    (16, 64, 192, torch.float32),
    (32, 40, 192, torch.float32),
    (64, 16, 192, torch.float32),
)
"""Tokens, heads and columns of absorbed queries that need much shared memory."""


def built(
    name: str,
    op: str,
    step: int,
    *,
    form: str = "plain",
    pairs: str = "interleaved",
    early: bool = False,
    tokens: int = TOKENS,
    heads: int = HEADS,
    nope: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """What one variant compiles to, at DeepSeek-V3's widths."""
    compiler = Compiler(name, early)
    target, fp8 = TARGETS[name]
    launcher.first = compiler  # type: ignore[assignment]
    launcher.again = lambda *_: False  # type: ignore[assignment]
    launcher.wave = lambda _: target.warp_size  # type: ignore[assignment]
    launcher.interpreted = lambda _: False
    tuning.regime = lambda _: step  # type: ignore[assignment]
    index, table = torch.zeros(tokens, dtype=torch.int64), torch.empty(4096, 64)
    cos, sin = table.chunk(2, -1)
    scale = torch.ones(1)
    if "norm" in op:
        entry = {"plain": torch.bfloat16, "fp8": fp8, "fp8_ds_mla": torch.uint8}[form]
        down = torch.empty(tokens, 2112, dtype=torch.bfloat16).split([1536, 512, 64], -1)
        weights = [torch.empty(width, dtype=torch.bfloat16) for width in (1536, 512)]
        cache = torch.empty(4, 64, FORMS[form], dtype=entry)
        options = {"static": (scale, fp8), "per": (fp8, False), "group": (fp8, 128, False, False, False)}
        options["into"] = (torch.empty(tokens, 1536, dtype=torch.bfloat16),)
        quant = options.get(op.removeprefix("mla_norm_rope_cache_").partition("_")[0], ())
        args = (*down, *weights, 1e-6, 1e-6, cos, sin, index, index, cache, scale, 0.0, 0.0, pairs, *quant)
        function = latents.function_of(OPS[op])
    else:
        latent = torch.empty(HEADS, tokens, 512, dtype=torch.bfloat16).transpose(0, 1)
        rope = torch.empty(tokens, HEADS, 192, dtype=torch.bfloat16)[..., 128:]
        args = (latent, rope, cos, sin, index, pairs)
        if op == "mla_query_rope":
            args = (rope, torch.empty(tokens, HEADS, 576, dtype=torch.bfloat16), cos, sin, index, pairs)
        elif "absorb" in op:
            query, weight = torch.empty(tokens, heads, nope + 64).to(dtype), torch.empty(heads, nope, 512).to(dtype)
            quant = (scale, pairs, fp8) if op.endswith("quant") else (pairs,)
            args = (query[..., :nope], query[..., nope:], weight, cos, sin, index, *quant, early)
        elif op.endswith("quant"):
            args = (latent, rope, cos, sin, index, scale, pairs, fp8)
        function = (absorb if "absorb" in op else queries).function_of(OPS[op])
    function(*args)
    return compiler.built | {"target": name, "step": step, "early": early, "form": form, "pairs": pairs}


if __name__ == "__main__":
    found = []
    everything = sys.argv[1:] == ["all"]
    for number, target in enumerate(TARGETS):
        for place, op in enumerate(OPS):
            # Else each op for a few rows on one target, in turn, and for many on the next.
            for step, turn in ((FEW, place), (MANY, place + 1)):
                if everything or turn % len(TARGETS) == number:
                    found.append(built(target, op, step))
        found += [
            built(target, "mla_query_absorb", MANY, tokens=tokens, heads=heads, nope=nope, dtype=dtype)
            for place, (tokens, heads, nope, dtype) in enumerate(WIDEST)
            if everything or place % len(TARGETS) == number
        ]
        found += [built(target, "mla_norm_rope_cache", FEW, form=form) for form in ("fp8", "fp8_ds_mla")]
        found += [
            built(target, "mla_query_concat", FEW, pairs=pairs) for pairs in ("halves", "interleaved_to_halves", "none")
        ]
    found += [
        built("sm90", op, FEW, early=True) for op in ("mla_norm_rope_cache", "mla_query_concat", "mla_query_absorb")
    ]
    json.dump(found, sys.stdout)
