"""The query of MLA beside its turned rope columns: what is computed, and what nothing looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from .behaviour import Call, body
from .misuse import check, expect, expect_bool, expect_rows

REACH = 2**31
"""Elements that Triton's kernels count in int32."""

CONCAT = "aiter.ops.triton.fusions.fused_qk_concat"


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


@body(f"{CONCAT}:fused_qk_cat")
def fused_qk_cat(call: Call) -> tuple[Tensor, Tensor]:
    """Both are allocated in the dtype of q1."""
    query, key = (call["q1"], call["q2"]), (call["k1"], call["k2"])
    _alike(query, key)
    q, k = (torch.cat([part.to(call["q1"].dtype) for part in pair], -1) for pair in (query, key))
    return q, k


@body(f"{CONCAT}:fused_qk_rope_cat")
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
