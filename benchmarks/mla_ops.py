"""The ops of an MLA decode layer one by one, for `mla_chain.py --only ops`, and with `--aiter FOLDER` AITER's Triton ops beside them.

AITER turns key and query in one launch behind the GEMM that makes the query, and norms the latents before it. So it is compared where
both are done: our two ops, against AITER's two norms and its launch, and against that launch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from layerfuse.fusion import ops

Load = Callable[[str], Any]
"""From `module:function` below aiter.ops.triton to the function."""

GEMM = "torch's GEMM and mla_query_concat"
ONLY_TURNED = "aiter, no norms"
"""Its launch alone, on latents that are normed already."""


@frozen(kw_only=True)
class Given:
    """What one decode step has for the ops. Its query is quantised by a scale of 1: AITER's launch knows none."""

    latents: tuple[Tensor, Tensor, Tensor]
    weights: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]
    "The absorbed latent and the rope columns, (tokens, heads, width)."
    nope: Tensor
    "The query's columns that are absorbed, (tokens, heads, 128)."
    weight: Tensor
    "What absorbs them, (heads, 128, 512), as a layer has it."
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    cache: Tensor
    scale: Tensor
    one: Tensor

    @property
    def turn(self) -> tuple[Tensor, Tensor, Tensor]:
        """cos, sin and positions."""
        return *self.tables, self.positions


Way = Callable[[Given], Any]


def given_of(tokens: int, heads: int, cache: torch.dtype, page: int, device: str) -> Given:
    """Inputs of one decode step, at DeepSeek-V3's widths, with a cache that holds all tokens."""
    pages = max(1, math.ceil(tokens / page))
    query = torch.randn(tokens, heads, 192, device=device, dtype=torch.bfloat16)
    return Given(
        latents=torch.randn(tokens, 2112, device=device, dtype=torch.bfloat16).split([1536, 512, 64], -1),
        weights=(torch.rand(1536, device=device).bfloat16(), torch.rand(512, device=device).bfloat16()),
        query=(
            torch.randn(heads, tokens, 512, device=device, dtype=torch.bfloat16).transpose(0, 1),
            query[..., 128:],
        ),
        nope=query[..., :128],
        weight=torch.randn(heads, 128, 512, device=device, dtype=torch.bfloat16) * 128**-0.5,
        tables=torch.randn(4096, 64, device=device).chunk(2, -1),
        positions=torch.randint(0, 4096, (tokens,), device=device),
        slots=torch.randperm(pages * page, device=device)[:tokens],
        cache=torch.zeros(pages, page, 576, device=device).to(cache),
        scale=torch.full((1,), 0.0625, device=device),
        one=torch.ones(1, device=device),
    )


def norms(given: Given) -> Tensor:
    """`mla_norm_rope_cache`."""
    return ops.mla_norm_rope_cache(
        *given.latents, *given.weights, 1e-6, 1e-6, *given.turn, given.slots, given.cache, given.scale
    )


def query(given: Given) -> Tensor:
    """`mla_query_concat`, in fp8 where the cache is."""
    if given.cache.element_size() == 1:
        return ops.mla_query_concat_static_quant(*given.query, *given.turn, given.one)
    return ops.mla_query_concat(*given.query, *given.turn)


def absorb(given: Given) -> Tensor:
    """`mla_query_absorb`, in fp8 where the cache is."""
    inputs = given.nope, given.query[1], given.weight, *given.turn
    if given.cache.element_size() == 1:
        return ops.mla_query_absorb_static_quant(*inputs, given.one, steady=True)
    return ops.mla_query_absorb(*inputs, steady=True)


def gemm_and_concat(given: Given) -> Tensor:
    """The same by torch's GEMM and `mla_query_concat`."""
    latent = torch.bmm(given.nope.transpose(0, 1), given.weight).transpose(0, 1)
    if given.cache.element_size() == 1:
        return ops.mla_query_concat_static_quant(latent, given.query[1], *given.turn, given.one)
    return ops.mla_query_concat(latent, given.query[1], *given.turn)


