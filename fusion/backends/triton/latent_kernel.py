# ruff: noqa: N803, N806 (constants of a kernel are written in capitals)
"""The kernel of `mla_norm_rope_cache`: the query side as `dual_norm` has it, the key/value side straight to its slot.

What the constants of the norms mean is said in `kernels`, what broken input gives in `ops.rope` and `ops.quantisation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import (
    FIRST,
    LAST,
    OF_SCALE,
    USUAL,
    all_rounded,
    finish,
    magnitude,
    quant_scale,
    read_rows,
    read_weight,
    rms_scale,
    rounded,
    saturated,
    scaled_by,
    wait_in_turn,
    weighted_by,
    write_chunk,
)
from .turning import NOT_TURNED, angle, read_pairs, turned, write_pairs

PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(1)
DS_MLA = tl.constexpr(2)


@triton.jit
def _write_entry(
    result, first, second, cache, cache_scales, cache_rope, cache_scale, at,
    KV_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, KV_CHUNK: tl.constexpr,
    FORM: tl.constexpr, CACHE_LARGEST: tl.constexpr,
):  # fmt: skip
    """One entry, from the normed latent in chunks and the turned pairs."""
    one = tl.zeros((1,), tl.int64)
    if FORM == DS_MLA:
        value = result[0]
        group: tl.constexpr = 128
        most = tl.max(magnitude(value), axis=2).to(tl.float32, bitcast=True)
        own, inverse = quant_scale(most, 448.0, OF_SCALE)
        groups = tl.arange(0, KV_CHUNK // group)[None, :]
        tl.store(cache_scales + (at + KV_WIDTH) // 4 + groups, own, mask=groups * group < KV_WIDTH)
        write_chunk(cache + at, value * inverse[:, :, None], 0, KV_WIDTH, KV_CHUNK, group, USUAL)
        start: tl.constexpr = KV_WIDTH + KV_WIDTH // group * 4
        write_pairs(cache_rope, (at + start + one) // 2, one == 0, first, second, ROPE_WIDTH, HALF, PAIRS)
    else:
        if FORM == FP8:
            scale = 1.0 / tl.load(cache_scale)
            first, second = saturated(first * scale, CACHE_LARGEST), saturated(second * scale, CACHE_LARGEST)
        for i in tl.static_range(0, len(result)):
            value = result[i]
            if FORM == FP8:
                value = saturated(value * scale, CACHE_LARGEST)
            write_chunk(cache + at, value, i * KV_CHUNK, KV_WIDTH, KV_CHUNK, 0, USUAL)
        write_pairs(cache, at + KV_WIDTH + one, one == 0, first, second, ROPE_WIDTH, HALF, PAIRS)


@triton.jit
def _read_entry(
    kv, k_rope, kv_weight, cos, sin, positions, slots,
    row, kv_units, rope_units, table_rows, cos_stride, sin_stride,
    KV_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, KV_UNIT: tl.constexpr, ROPE_UNIT: tl.constexpr,
    PAIRS: tl.constexpr, FORM: tl.constexpr, HALF: tl.constexpr, KV_CHUNK: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """What the key/value side of one token is made of: slot, weights, latent, the turned pairs. Only cos and sin wait for another read."""
    group: tl.constexpr = 128 if FORM == DS_MLA else 0
    one = tl.zeros((1,), tl.int64)
    position = tl.load(positions + row + one).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    weights = read_weight(kv_weight, row, KV_WIDTH, KV_CHUNK, 0, group)
    values = read_rows(kv, row, kv_units, KV_UNIT, KV_WIDTH, KV_CHUNK, 0, group, READ)
    at = row * (rope_units.to(tl.int64) * ROPE_UNIT) + one
    first, second = read_pairs(k_rope, at, one == 0, ROPE_WIDTH, HALF, PAIRS)
    if PAIRS != NOT_TURNED:
        c = angle(cos, position, table_rows, cos_stride, ROPE_WIDTH, HALF)
        s = angle(sin, position, table_rows, sin_stride, ROPE_WIDTH, HALF)
        first, second = turned(first, second, c, s)
    first, second = rounded(first, k_rope.dtype.element_ty), rounded(second, k_rope.dtype.element_ty)
    return slot, weights, values, first, second


@triton.jit
def _finish_entry(
    slot, weights, values, first, second, cache_scale, cache, cache_scales, cache_rope,
    entries, page_size, page_units, slot_units,
    KV_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, KV_EPSILON: tl.constexpr, KV_OFFSET: tl.constexpr,
    ENTRY_UNIT: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr, CACHE_LARGEST: tl.constexpr, HALF: tl.constexpr,
    KV_CHUNK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Norm the latent and write the entry, if its slot is one."""
    result = scaled_by(weighted_by(values, weights, KV_OFFSET), rms_scale(values, KV_WIDTH, KV_EPSILON, 0, 1))
    if FORM != PLAIN:
        result = all_rounded(result, TYPE)
    if (slot >= 0) & (slot < entries):
        page = slot // page_size
        _write_entry(
            result, first, second, cache, cache_scales, cache_rope, cache_scale,
            (page * page_units + (slot - page * page_size) * slot_units) * ENTRY_UNIT,
            KV_WIDTH, ROPE_WIDTH, HALF, PAIRS, KV_CHUNK, FORM, CACHE_LARGEST,
        )  # fmt: skip


