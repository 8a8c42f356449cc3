"""The Triton kernel of the MLA dual norms: both norms in one launch, with or without fp8 quantisation of the query side.

Everything that a spec fixes (widths, epsilons, group size) is a compile-time constant. What broken values give is
written in `ops.quantisation`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

NO_QUANT = tl.constexpr(0)
PER_TOKEN = tl.constexpr(1)
PER_GROUP = tl.constexpr(2)


@triton.jit
def _columns(START: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Column numbers of one chunk: in one dimension, or as (groups, columns of a group) where GROUP is not 0."""
    if GROUP > 0:
        first = tl.arange(0, CHUNK // GROUP)[:, None] * GROUP
        return START + first + tl.arange(0, GROUP)[None, :]
    else:
        return START + tl.arange(0, CHUNK)


@triton.jit
def _load(x, START: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    columns = _columns(START, CHUNK, GROUP)
    if START + CHUNK <= WIDTH:
        return tl.load(x + columns)
    else:
        return tl.load(x + columns, mask=columns < WIDTH, other=0.0)


@triton.jit
def _store(out, value, START: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    columns = _columns(START, CHUNK, GROUP)
    value = value.to(out.dtype.element_ty)
    if START + CHUNK <= WIDTH:
        tl.store(out + columns, value, eviction_policy="evict_first")
    else:
        tl.store(out + columns, value, mask=columns < WIDTH, eviction_policy="evict_first")


@triton.jit
def _read(x, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """One row or weight, chunk by chunk."""
    chunks = ()
    for i in tl.static_range(0, (WIDTH + CHUNK - 1) // CHUNK):
        chunks = chunks + (_load(x, i * CHUNK, WIDTH, CHUNK, GROUP),)
    return chunks


@triton.jit
def _normed(values, weights, EPSILON: tl.constexpr, WIDTH: tl.constexpr):
    """The norm of a row that was read, in float32, chunk by chunk."""
    wide = values[0].to(tl.float32)
    total = wide * wide
    for i in tl.static_range(1, len(values)):
        wide = values[i].to(tl.float32)
        total += wide * wide
    scale = tl.rsqrt(tl.sum(total) * (1.0 / WIDTH) + EPSILON)
    normed = ()
    for i in tl.static_range(0, len(values)):
        normed = normed + (values[i].to(tl.float32) * scale * weights[i].to(tl.float32),)
    return normed


@triton.jit
def _scale_of(bits, LARGEST: tl.constexpr, UE8M0: tl.constexpr):
    """The scale of a largest magnitude, which comes as float32 bits: as integers they order like numbers, NaN on top."""
    bits = tl.maximum(bits, 0x2EDBE6FF)  # 1e-10
    amax = bits.to(tl.float32, bitcast=True)
    if UE8M0:
        # 448 is 1.75 * 2^8 and 240 is 1.875 * 2^7, so amax / LARGEST rounds up to a power of two by integers, exactly.
        carry: tl.constexpr = 0x1FFFFF if LARGEST == 448.0 else 0x0FFFFF
        exponent: tl.constexpr = (8 if LARGEST == 448.0 else 7) << 23
        up = ((bits + carry) & 0x7F800000) - exponent
        return tl.where(bits < 0x7F800000, up.to(tl.float32, bitcast=True), amax)
    else:
        return amax * (1.0 / LARGEST)


@triton.jit
def _store_row(normed, out, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    for i in tl.static_range(0, len(normed)):
        _store(out, normed[i], i * CHUNK, WIDTH, CHUNK, 0)


@triton.jit
def _quantise_row(
    normed,
    out,
    scales,
    group_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """Store one row in fp8, and its scales: one per group, or one for the row where GROUP is 0.

    No value exceeds LARGEST by more than float32 rounding, which the conversion rounds back: nothing has to be clamped.
    """
    if GROUP > 0:
        for i in tl.static_range(0, len(normed)):
            scale = _scale_of(tl.max(tl.abs(normed[i]).to(tl.int32, bitcast=True), axis=1), LARGEST, UE8M0)
            groups = i * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            tl.store(scales + groups.to(tl.int64) * group_stride, scale, mask=groups * GROUP < WIDTH)
            _store(out, normed[i] * (1.0 / scale)[:, None], i * CHUNK, WIDTH, CHUNK, GROUP)
    else:
        most = tl.abs(normed[0]).to(tl.int32, bitcast=True)
        for i in tl.static_range(1, len(normed)):
            most = tl.maximum(most, tl.abs(normed[i]).to(tl.int32, bitcast=True))
        scale = _scale_of(tl.max(most), LARGEST, UE8M0)
        tl.store(scales, scale)
        for i in tl.static_range(0, len(normed)):
            _store(out, normed[i] * (1.0 / scale), i * CHUNK, WIDTH, CHUNK, 0)


@triton.jit
def _finish_q(
    values,
    weights,
    q_out,
    scales,
    row,
    scale_stride,
    group_stride,
    WIDTH: tl.constexpr,
    EPSILON: tl.constexpr,
    CHUNK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    UE8M0: tl.constexpr,
):
    """From one row of q as it was read to its results."""
    normed = _normed(values, weights, EPSILON, WIDTH)
    out = q_out + row * WIDTH
    if QUANT == NO_QUANT:
        _store_row(normed, out, WIDTH, CHUNK)
    else:
        _quantise_row(normed, out, scales + row * scale_stride, group_stride, WIDTH, CHUNK, GROUP, LARGEST, UE8M0)


# The strides of the scales change with the number of rows when they are column-major.
@triton.jit(do_not_specialize=["scale_stride", "group_stride"])
def dual_norm(
    q,
    kv,
    q_weight,
    kv_weight,
    q_out,
    scales,
    kv_out,
    q_stride,
    kv_stride,
    scale_stride,
    group_stride,
    Q_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    Q_EPSILON: tl.constexpr,
    KV_EPSILON: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    UE8M0: tl.constexpr,
    Q_CHUNK: tl.constexpr,
    KV_CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Norm one row of q (Q_WIDTH columns, q_stride elements apart) and of kv (KV_WIDTH, kv_stride) per program.

    SPLIT: even programs take a row's query side and odd ones its key/value side, which shortens the longest program.
    EARLY (NVIDIA from sm90 on): the launch may overlap the end of the kernel before, so nothing is read, the weights
    included, until that kernel's writes are visible.
    """
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if SPLIT:
        row = (tl.program_id(0) // 2).to(tl.int64)
        if tl.program_id(0) % 2 == 0:
            q_weights = _read(q_weight, Q_WIDTH, Q_CHUNK, GROUP)
            q_values = _read(q + row * q_stride, Q_WIDTH, Q_CHUNK, GROUP)
            _finish_q(
                q_values, q_weights, q_out, scales, row, scale_stride, group_stride,
                Q_WIDTH, Q_EPSILON, Q_CHUNK, QUANT, GROUP, LARGEST, UE8M0,
            )  # fmt: skip
        else:
            kv_weights = _read(kv_weight, KV_WIDTH, KV_CHUNK, 0)
            kv_values = _read(kv + row * kv_stride, KV_WIDTH, KV_CHUNK, 0)
            kv_normed = _normed(kv_values, kv_weights, KV_EPSILON, KV_WIDTH)
            _store_row(kv_normed, kv_out + row * KV_WIDTH, KV_WIDTH, KV_CHUNK)
    else:
        # Everything is read before anything is written: more reads are on their way at once.
        row = tl.program_id(0).to(tl.int64)
        q_weights = _read(q_weight, Q_WIDTH, Q_CHUNK, GROUP)
        kv_weights = _read(kv_weight, KV_WIDTH, KV_CHUNK, 0)
        q_values = _read(q + row * q_stride, Q_WIDTH, Q_CHUNK, GROUP)
        kv_values = _read(kv + row * kv_stride, KV_WIDTH, KV_CHUNK, 0)
        _finish_q(
            q_values, q_weights, q_out, scales, row, scale_stride, group_stride,
            Q_WIDTH, Q_EPSILON, Q_CHUNK, QUANT, GROUP, LARGEST, UE8M0,
        )  # fmt: skip
        kv_normed = _normed(kv_values, kv_weights, KV_EPSILON, KV_WIDTH)
        _store_row(kv_normed, kv_out + row * KV_WIDTH, KV_WIDTH, KV_CHUNK)
