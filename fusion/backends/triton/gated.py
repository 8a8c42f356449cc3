# ruff: noqa: N803 (constants of a kernel are written in capitals)
"""The kernel of gated norms: ROWS heads of one or several tokens per program, a head in one piece.

What the constants mean is said in `kernels`, and what broken values give in `ops.quantisation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import NO_QUANT, PER_TOKEN, STATIC, magnitude, quant_scale, rounded, saturated, wait_in_turn, wide


@triton.jit(do_not_specialize=["rows", "x_token", "x_head", "gate_token", "gate_head", "scale_stride", "group_stride"])
def gated_norm(
    x, gate, weight, scale_in, kept, out, scales,
    rows, x_token, x_head, gate_token, gate_head, scale_stride, group_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, EPSILON: tl.constexpr, OFFSET: tl.constexpr,
    X_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr, SIGMOID: tl.constexpr, NORM_FIRST: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Norm heads of WIDTH columns, with the activated gate as a factor behind the norm (NORM_FIRST) or before it.

    One scale per token: a program takes all heads of a token, ROWS being the next power of two. Otherwise any ROWS heads.
    x_token, x_head: strides in units of X_UNIT elements.
    """
    if EARLY:
        wait_in_turn(rows if QUANT == PER_TOKEN else rows // HEADS)
    if QUANT == PER_TOKEN:
        token = tl.program_id(0).to(tl.int64)
        head = tl.arange(0, ROWS).to(tl.int64)
        there = head < HEADS
        number = token * HEADS + head
    else:
        number = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1).to(tl.int64)
        token = number // HEADS
        head = number % HEADS
        there = number >= 0
    column = tl.arange(0, BLOCK)[None, :]
    mask = there[:, None] & (column < WIDTH)
    x_at = (token * x_token + head * x_head) * X_UNIT
    gate_at = (token * gate_token + head * gate_head) * GATE_UNIT
    value = wide(tl.load(x + x_at[:, None] + column, mask=mask, other=0.0))
    wide_gate = wide(tl.load(gate + gate_at[:, None] + column, mask=mask, other=0.0))
    factor = wide(tl.load(weight + column, mask=column < WIDTH, other=0.0))
    if OFFSET != 0.0:
        factor += OFFSET
    activated = tl.sigmoid(wide_gate)
    if not SIGMOID:
        activated *= wide_gate
    if not NORM_FIRST:
        value *= activated
    scale = tl.rsqrt(tl.sum(value * value, axis=1) * (1.0 / WIDTH) + EPSILON)
    normed = value * scale[:, None] * factor
    if NORM_FIRST:
        normed *= activated
    if QUANT != NO_QUANT:
        normed = rounded(normed, x.dtype.element_ty)
    if KEPT:
        tl.store(kept + number[:, None] * WIDTH + column, normed.to(kept.dtype.element_ty), mask=mask)
    at = out + number[:, None] * WIDTH + column
    if QUANT == NO_QUANT:
        result = normed
    elif QUANT == STATIC:
        result = saturated(normed * (1.0 / tl.load(scale_in)), LARGEST)
    elif QUANT == PER_TOKEN:
        most = tl.max(tl.max(magnitude(normed), axis=1), axis=0).to(tl.float32, bitcast=True)
        own, inverse = quant_scale(most, LARGEST, SCALING)
        tl.store(scales + token * scale_stride, own)
        result = normed * inverse
    elif GROUP == BLOCK:
        own, inverse = quant_scale(tl.max(magnitude(normed), axis=1).to(tl.float32, bitcast=True), LARGEST, SCALING)
        tl.store(scales + token * scale_stride + head * group_stride.to(tl.int64), own)
        result = normed * inverse[:, None]
    else:
        # Groups of all heads in one dimension: a third one has made Triton 3.6 store wrong scales.
        each: tl.constexpr = BLOCK // GROUP
        result = tl.reshape(normed, (ROWS * each, GROUP))
        own, inverse = quant_scale(tl.max(magnitude(result), axis=1).to(tl.float32, bitcast=True), LARGEST, SCALING)
        result *= inverse[:, None]
        counted = tl.arange(0, ROWS * each)
        number = tl.minimum(tl.program_id(0) * ROWS + counted // each, rows - 1).to(tl.int64)
        group = counted % each
        scale_at = (number // HEADS) * scale_stride + ((number % HEADS) * (WIDTH // GROUP) + group) * group_stride
        tl.store(scales + scale_at, own, mask=group * GROUP < WIDTH)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        at = out + number[:, None] * WIDTH + column
        mask = column < WIDTH
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)
