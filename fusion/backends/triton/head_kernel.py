# ruff: noqa: N803, N806 (constants of a kernel are written in capitals)
"""The kernel of `qk_norm_rope`: the norms of heads and the rope behind them.

A program takes heads of one or more tokens, either the query's or the key's. A thread reads sixteen bytes of each half of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import wait_in_turn
from .turning import angle, read_pairs, turned, write_pairs


@triton.jit
def _heads(
    x, weight, out, cos, sin, positions, first, part, tokens, token_stride, head_stride, table_rows, cos_stride, sin_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, EPSILON: tl.constexpr, OFFSET: tl.constexpr,
    UNIT: tl.constexpr, NUMBERED: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Norm and turn ROWS of the heads of TOKENS tokens. REST, a power of two or 0, covers the columns behind those that are turned."""
    row, zero = part * ROWS + tl.arange(0, ROWS), tl.zeros((ROWS,), tl.int64)
    # One token has one position: what all rows have is a number until it meets them.
    token = first + (part * ROWS // HEADS if HEADS % ROWS == 0 else row // HEADS)
    position = token % table_rows
    if NUMBERED:
        position = tl.load(positions + tl.minimum(token, tokens - 1)).to(tl.int64)
    token, position, head = token + zero, position + zero, row % HEADS
    mask = (row < TOKENS * HEADS) & (token < tokens)
    start = (token * token_stride + head * head_stride) * UNIT
    at = (token * HEADS + head) * WIDTH
    one_half, other_half = read_pairs(x, start, mask, TURNED, HALF, PAIRS)
    # Each row reads what all share, in the layout of its own columns: nothing goes through shared memory.
    one_weight, other_weight = read_pairs(weight, zero, mask, TURNED, HALF, PAIRS)
    squares = tl.sum(one_half * one_half + other_half * other_half, 1)
    if REST:
        column = tl.arange(0, REST)[None, :]
        inside = mask[:, None] & (column < WIDTH - TURNED)
        rest = tl.load(x + start[:, None] + TURNED + column, mask=inside, other=0.0).to(tl.float32)
        rest_weight = tl.load(weight + zero[:, None] + TURNED + column, mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    c = angle(cos, position, table_rows, cos_stride, TURNED, HALF)
    s = angle(sin, position, table_rows, sin_stride, TURNED, HALF)
    scale = tl.rsqrt(squares / WIDTH + EPSILON)[:, None]
    one_half, other_half = one_half * scale * (one_weight + OFFSET), other_half * scale * (other_weight + OFFSET)
    one_half, other_half = turned(one_half, other_half, c, s)
    write_pairs(out, at, mask, one_half, other_half, TURNED, HALF, PAIRS)
    if REST:
        rest = (rest * scale * (rest_weight + OFFSET)).to(out.dtype.element_ty)
        tl.store(out + at[:, None] + TURNED + column, rest, mask=inside)


@triton.jit(
    do_not_specialize=["tokens", "q_token", "q_head", "k_token", "k_head", "table_rows", "cos_stride", "sin_stride"]
)
def head_norms_rope(
    q, k, q_weight, k_weight, cos, sin, positions, q_out, k_out,
    tokens, q_token, q_head, k_token, k_head, table_rows, cos_stride, sin_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    Q_EPSILON: tl.constexpr, K_EPSILON: tl.constexpr, Q_OFFSET: tl.constexpr, K_OFFSET: tl.constexpr,
    Q_UNIT: tl.constexpr, K_UNIT: tl.constexpr, NUMBERED: tl.constexpr, PAIRS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """NUMBERED: positions say which row of cos and sin a token takes; without them its own number does."""
    if EARLY:
        wait_in_turn(tokens)
    OF_Q: tl.constexpr = (TOKENS * Q_HEADS + ROWS - 1) // ROWS
    PARTS: tl.constexpr = OF_Q + (TOKENS * K_HEADS + ROWS - 1) // ROWS
    part = tl.program_id(0) % PARTS
    first = (tl.program_id(0) // PARTS).to(tl.int64) * TOKENS
    if part < OF_Q:
        _heads(
            q, q_weight, q_out, cos, sin, positions, first, part, tokens, q_token, q_head, table_rows, cos_stride, sin_stride,
            Q_HEADS, WIDTH, TURNED, Q_EPSILON, Q_OFFSET, Q_UNIT, NUMBERED, PAIRS, HALF, REST, TOKENS, ROWS,
        )  # fmt: skip
    else:
        _heads(
            k, k_weight, k_out, cos, sin, positions, first, part - OF_Q, tokens, k_token, k_head, table_rows, cos_stride,
            sin_stride, K_HEADS, WIDTH, TURNED, K_EPSILON, K_OFFSET, K_UNIT, NUMBERED, PAIRS, HALF, REST, TOKENS, ROWS,
        )  # fmt: skip