def ours(given: Given) -> tuple[Tensor, Tensor]:
    """The query as it is attended with, and the cache, by two launches."""
    norms(given)
    return query(given), given.cache


def both(load: Load) -> dict[str, Callable[[Given], tuple[Tensor, Tensor]]]:
    """AITER's ways to the same, by name; the second leaves the latents as they are."""
    norm = load("normalization.rmsnorm:rms_norm")
    turn = load("fusions.fused_kv_cache:fused_qk_rope_cat_and_cache_mla")

    def turned(given: Given, kv: Tensor) -> tuple[Tensor, Tensor]:
        fp8 = given.cache.element_size() == 1
        entries = given.cache.view(-1, 1, given.cache.shape[-1])
        found = turn(
            *given.query, kv[:, None], given.latents[2][:, None], entries, given.slots, given.positions, *given.tables,
            given.scale, False, apply_scale=fp8, q_out_dtype=given.cache.dtype,
        )[0]  # fmt: skip
        return found, given.cache

    def whole(given: Given) -> tuple[Tensor, Tensor]:
        norm(given.latents[0], given.weights[0], 1e-6)
        return turned(given, norm(given.latents[1], given.weights[1], 1e-6))

    return {"aiter": whole, ONLY_TURNED: lambda given: turned(given, given.latents[1])}


def concat(load: Load) -> Callable[[Given], Tensor]:
    """The query alone in bfloat16: one head stands in for the key, which AITER gives too."""
    function = load("fusions.fused_qk_concat:fused_qk_rope_cat")

    def call(given: Given) -> Tensor:
        latent, rope = given.query
        found: Tensor = function(latent, rope, latent[:, :1], rope[:, :1], given.positions, *given.tables, False)[0]
        return found

    return call


def check(load: Load, given: Given, tolerance: float) -> None:
    """Hold AITER's query and cache to ours; the cache is written anew.

    Raises:
        SystemExit: they differ by more, relative to their norm.
    """
    wanted = [x.float().clone() for x in ours(given)]
    given.cache.copy_(torch.zeros(given.cache.shape, device=given.cache.device).to(given.cache.dtype))
    found = both(load)["aiter"](given)
    for name, one, other in zip(("query", "cache"), found, wanted, strict=True):
        wrong = float((one.float() - other).norm() / other.norm())
        if not wrong < tolerance:
            raise SystemExit(f"AITER's {name} differs from ours by {wrong:.1e} of its norm")


def op_ways(given: Given, load: Load | None) -> dict[str, tuple[dict[str, Way], int]]:
    """Name of an op -> the ways to do it on inputs like these, and the bytes that it moves."""
    tokens, heads, _ = given.query[0].shape
    item = given.cache.element_size()
    buffer = given.query[0].new_zeros(tokens, heads, 576)
    moved = tokens * (2112 * 2 + 1536 * 2 + 576 * item), tokens * heads * 576 * (2 + item)
    found: dict[str, tuple[dict[str, Way], int]] = {
        "mla_norm_rope_cache": ({"op": norms}, moved[0]),
        "mla_query_concat": ({"op": query}, moved[1]),
    }
    if tokens <= 64:
        bytes_moved = heads * 128 * 512 * 2 + tokens * heads * (192 * 2 + 576 * item)
        found["mla_query_absorb"] = {"op": absorb, GEMM: gemm_and_concat}, bytes_moved
    if item > 1:
        found["mla_query_rope"] = (
            {"op": lambda g: ops.mla_query_rope(g.query[1], buffer, *g.turn)},
            tokens * heads * 64 * 4,
        )
    if load is not None:
        found["both"] = {"op": ours, **both(load)}, sum(moved)
        if item > 1:
            found["mla_query_concat"][0]["aiter"] = concat(load)
    return found
