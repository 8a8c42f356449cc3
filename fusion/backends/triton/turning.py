# ruff: noqa: N803 (constants of a kernel are written in capitals)
"""The rope in a kernel: reading pairs of columns, turning them, writing them.

Rows are those that start at `at`, a block of (rows,), with a mask of them. What positions outside the tables give is written in
`ops.rope`. Interleaved columns are read and written as they lie, two of a pair by one thread, and parted in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERLEAVED = tl.constexpr(0)
HALVES = tl.constexpr(1)
INTERLEAVED_TO_HALVES = tl.constexpr(2)
NOT_TURNED = tl.constexpr(3)


@triton.jit
def angle(table, position, positions, stride, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """The cos or sin of positions, (rows, HALF) in float32; NaN where a position has no row."""
    pair = tl.arange(0, HALF)[None, :]
    inside = ((position >= 0) & (position < positions))[:, None]
    at = tl.where(inside, position[:, None], 0) * stride
    value = tl.load(table + at + pair, mask=inside & (pair < WIDTH // 2), other=0.0).to(tl.float32)
    return tl.where(inside, value, float("nan"))


@triton.jit
def _pairs(at, mask, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Where the columns of the pairs are, as halves and as neighbours, and which of them there are."""
    pair = tl.arange(0, HALF)[None, :]
    return at[:, None] + pair, at[:, None] + 2 * pair, mask[:, None] & (pair < WIDTH // 2)


@triton.jit
def read_pairs(x, at, mask, WIDTH: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """The first and the second columns of all pairs of rows that start at `at`, (rows, HALF) in float32."""
    halves, pairs, inside = _pairs(at, mask, WIDTH, HALF)
    if PAIRS == HALVES:
        first = tl.load(x + halves, mask=inside, other=0.0)
        second = tl.load(x + halves + WIDTH // 2, mask=inside, other=0.0)
    else:
        both = tl.join(pairs, pairs + 1)
        first, second = tl.split(tl.load(x + both, mask=tl.join(inside, inside), other=0.0))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def turned(first, second, cos, sin):
    """Each pair turned by its angle."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def write_pairs(out, at, mask, first, second, WIDTH: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Write the columns of all pairs to rows that start at `at`, rounded to what they are written to."""
    halves, pairs, inside = _pairs(at, mask, WIDTH, HALF)
    first, second = first.to(out.dtype.element_ty), second.to(out.dtype.element_ty)
    if PAIRS == HALVES or PAIRS == INTERLEAVED_TO_HALVES:  # noqa: SIM109 (Triton compares constants one by one)
        tl.store(out + halves, first, mask=inside)
        tl.store(out + halves + WIDTH // 2, second, mask=inside)
    else:
        both = tl.join(pairs, pairs + 1)
        tl.store(out + both, tl.join(first, second), mask=tl.join(inside, inside))