# Everything that changes with the batch or the cache's size: one compiled kernel for all of them.
@triton.jit(
    do_not_specialize=[
        "rows", "q_units", "kv_units", "rope_units", "scale_stride", "group_stride", "table_rows", "cos_stride",
        "sin_stride", "entries", "page_size", "page_units", "slot_units",
    ]
)  # fmt: skip
def norm_rope_cache(
    q, kv, k_rope, q_weight, kv_weight, cos, sin, positions, slots, scale_in, cache_scale,
    q_out, scales, cache, cache_scales, cache_rope,
    rows, q_units, kv_units, rope_units, scale_stride, group_stride, table_rows, cos_stride, sin_stride,
    entries, page_size, page_units, slot_units,
    Q_WIDTH: tl.constexpr, KV_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    Q_EPSILON: tl.constexpr, KV_EPSILON: tl.constexpr, Q_OFFSET: tl.constexpr, KV_OFFSET: tl.constexpr,
    Q_UNIT: tl.constexpr, KV_UNIT: tl.constexpr, ROPE_UNIT: tl.constexpr, ENTRY_UNIT: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr,
    PAIRS: tl.constexpr, FORM: tl.constexpr, CACHE_LARGEST: tl.constexpr, HALF: tl.constexpr,
    Q_CHUNK: tl.constexpr, Q_TAIL: tl.constexpr, KV_CHUNK: tl.constexpr, SPLIT: tl.constexpr, HOLD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One token per program, or per two of them: SPLIT gives the even ones the query side, the odd ones the entry.

    Strides are counted in units of Q_UNIT and the like elements, which tells the compiler to what rows are aligned.
    """
    READ: tl.constexpr = LAST if HOLD else USUAL
    if EARLY:
        wait_in_turn(rows)
    if SPLIT:
        row = (tl.program_id(0) // 2).to(tl.int64)
        if tl.program_id(0) % 2 == 0:
            weights = read_weight(q_weight, row, Q_WIDTH, Q_CHUNK, Q_TAIL, GROUP)
            values = read_rows(q, row, q_units, Q_UNIT, Q_WIDTH, Q_CHUNK, Q_TAIL, GROUP, READ)
            finish(
                values, weights, q_out, q_out, scale_in, scales, row, scale_stride, group_stride,
                Q_WIDTH, Q_EPSILON, Q_OFFSET, Q_CHUNK, Q_TAIL, QUANT, GROUP, LARGEST, SCALING, False, Q_WIDTH, 1, FIRST,
                q.dtype.element_ty,
            )  # fmt: skip
        else:
            slot, kv_weights, latent, first, second = _read_entry(
                kv, k_rope, kv_weight, cos, sin, positions, slots,
                row, kv_units, rope_units, table_rows, cos_stride, sin_stride,
                KV_WIDTH, ROPE_WIDTH, KV_UNIT, ROPE_UNIT, PAIRS, FORM, HALF, KV_CHUNK, READ,
            )  # fmt: skip
            _finish_entry(
                slot, kv_weights, latent, first, second, cache_scale, cache, cache_scales, cache_rope,
                entries, page_size, page_units, slot_units, KV_WIDTH, ROPE_WIDTH, KV_EPSILON, KV_OFFSET, ENTRY_UNIT,
                PAIRS, FORM, CACHE_LARGEST, HALF, KV_CHUNK, kv.dtype.element_ty,
            )  # fmt: skip
    else:
        # All reads before the first write, which the compiler would not move them past.
        row = tl.program_id(0).to(tl.int64)
        slot, kv_weights, latent, first, second = _read_entry(
            kv, k_rope, kv_weight, cos, sin, positions, slots,
            row, kv_units, rope_units, table_rows, cos_stride, sin_stride,
            KV_WIDTH, ROPE_WIDTH, KV_UNIT, ROPE_UNIT, PAIRS, FORM, HALF, KV_CHUNK, READ,
        )  # fmt: skip
        weights = read_weight(q_weight, row, Q_WIDTH, Q_CHUNK, Q_TAIL, GROUP)
        values = read_rows(q, row, q_units, Q_UNIT, Q_WIDTH, Q_CHUNK, Q_TAIL, GROUP, READ)
        finish(
            values, weights, q_out, q_out, scale_in, scales, row, scale_stride, group_stride,
            Q_WIDTH, Q_EPSILON, Q_OFFSET, Q_CHUNK, Q_TAIL, QUANT, GROUP, LARGEST, SCALING, False, Q_WIDTH, 1, FIRST,
            q.dtype.element_ty,
        )  # fmt: skip
        _finish_entry(
            slot, kv_weights, latent, first, second, cache_scale, cache, cache_scales, cache_rope,
            entries, page_size, page_units, slot_units, KV_WIDTH, ROPE_WIDTH, KV_EPSILON, KV_OFFSET, ENTRY_UNIT,
            PAIRS, FORM, CACHE_LARGEST, HALF, KV_CHUNK, kv.dtype.element_ty,
        )  # fmt: skip
