# ruff: noqa: N803 (constants of a kernel are written in capitals)
"""The kernel of `mla_query_absorb`: each head's GEMM in blocks of columns, and beside them programs that turn rope columns."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from .rows import rounded, saturated
from .turning import NOT_TURNED, angle, read_pairs, turned, write_pairs


@triton.jit
def _roped(
    q_rope, cos, sin, positions, scale_in, out, token, head, rope_token, rope_head, table_rows, cos_stride, sin_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE_WIDTH: tl.constexpr, ROPE_UNIT: tl.constexpr, STATIC: tl.constexpr,
    LARGEST: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The rope columns of heads of a token."""
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    mask = head < HEADS
    start = (token * rope_token + head * rope_head) * ROPE_UNIT
    first, second = read_pairs(q_rope, start, mask, ROPE_WIDTH, HALF, PAIRS)
    if PAIRS != NOT_TURNED:
        position = tl.load(positions + token + tl.arange(0, 1)).to(tl.int64)
        c = angle(cos, position, table_rows, cos_stride, ROPE_WIDTH, HALF)
        s = angle(sin, position, table_rows, sin_stride, ROPE_WIDTH, HALF)
        first, second = turned(first, second, c, s)
    if STATIC:
        scale = 1.0 / tl.load(scale_in)
        first, second = rounded(first, q_rope.dtype.element_ty), rounded(second, q_rope.dtype.element_ty)
        first, second = saturated(first * scale, LARGEST), saturated(second * scale, LARGEST)
    at = (token * HEADS + head) * (LATENT + ROPE_WIDTH) + LATENT
    write_pairs(out, at, mask, first, second, ROPE_WIDTH, HALF, PAIRS)


@triton.jit
def _absorbed(
    q_nope, weight, scale_in, out, token, head, column, tokens, nope_token, nope_head, weight_head, weight_row,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    NOPE_UNIT: tl.constexpr, WEIGHT_UNIT: tl.constexpr, TRANSPOSED: tl.constexpr, STATIC: tl.constexpr,
    LARGEST: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Columns of the product of tokens of a head."""
    mask, row = token < tokens, tl.arange(0, DEPTH)
    base = weight + (head.to(tl.int64) * weight_head) * WEIGHT_UNIT
    inside = (row < NOPE)[:, None] & (column < LATENT)[None, :]
    if TRANSPOSED:
        lies = column[None, :] * (weight_row * WEIGHT_UNIT) + row[:, None]
    else:
        lies = row[:, None] * (weight_row * WEIGHT_UNIT) + column[None, :]
    if AHEAD:
        absorbing = tl.load(base + lies, mask=inside, other=0.0)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if not AHEAD:
        absorbing = tl.load(base + lies, mask=inside, other=0.0)
    start = (token * nope_token + head * nope_head) * NOPE_UNIT
    query = tl.load(q_nope + start[:, None] + row[None, :], mask=mask[:, None] & (row < NOPE)[None, :], other=0.0)
    if WIDE:
        product = tl.dot(query.to(tl.float32), absorbing.to(tl.float32), input_precision="ieee").to(query.dtype)
    else:
        product = tl.dot(query, absorbing, input_precision="ieee").to(query.dtype)
    if STATIC:
        product = saturated(product.to(tl.float32) * (1.0 / tl.load(scale_in)), LARGEST)
    at = (token * HEADS + head) * (LATENT + ROPE_WIDTH)
    write = mask[:, None] & (column < LATENT)[None, :]
    tl.store(out + at[:, None] + column[None, :], product.to(out.dtype.element_ty), mask=write)


@triton.jit(
    do_not_specialize=[
        "tokens", "nope_token", "nope_head", "rope_token", "rope_head", "weight_head", "weight_row", "table_rows",
        "cos_stride", "sin_stride",
    ]
)  # fmt: skip
def query_absorb(
    q_nope, q_rope, weight, cos, sin, positions, scale_in, out,
    tokens, nope_token, nope_head, rope_token, rope_head, weight_head, weight_row, table_rows, cos_stride, sin_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    NOPE_UNIT: tl.constexpr, ROPE_UNIT: tl.constexpr, WEIGHT_UNIT: tl.constexpr, TRANSPOSED: tl.constexpr,
    STATIC: tl.constexpr, LARGEST: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr, TOGETHER: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All tokens of a head, no more than TOKENS, per program: COLUMNS of the product over DEPTH >= NOPE columns.

    Behind these programs, those of the rope: TOGETHER heads of a token each. With more it would take longer than the GEMM beside it.
    TRANSPOSED: the weight's rows lie along NOPE. STATIC: everything is divided by a scale.
    WIDE: for Triton's interpreter, which multiplies no bfloat16. AHEAD: the weight is read while the kernel in front may still run.
    """
    blocks: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    groups: tl.constexpr = (HEADS + TOGETHER - 1) // TOGETHER
    program = tl.program_id(0)
    if program < HEADS * blocks:
        column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
        _absorbed(
            q_nope, weight, scale_in, out, tl.arange(0, TOKENS).to(tl.int64), program // blocks, column, tokens,
            nope_token, nope_head, weight_head, weight_row,
            HEADS, NOPE, LATENT, ROPE_WIDTH, NOPE_UNIT, WEIGHT_UNIT, TRANSPOSED, STATIC, LARGEST, DEPTH, WIDE,
            AHEAD, EARLY,
        )  # fmt: skip
    else:
        turn = program - HEADS * blocks
        _roped(
            q_rope, cos, sin, positions, scale_in, out, (turn // groups).to(tl.int64),
            turn % groups * TOGETHER + tl.arange(0, TOGETHER), rope_token, rope_head, table_rows, cos_stride, sin_stride,
            HEADS, LATENT, ROPE_WIDTH, ROPE_UNIT, STATIC, LARGEST, PAIRS, HALF, EARLY,
        )  # fmt: skip
