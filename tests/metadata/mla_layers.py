"""MLA layers of published models and of any head count, built once."""

from __future__ import annotations

import functools

import attrs

from layerfuse import registry
from layerfuse.adapters.specs import MLASpec
from layerfuse.fusion import Target

GFX942, GFX950 = Target.named("gfx942"), Target.named("gfx950")
BF16 = {"q_dtype": "bf16", "kv_dtype": "bf16"}
FP8 = {"q_dtype": "fp8", "kv_dtype": "fp8"}


@functools.cache
def mla(name: str, tp: int = 1) -> MLASpec:
    """The first MLA layer of a published model."""
    return next(spec for _, spec in registry.model(name).specs(tp, 0) if isinstance(spec, MLASpec))


@functools.cache
def with_heads(heads: int, tp: int = 1) -> MLASpec:
    """Kimi-K2.5's MLA with another head count."""
    return attrs.evolve(mla("kimi-k2.5"), num_heads=heads, num_local_heads=heads).shard(tp)
