"""The query of MLA beside its turned rope columns, alone and with the cache: what is computed, and what nothing looks at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .behaviour import Call, body
from .misuse import check, expect, expect_bool, expect_rows, expect_unit_stride

REACH = 2**31
"""Elements that Triton's kernels count in int32."""

CONCAT = ("aiter.ops.triton.fused_qk_concat", "aiter.ops.triton.fusions.fused_qk_concat")
CACHE = ("aiter.ops.triton.fused_kv_cache", "aiter.ops.triton.fusions.fused_kv_cache")


def _turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, is_neox: bool) -> Tensor:
    """(tokens, heads, width), in the dtype that the table and x are multiplied in, every product rounded to it."""
    half = x.shape[-1] // 2
    expect(
        bool(((positions >= 0) & (positions < cos.shape[0])).all()), "a position outside the tables: read all the same"
    )
    expect(sin.shape == cos.shape and sin.stride() == cos.stride(), "sin is read by the strides of cos")
    check(cos.shape[-1] in (half, 2 * half), "cos/sin last dim should be the same or half", AssertionError)
    expect(cos.shape[-1] == half, "the stand-in knows tables of half the width")
    c, s = (table[positions].unsqueeze(1) for table in (cos, sin))
    if is_neox:
        c, s = torch.cat([c, c], -1), torch.cat([s, s], -1)
        other = torch.cat([-x[..., half:], x[..., :half]], -1)
    else:
        c, s = c.repeat_interleave(2, -1), s.repeat_interleave(2, -1)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * c + other * s


def _heads(latent: Tensor, rope: Tensor, name: str) -> None:
    check(latent.dim() == rope.dim() == 3, f"{name}: not enough values to unpack (expected 3)", ValueError)
    check(latent.shape[:2] == rope.shape[:2], f"{name}: head should be identical", AssertionError)
    expect_rows(latent, name)
    for x in (latent, rope):
        width = x.shape[2]
        check(width > 0 and width & (width - 1) == 0, f"arange's range must be a power of 2, got {width}", ValueError)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        expect(reach <= REACH, f"{name} reaches over {reach} elements, which the kernel counts in int32")
    total = latent.shape[0] * latent.shape[1] * (latent.shape[2] + rope.shape[2])
    expect(total <= REACH, f"the result for {name} has {total} elements, which the kernel counts in int32")


