"""The kernels of the norm family, put together from the steps in `rows`. Every switch is a compile-time constant.

EARLY (NVIDIA from sm90 on): a launch may overlap the end of the kernel before, so nothing is read, the weights included,
until that kernel's writes are visible (`rows.wait_in_turn`).
HOLD: what is read leaves the cache last. Everything is read before anything is written: more reads are on their way at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import (
    FIRST,
    LAST,
    NO_QUANT,
    USUAL,
    added,
    finish,
    read_rows,
    read_weight,
    row_numbers,
    wait_in_turn,
    write_rows,
    write_zeros,
)


# The strides of the scales change with the number of rows when they are column-major.
@triton.jit(do_not_specialize=["rows", "q_units", "kv_units", "scale_stride", "group_stride"])
def dual_norm(
    q, kv, q_weight, kv_weight, scale_in, q_out, scales, q_normed, kv_out,
    rows, q_units, kv_units, scale_stride, group_stride,
    Q_WIDTH: tl.constexpr, KV_WIDTH: tl.constexpr, Q_EPSILON: tl.constexpr, KV_EPSILON: tl.constexpr,
    Q_OFFSET: tl.constexpr, KV_OFFSET: tl.constexpr, Q_UNIT: tl.constexpr, KV_UNIT: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr, KEEP: tl.constexpr,
    Q_CHUNK: tl.constexpr, Q_TAIL: tl.constexpr, KV_CHUNK: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    HOLD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Norm ROWS rows of q (Q_WIDTH columns) and of kv (KV_WIDTH) per program; q comes out as QUANT says.

    SPLIT: even programs take the query side and odd ones the key/value side, which shortens the longest program.
    """
    READ: tl.constexpr = LAST if HOLD else USUAL
    if EARLY:
        wait_in_turn(rows)
    if SPLIT:
        row = row_numbers(tl.program_id(0) // 2 * ROWS, rows, ROWS)
        if tl.program_id(0) % 2 == 0:
            q_weights = read_weight(q_weight, row, Q_WIDTH, Q_CHUNK, Q_TAIL, GROUP)
            q_values = read_rows(q, row, q_units, Q_UNIT, Q_WIDTH, Q_CHUNK, Q_TAIL, GROUP, READ)
            finish(
                q_values, q_weights, q_out, q_normed, scale_in, scales, row, scale_stride, group_stride,
                Q_WIDTH, Q_EPSILON, Q_OFFSET, Q_CHUNK, Q_TAIL, QUANT, GROUP, LARGEST, SCALING, KEEP, Q_WIDTH, ROWS, FIRST,
                q.dtype.element_ty,
            )  # fmt: skip
        else:
            kv_weights = read_weight(kv_weight, row, KV_WIDTH, KV_CHUNK, 0, 0)
            kv_values = read_rows(kv, row, kv_units, KV_UNIT, KV_WIDTH, KV_CHUNK, 0, 0, READ)
            finish(
                kv_values, kv_weights, kv_out, kv_out, kv_out, scales, row, 0, 0,
                KV_WIDTH, KV_EPSILON, KV_OFFSET, KV_CHUNK, 0, NO_QUANT, 0, 0.0, False, False, KV_WIDTH, ROWS, FIRST,
                kv.dtype.element_ty,
            )  # fmt: skip
    else:
        row = row_numbers(tl.program_id(0) * ROWS, rows, ROWS)
        q_weights = read_weight(q_weight, row, Q_WIDTH, Q_CHUNK, Q_TAIL, GROUP)
        kv_weights = read_weight(kv_weight, row, KV_WIDTH, KV_CHUNK, 0, 0)
        q_values = read_rows(q, row, q_units, Q_UNIT, Q_WIDTH, Q_CHUNK, Q_TAIL, GROUP, READ)
        kv_values = read_rows(kv, row, kv_units, KV_UNIT, KV_WIDTH, KV_CHUNK, 0, 0, READ)
        finish(
            q_values, q_weights, q_out, q_normed, scale_in, scales, row, scale_stride, group_stride,
            Q_WIDTH, Q_EPSILON, Q_OFFSET, Q_CHUNK, Q_TAIL, QUANT, GROUP, LARGEST, SCALING, KEEP, Q_WIDTH, ROWS, FIRST,
            q.dtype.element_ty,
        )  # fmt: skip
        finish(
            kv_values, kv_weights, kv_out, kv_out, kv_out, scales, row, 0, 0,
            KV_WIDTH, KV_EPSILON, KV_OFFSET, KV_CHUNK, 0, NO_QUANT, 0, 0.0, False, False, KV_WIDTH, ROWS, FIRST,
            kv.dtype.element_ty,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "x_units", "residual_units", "scale_stride", "group_stride"])
def row_norm(
    x, residual, weight, scale_in, out, scales, normed, residual_out,
    rows, x_units, residual_units, scale_stride, group_stride,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, OFFSET: tl.constexpr, X_UNIT: tl.constexpr, RESIDUAL_UNIT: tl.constexpr,
    ADD: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr,
    SWIZZLED: tl.constexpr, KEEP: tl.constexpr, PADDED: tl.constexpr, ZEROS: tl.constexpr,
    CHUNK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, HOLD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Norm ROWS rows of WIDTH columns per program, with the weight plus OFFSET.

    ADD: of the float32 sum with the residual's rows, which is also written, rounded, to residual_out.
    PADDED: columns of a row of out; ZEROS, a power of two, covers those behind WIDTH.
    """
    READ: tl.constexpr = LAST if HOLD else USUAL
    if EARLY:
        wait_in_turn(rows)
    row = row_numbers(tl.program_id(0) * ROWS, rows, ROWS)
    if PADDED > WIDTH:  # which waits for nothing
        write_zeros(out, row, PADDED, WIDTH, ZEROS)
    weights = read_weight(weight, row, WIDTH, CHUNK, TAIL, GROUP)
    values = read_rows(x, row, x_units, X_UNIT, WIDTH, CHUNK, TAIL, GROUP, READ)
    if ADD:
        others = read_rows(residual, row, residual_units, RESIDUAL_UNIT, WIDTH, CHUNK, TAIL, GROUP, READ)
        values = added(values, others)
        write_rows(values, residual_out, row, WIDTH, WIDTH, CHUNK, TAIL, GROUP, USUAL)
    finish(
        values, weights, out, normed, scale_in, scales, row, scale_stride, group_stride,
        WIDTH, EPSILON, OFFSET, CHUNK, TAIL, QUANT, GROUP, LARGEST, SCALING, KEEP, PADDED, ROWS, USUAL,
        x.dtype.element_ty, SWIZZLED,
    )  # fmt: skip
