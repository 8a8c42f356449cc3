# ruff: noqa: N803, N806, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""What is done with rows, step by step: the kernels of the norm family are put together from these.

A program holds ROWS rows at once, in chunks of columns: they are a tuple of tensors of (ROWS, columns), or of
(ROWS, groups, GROUP) where each group of columns has a scale of its own. All chunks have CHUNK columns, but for the last
where TAIL is not 0. What there is once per row is of (ROWS,), or a scalar where a program holds one row. What broken values
give is written in `ops.quantisation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_QUANT = tl.constexpr(0)
PER_TOKEN = tl.constexpr(1)
PER_GROUP = tl.constexpr(2)

# How rows are read and written: as usual, or as what leaves the cache first or last.
USUAL = tl.constexpr("")
FIRST = tl.constexpr("evict_first")
LAST = tl.constexpr("evict_last")


@triton.jit
def row_numbers(first, rows, ROWS: tl.constexpr):
    """The rows of a program. Past the last row comes the last one again: written twice, but without a mask."""
    if ROWS == 1:
        return first.to(tl.int64)
    else:
        return tl.minimum(first + tl.arange(0, ROWS), rows - 1).to(tl.int64)


@triton.jit
def _columns(START: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Column numbers of one chunk."""
    if GROUP > 0:
        first = tl.arange(0, SIZE // GROUP)[None, :, None] * GROUP
        return START + first + tl.arange(0, GROUP)[None, None, :]
    else:
        return START + tl.arange(0, SIZE)[None, :]


@triton.jit
def _beside(per_row, GROUP: tl.constexpr):
    """What there is once per row, with the dimensions of a chunk."""
    if len(per_row.shape) == 0:
        return per_row
    elif GROUP > 0:
        return per_row[:, None, None]
    else:
        return per_row[:, None]


@triton.jit
def _load(
    x, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    columns = _columns(START, SIZE, GROUP)
    if START + SIZE <= WIDTH:
        return tl.load(x + columns, eviction_policy=HINT)
    else:
        return tl.load(x + columns, mask=columns < WIDTH, other=0.0, eviction_policy=HINT)


@triton.jit
def _store(
    out, value, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    columns = _columns(START, SIZE, GROUP)
    value = value.to(out.dtype.element_ty)
    if START + SIZE <= WIDTH:
        tl.store(out + columns, value, eviction_policy=HINT)
    else:
        tl.store(out + columns, value, mask=columns < WIDTH, eviction_policy=HINT)


@triton.jit
def _read(
    x, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    BODY: tl.constexpr = WIDTH // CHUNK if TAIL > 0 else (WIDTH + CHUNK - 1) // CHUNK
    chunks = ()
    for i in tl.static_range(0, BODY):
        chunks = chunks + (_load(x, i * CHUNK, WIDTH, CHUNK, GROUP, HINT),)
    if TAIL > 0:
        chunks = chunks + (_load(x, BODY * CHUNK, WIDTH, TAIL, GROUP, HINT),)
    return chunks


@triton.jit
def read_rows(
    x, row, units, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Rows that lie units * UNIT elements apart: a constant UNIT tells the compiler to what they are aligned."""
    return _read(x + _beside(row * (units.to(tl.int64) * UNIT), GROUP), WIDTH, CHUNK, TAIL, GROUP, HINT)


@triton.jit
def read_weight(
    weight, row, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The weight once for each row, so that every thread reads the columns that it has of its row."""
    if len(row.shape) > 0:
        weight = tl.broadcast_to(weight, _beside(row, GROUP).shape)
    return _read(weight, WIDTH, CHUNK, TAIL, GROUP, USUAL)


@triton.jit
def write_rows(
    values, out, row,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Rows that follow each other without gaps."""
    out += _beside(row * WIDTH, GROUP)
    for i in tl.static_range(0, len(values)):
        _store(out, values[i], i * CHUNK, WIDTH, TAIL if TAIL > 0 and i == len(values) - 1 else CHUNK, GROUP, HINT)


@triton.jit
def added(values, others):
    """The float32 sum of two rows."""
    sums = ()
    for i in tl.static_range(0, len(values)):
        sums = sums + (values[i].to(tl.float32) + others[i].to(tl.float32),)
    return sums


@triton.jit
def _scaled(values, scale):
    """Each value in float32, times its row's scale."""
    products = ()
    for i in tl.static_range(0, len(values)):
        products = products + (values[i].to(tl.float32) * scale,)
    return products


@triton.jit
def _weighted(values, weights, OFFSET: tl.constexpr):
    """Each value in float32, times the weight of its column plus OFFSET."""
    products = ()
    for i in tl.static_range(0, len(values)):
        weight = weights[i].to(tl.float32)
        if OFFSET != 0.0:
            weight += OFFSET
        products = products + (values[i].to(tl.float32) * weight,)
    return products


@triton.jit
def _squares(values, COUNT: tl.constexpr):
    """The squares of the first COUNT chunks, added up chunk over chunk."""
    wide = values[0].to(tl.float32)
    squares = wide * wide
    for i in tl.static_range(1, COUNT):
        wide = values[i].to(tl.float32)
        squares += wide * wide
    return squares


@triton.jit
def _sum(x, ROWS: tl.constexpr):
    """Over the columns."""
    if ROWS == 1:
        return tl.sum(x)
    else:
        return tl.sum(tl.reshape(x, (ROWS, x.numel // ROWS)), axis=1)


@triton.jit
def _rms_scale(values, WIDTH: tl.constexpr, EPSILON: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr):
    """One over the root of the mean square."""
    total = _sum(_squares(values, len(values) - (1 if TAIL > 0 else 0)), ROWS)
    if TAIL > 0:
        wide = values[len(values) - 1].to(tl.float32)
        total += _sum(wide * wide, ROWS)
    return tl.rsqrt(total * (1.0 / WIDTH) + EPSILON)


@triton.jit
def _magnitude(x):
    """As integers, magnitudes order like numbers, with NaN on top."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _quant_scale(most, LARGEST: tl.constexpr, UE8M0: tl.constexpr):
    """The scale of a largest magnitude."""
    bits = tl.maximum(_magnitude(most), 0x2EDBE6FF)  # 1e-10
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
def finish(
    values, weights, out, scales, row, scale_stride, group_stride,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, OFFSET: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr, ROWS: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    """From rows as they were read, or summed, to the norm as it is written: as it is, or in fp8 with its scales.

    A row's scale is positive: where the norm is quantised, it moves out of the maximum and into the factor of every value.
    No fp8 value exceeds LARGEST by more than float32 rounding, which the conversion rounds back: nothing has to be clamped.
    """
    if QUANT == PER_TOKEN:
        _quantise_rows(
            values, _weighted(values, weights, OFFSET), out + _beside(row * WIDTH, GROUP), scales + row * scale_stride,
            WIDTH, EPSILON, CHUNK, LARGEST, UE8M0, ROWS, HINT,
        )  # fmt: skip
    else:
        scale = _rms_scale(values, WIDTH, EPSILON, TAIL, ROWS)
        if QUANT == PER_GROUP:
            products = _weighted(values, weights, OFFSET)
            for i in tl.static_range(0, len(products)):
                _quantise_groups(
                    products[i], _beside(scale, 0), out + _beside(row * WIDTH, GROUP),
                    scales + _beside(row * scale_stride, 0), group_stride, i * CHUNK, WIDTH,
                    TAIL if TAIL > 0 and i == len(products) - 1 else CHUNK, GROUP, LARGEST, UE8M0, HINT,
                )  # fmt: skip
        else:
            normed = _weighted(_scaled(values, _beside(scale, GROUP)), weights, OFFSET)
            write_rows(normed, out, row, WIDTH, CHUNK, TAIL, GROUP, HINT)


@triton.jit
def _sum_and_most(sum_a, most_a, sum_b, most_b):
    return sum_a + sum_b, tl.maximum(most_a, most_b)


@triton.jit
def _quantise_rows(
    values, products, out, scales, WIDTH: tl.constexpr, EPSILON: tl.constexpr, CHUNK: tl.constexpr,
    LARGEST: tl.constexpr, UE8M0: tl.constexpr, ROWS: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Rows in fp8 with a scale each. The mean square and the largest magnitude come from one reduction: fewer barriers."""
    bits = _magnitude(products[0])
    for i in tl.static_range(1, len(products)):
        bits = tl.maximum(bits, _magnitude(products[i]))
    total, most = tl.reduce((_squares(values, len(values)), bits), 1, _sum_and_most)
    scale = tl.rsqrt(total * (1.0 / WIDTH) + EPSILON)
    quant_scale = _quant_scale(most.to(tl.float32, bitcast=True) * scale, LARGEST, UE8M0)
    tl.store(scales + tl.zeros((ROWS,), tl.int32), quant_scale)
    factor = (scale * (1.0 / quant_scale))[:, None]
    for i in tl.static_range(0, len(products)):
        _store(out, products[i] * factor, i * CHUNK, WIDTH, CHUNK, 0, HINT)


@triton.jit
def _quantise_groups(
    products, scale, out, scales, group_stride, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr, LARGEST: tl.constexpr, UE8M0: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """One chunk in fp8, and the scales of its groups.

    For programs of one row: with several, Triton 3.6 was seen to store wrong scales (768 columns, two rows, two warps).
    """
    most = tl.max(_magnitude(products), axis=2).to(tl.float32, bitcast=True)
    quant_scale = _quant_scale(most * scale, LARGEST, UE8M0)
    groups = START // GROUP + tl.arange(0, SIZE // GROUP)[None, :]
    tl.store(scales + groups.to(tl.int64) * group_stride, quant_scale, mask=groups * GROUP < WIDTH)
    _store(out, products * (scale * (1.0 / quant_scale))[:, :, None], START, WIDTH, SIZE, GROUP, HINT)
