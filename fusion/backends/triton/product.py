# ruff: noqa: N803, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""The kernel of a gated MLP's inside, silu(gate) * up, quantised: the parts of a row are independent but for one scale per token.

What the constants mean is said in `kernels`, and what broken values give in `ops.quantisation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import PER_GROUP, PER_TOKEN, STATIC, clamped, magnitude, quant_scale, rounded, saturated, wait_in_turn, wide


@triton.jit
def _product(gate, up, LIMIT: tl.constexpr):
    value, other = wide(gate), wide(up)
    if LIMIT > 0.0:
        value = tl.where(value > LIMIT, LIMIT, value)
        other = clamped(other, LIMIT)
    return rounded(value * tl.sigmoid(value) * other, gate.dtype)


@triton.jit(do_not_specialize=["rows", "gate_units", "up_units", "scale_stride", "group_stride"])
def silu_mul(
    gate, up, scale_in, kept, out, scales,
    rows, gate_units, up_units, scale_stride, group_stride,
    WIDTH: tl.constexpr, LIMIT: tl.constexpr, GATE_UNIT: tl.constexpr, UP_UNIT: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of rows of WIDTH columns. One scale per token: CHUNK columns at a time, all of a row in a program.

    Otherwise GROUPS groups of GROUP columns per program, and `rows` counts the groups. LIMIT 0: nothing is clamped.
    """
    if EARLY:
        wait_in_turn(rows if QUANT == PER_TOKEN else rows // ((WIDTH + GROUP - 1) // GROUP))
    if QUANT == PER_TOKEN:
        row = tl.program_id(0).to(tl.int64)
        bits = tl.zeros((CHUNK,), tl.int32)
        gates, ups, products = (), (), ()
        for i in tl.static_range(0, (WIDTH + CHUNK - 1) // CHUNK):  # all before the first is used
            column = i * CHUNK + tl.arange(0, CHUNK)
            gates = gates + (tl.load(gate + row * gate_units * GATE_UNIT + column, mask=column < WIDTH, other=0.0),)
            ups = ups + (tl.load(up + row * up_units * UP_UNIT + column, mask=column < WIDTH, other=0.0),)
        for i in tl.static_range(0, len(gates)):
            column = i * CHUNK + tl.arange(0, CHUNK)
            product = _product(gates[i], ups[i], LIMIT)
            if KEPT:
                tl.store(kept + row * WIDTH + column, product.to(kept.dtype.element_ty), mask=column < WIDTH)
            bits = tl.maximum(bits, magnitude(product))
            products = products + (product,)
        own, inverse = quant_scale(tl.max(bits).to(tl.float32, bitcast=True), LARGEST, SCALING)
        tl.store(scales + row * scale_stride, own)
        for i in tl.static_range(0, len(products)):
            column = i * CHUNK + tl.arange(0, CHUNK)
            value = products[i] * inverse
            tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=column < WIDTH)
    else:
        # Groups of all rows, counted through: rows of any width leave no program half empty.
        parts: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        number = tl.minimum(tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), rows - 1)
        row = (number // parts).to(tl.int64)
        group = number % parts
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = column < WIDTH
        at_gate, at_up = (row * gate_units * GATE_UNIT)[:, None] + column, (row * up_units * UP_UNIT)[:, None] + column
        gates, ups = tl.load(gate + at_gate, mask=mask, other=0.0), tl.load(up + at_up, mask=mask, other=0.0)
        value = _product(gates, ups, LIMIT)
        if KEPT:
            tl.store(kept + (row * WIDTH)[:, None] + column, value.to(kept.dtype.element_ty), mask=mask)
        if QUANT == PER_GROUP:
            own, inverse = quant_scale(tl.max(magnitude(value), axis=1).to(tl.float32, bitcast=True), LARGEST, SCALING)
            tl.store(scales + row * scale_stride + group.to(tl.int64) * group_stride, own)
            value *= inverse[:, None]
        elif QUANT == STATIC:
            value = saturated(value * (1.0 / tl.load(scale_in)), LARGEST)
        tl.store(out + (row * WIDTH)[:, None] + column, value.to(out.dtype.element_ty), mask=mask)