def _alike(query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> None:
    _heads(*query, "q")
    _heads(*key, "k")
    check(query[0].shape[0] == key[0].shape[0], "batch dimension should be identical", AssertionError)
    check(query[0].shape[1] % key[0].shape[1] == 0, "Q heads must be multiple of H heads", AssertionError)
    widths = [[x.shape[2] for x in pair] for pair in (query, key)]
    check(widths[0] == widths[1], "D dimension should be identical", AssertionError)


@body(*(f"{module}:fused_qk_cat" for module in CONCAT))
def fused_qk_cat(call: Call) -> tuple[Tensor, Tensor]:
    """Both are allocated in the dtype of q1."""
    query, key = (call["q1"], call["q2"]), (call["k1"], call["k2"])
    _alike(query, key)
    q, k = (torch.cat([part.to(call["q1"].dtype) for part in pair], -1) for pair in (query, key))
    return q, k


@body(*(f"{module}:fused_qk_rope_cat" for module in CONCAT))
def fused_qk_rope_cat(call: Call) -> tuple[Tensor, Tensor]:
    """The same with the second part turned, and rounded to its own dtype before."""
    query, key = (call["q_nope"], call["q_pe"]), (call["k_nope"], call["k_pe"])
    expect_bool(call["is_neox"], "is_neox")
    _alike(query, key)
    tables = call["cos"], call["sin"], call["pos"], call["is_neox"]
    q, k = (
        torch.cat([latent, _turned(rope, *tables).to(rope.dtype).to(call["q_nope"].dtype)], -1)
        for latent, rope in (query, key)
    )
    return q, k


def _write(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    """Entries of (slots, ...): a slot below 0 is passed over, one behind the end is not."""
    used = slots >= 0
    expect(bool((slots[used] < cache.shape[0]).all()), "a slot behind the end of the cache: written all the same")
    cache[slots[used]] = values[used].to(cache.dtype)


@body("aiter.ops.cache:fused_qk_rope_concat_and_cache_mla")
def fused_qk_rope_concat_and_cache_mla(call: Call) -> None:
    """Everything is handed in. What is fp8 was divided by its scale; a token without a slot keeps the query that was there."""
    latent, rope, cache, out = call["q_nope"], call["q_pe"], call["kv_cache"], call["q_out"]
    for name in ("is_neox", "is_nope_first"):
        expect_bool(call[name], name)
    expect(call["is_nope_first"], "the stand-in knows the latent in front only")
    check(out.shape[2] == latent.shape[2] + rope.shape[2], "q_out.size(2) == qk_lora_rank + pe_dim")
    expect_unit_stride(kv_c=call["kv_c"], k_pe=call["k_pe"])
    fp8 = cache.element_size() == 1
    check(
        fp8 or out.element_size() > 1, "kv cache data type is auto and q_out data type is fp8, which is not supported"
    )
    cos, sin, slots = call["cos_cache"], call["sin_cache"], call["slot_mapping"]
    expect(cos.dtype == sin.dtype == latent.dtype, f"the tables are {cos.dtype}, but would be read as {latent.dtype}")
    expect(slots.dtype == call["positions"].dtype == torch.int64, "slots and positions are read as int64")
    every = call.get("compute_all_q_rope", False)
    per_head = latent.shape[2] <= 512 and rope.shape[2] == 64 and cache.shape[1] == 1 and len(slots) < 256
    whole = latent.shape[2] == 512 and rope.shape[2] == 64 and latent.shape[1] * 512 >= 2048
    check(not every or per_head or whole, "compute_all_q_rope is only supported by the per-head/opt MLA decode kernels")
    there = (slots >= 0) | every

    def joined(one: Tensor, two: Tensor) -> Tensor:
        tables = cos.float(), sin.float(), call["positions"].clamp(0, cos.shape[0] - 1), call["is_neox"]
        turned = _turned(two.float().view(two.shape[0], -1, two.shape[-1]), *tables).view(two.shape)
        return torch.cat([one.float(), turned], -1)

    query = joined(latent, rope) / (call["q_scale"] if out.element_size() == 1 else 1.0)
    out[there] = query[there].to(out.dtype)
    _write(
        cache.view(-1, cache.shape[-1]), joined(call["kv_c"], call["k_pe"]) / (call["k_scale"] if fp8 else 1.0), slots
    )


@body(*(f"{module}:fused_qk_rope_cat_and_cache_mla" for module in CACHE))
def fused_qk_rope_cat_and_cache_mla(call: Call) -> tuple[Any, ...]:
    """(query, zeros' rope columns, key's rope columns, zeros or the cache). k_scale divides the cache, and nothing the query."""
    query, key = (call["q_nope"], call["q_pe"]), (call["k_nope"], call["k_pe"])
    _alike(query, key)
    expect(call["num_decode_toks_for_zeros"] == 0, "the stand-in gives no zeros")
    up = torch.float32 if call.get("upcast_operand", False) else call["cos"].dtype
    tables = call["cos"].to(up), call["sin"].to(up), call["pos"], call["is_neox"]
    turned, key_turned = _turned(query[1], *tables), _turned(key[1], *tables)
    dtype = call["q_out_dtype"] or query[0].dtype
    out = torch.cat([query[0].to(dtype), turned.to(dtype)], -1)
    scale = call["k_scale"] if call["apply_scale"] and call["k_scale"] is not None else 1.0
    _write(call["kv_cache"], torch.cat([key[0].float(), key_turned.float()], -1) / scale, call["slot_mapping"])
    return out, query[1][:0], key_turned.to(key[1].dtype), call["kv_cache"]
