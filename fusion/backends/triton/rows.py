# ruff: noqa: N803, N806, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""What is done with rows, step by step: the kernels of the norm family are put together from these.

A program holds ROWS rows at once, in chunks of columns: they are a tuple of tensors of (ROWS, columns), or of
(ROWS, groups, GROUP) where each group of columns has a scale of its own. All chunks have CHUNK columns, but for the last
where TAIL is not 0. What there is once per row is of (ROWS,), or a scalar where a program holds one row. What broken values
give is written in `ops.quantisation`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from ...formats import FORMATS
from ...linear_ops import MOST
from ...ops.quantisation import Scaling

NO_QUANT = tl.constexpr(0)
PER_TOKEN = tl.constexpr(FORMATS["token"].mode)
PER_GROUP = tl.constexpr(FORMATS["group"].mode)
STATIC = tl.constexpr(FORMATS["static"].mode)
MXFP8 = tl.constexpr(FORMATS["mxfp8"].mode)
MXFP4 = tl.constexpr(FORMATS["mxfp4"].mode)
NVFP4 = tl.constexpr(FORMATS["nvfp4"].mode)

FEW = tl.constexpr(MOST)
"""Tokens of a product that is layerfuse's (`linear_ops`)."""
OF_SCALE = tl.constexpr(Scaling.OF_SCALE.value)
POWER_OF_TWO = tl.constexpr(Scaling.POWER_OF_TWO.value)
OF_AMAX = tl.constexpr(Scaling.OF_AMAX.value)

# How rows are read and written: as usual, or as what leaves the cache first or last.
USUAL = tl.constexpr("")
FIRST = tl.constexpr("evict_first")
LAST = tl.constexpr("evict_last")
# Read from memory at every reading: another GPU writes there meanwhile.
FRESH = tl.constexpr("volatile")

# bfloat16 on NVIDIA, in pairs: the compiler rounds what it does not store one by one, at an eighth of the rate.
_ROUND = tl.constexpr(
    "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
)
_WIDEN = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


def in_pairs(_semantic: Any = None) -> tl.constexpr:
    """Whether what is compiled is for NVIDIA GPUs that round in pairs, from sm80 on: not in the interpreter."""
    options = None if _semantic is None else _semantic.builder.options
    if options is None or options.backend_name != "cuda":
        return tl.constexpr(False)
    return tl.constexpr(int("".join(filter(str.isdigit, options.arch))) >= 80)


in_pairs.__triton_builtin__ = True  # type: ignore[attr-defined] # is called with _semantic


@triton.jit
def wait_in_turn(tokens):
    """Wait for what the kernel in front writes, and let the next one start: with few tokens before that.

    A linear of few tokens fetches its weights meanwhile. With more no such linear follows, and programs that come up early and wait
    take the place of those that could run: the same norm of 64 rows over and over took 1.4 times as long in the median, and up to 2.2.
    """
    if tokens <= FEW:
        tl_cuda.gdc_launch_dependents()
    tl_cuda.gdc_wait()
    tl_cuda.gdc_launch_dependents()


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
def read_chunk(
    x, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    """One chunk of a row, or of rows where x is a pointer for each; zeros behind its end."""
    columns = _columns(START, SIZE, GROUP)
    if HINT == FRESH:
        return tl.load(x + columns, mask=columns < WIDTH, other=0, volatile=True)
    elif START + SIZE <= WIDTH:
        return tl.load(x + columns, eviction_policy=HINT)
    else:
        return tl.load(x + columns, mask=columns < WIDTH, other=0.0, eviction_policy=HINT)


@triton.jit
def write_chunk(
    out, value, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    """One chunk, rounded to what it is written to."""
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
        chunks = chunks + (read_chunk(x, i * CHUNK, WIDTH, CHUNK, GROUP, HINT),)
    if TAIL > 0:
        chunks = chunks + (read_chunk(x, BODY * CHUNK, WIDTH, TAIL, GROUP, HINT),)
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
    values, out, row, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Rows that lie STRIDE elements apart."""
    out += _beside(row * STRIDE, GROUP)
    for i in tl.static_range(0, len(values)):
        write_chunk(out, values[i], i * CHUNK, WIDTH, TAIL if TAIL > 0 and i == len(values) - 1 else CHUNK, GROUP, HINT)


@triton.jit
def wide(value):
    """In float32."""
    if value.dtype == tl.bfloat16 and in_pairs() and value.numel > 1:
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [value], tl.float32, is_pure=True, pack=2)
    return value.to(tl.float32)


@triton.jit
def added(values, others):
    """The float32 sum of two rows."""
    sums = ()
    for i in tl.static_range(0, len(values)):
        sums = sums + (wide(values[i]) + wide(others[i]),)
    return sums


@triton.jit
def scaled_by(values, scale):
    """Each value in float32, times its row's scale."""
    products = ()
    for i in tl.static_range(0, len(values)):
        products = products + (wide(values[i]) * scale,)
    return products


@triton.jit
def weighted_by(values, weights, OFFSET: tl.constexpr):
    """Each value in float32, times the weight of its column plus OFFSET."""
    products = ()
    for i in tl.static_range(0, len(values)):
        weight = wide(weights[i])
        if OFFSET != 0.0:
            weight += OFFSET
        products = products + (wide(values[i]) * weight,)
    return products


@triton.jit
def rounded(value, TYPE: tl.constexpr):
    """In float32, as it comes back from memory in TYPE."""
    if tl.bfloat16 == TYPE and in_pairs() and value.numel > 1:
        return tl.inline_asm_elementwise(_ROUND, "=r,=r,r,r", [value], tl.float32, is_pure=True, pack=2)
    return value.to(TYPE).to(tl.float32)


@triton.jit
def all_rounded(values, TYPE: tl.constexpr):
    """Each value in float32, as it comes back from memory in TYPE."""
    results = ()
    for i in tl.static_range(0, len(values)):
        results = results + (rounded(values[i], TYPE),)
    return results


@triton.jit
def _squares(values, COUNT: tl.constexpr):
    """The squares of the first COUNT chunks, added up chunk over chunk."""
    value = wide(values[0])
    squares = value * value
    for i in tl.static_range(1, COUNT):
        value = wide(values[i])
        squares += value * value
    return squares


@triton.jit
def _sum(x, ROWS: tl.constexpr):
    """Over the columns."""
    if ROWS == 1:
        return tl.sum(x)
    else:
        return tl.sum(tl.reshape(x, (ROWS, x.numel // ROWS)), axis=1)


@triton.jit
def rms_scale(values, WIDTH: tl.constexpr, EPSILON: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr):
    """One over the root of the mean square."""
    total = _sum(_squares(values, len(values) - (1 if TAIL > 0 else 0)), ROWS)
    if TAIL > 0:
        value = wide(values[len(values) - 1])
        total += _sum(value * value, ROWS)
    return tl.rsqrt(total * (1.0 / WIDTH) + EPSILON)


@triton.jit
def magnitude(x):
    """As integers, magnitudes order like numbers, with NaN on top."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _largest(values):
    """The largest magnitude of each group, chunk by chunk."""
    found = ()
    for i in tl.static_range(0, len(values)):
        found = found + (tl.max(magnitude(values[i]), axis=2).to(tl.float32, bitcast=True),)
    return found


@triton.jit
def quant_scale(most, LARGEST: tl.constexpr, SCALING: tl.constexpr):
    """The scale of a largest magnitude, and what values are multiplied by (`quantisation.Scaling`)."""
    bits = tl.maximum(magnitude(most), 0x2EDBE6FF)  # 1e-10
    amax = bits.to(tl.float32, bitcast=True)
    if SCALING == POWER_OF_TWO:
        # 448 is 1.75 * 2^8 and 240 is 1.875 * 2^7, so amax / LARGEST rounds up to a power of two by integers, exactly.
        carry: tl.constexpr = 0x1FFFFF if LARGEST == 448.0 else 0x0FFFFF
        exponent: tl.constexpr = (8 if LARGEST == 448.0 else 7) << 23
        up = ((bits + carry) & 0x7F800000) - exponent
        own = tl.where(bits < 0x7F800000, up.to(tl.float32, bitcast=True), amax)
    else:
        own = amax * (1.0 / LARGEST)
    return own, LARGEST / amax if SCALING == OF_AMAX else 1.0 / own


@triton.jit
def clamped(x, LARGEST: tl.constexpr):
    """Between -LARGEST and LARGEST; NaN stays NaN."""
    x = tl.where(x > LARGEST, LARGEST, x)
    return tl.where(x < -LARGEST, -LARGEST, x)


@triton.jit
def saturated(x, LARGEST: tl.constexpr):
    """What becomes fp8 and is LARGEST at most: NVIDIA's conversion sees to that itself."""
    if in_pairs():
        return x
    return clamped(x, LARGEST)


@triton.jit
def finish(
    values, weights, out, normed, scale_in, scales, row, scale_stride, group_stride,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, OFFSET: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr, KEEP: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, HINT: tl.constexpr, TYPE: tl.constexpr,
    SWIZZLED: tl.constexpr = False,
):  # fmt: skip
    """From rows as they were read, or summed, to the norm as it is written: as it is, or quantised with its scales.

    What is quantised is the norm in TYPE, the dtype of the activations. KEEP: it is written too, to normed.
    No dynamic fp8 value exceeds LARGEST by more than float32 rounding, which the conversion rounds back: only static ones
    have to be clamped.
    """
    if QUANT == PER_TOKEN:
        _quantise_rows(
            values, weighted_by(values, weights, OFFSET), out + _beside(row * WIDTH, GROUP),
            normed + _beside(row * WIDTH, GROUP), scales + row * scale_stride,
            WIDTH, EPSILON, CHUNK, LARGEST, SCALING, KEEP, ROWS, HINT, TYPE,
        )  # fmt: skip
    else:
        if QUANT == STATIC or QUANT == NVFP4:  # noqa: SIM109 # once, beside the rows
            scale_in = tl.load(scale_in)
        products = weighted_by(values, weights, OFFSET)
        # Of what is not scaled yet, beside the sum: the largest is the same, as a scale is positive and, with an epsilon, finite.
        most = _largest(products) if GROUP > 0 and EPSILON > 0.0 else products
        scale = rms_scale(values, WIDTH, EPSILON, TAIL, ROWS)
        result = scaled_by(products, _beside(scale, GROUP))
        if QUANT == NO_QUANT:
            write_rows(result, out, row, PADDED, WIDTH, CHUNK, TAIL, GROUP, HINT)
        else:
            result = all_rounded(result, TYPE)
            if GROUP > 0:
                most = all_rounded(scaled_by(most, _beside(scale, 0)), TYPE) if EPSILON > 0.0 else _largest(result)
            if KEEP:
                write_rows(result, normed, row, WIDTH, WIDTH, CHUNK, TAIL, GROUP, USUAL)
            for i in tl.static_range(0, len(result)):
                _quantise_chunk(
                    result[i], most[i], out, scale_in, scales, row, scale_stride, group_stride, i * CHUNK, WIDTH,
                    TAIL if TAIL > 0 and i == len(result) - 1 else CHUNK, QUANT, GROUP, LARGEST, SCALING, HINT, SWIZZLED,
                )  # fmt: skip


@triton.jit
def _quantise_chunk(
    result, most, out, scale_in, scales, row, scale_stride, group_stride,
    START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr, HINT: tl.constexpr,
    SWIZZLED: tl.constexpr,
):  # fmt: skip
    if QUANT == STATIC:
        value = saturated(result * (1.0 / scale_in), LARGEST)
        write_chunk(out + _beside(row * WIDTH, GROUP), value, START, WIDTH, SIZE, GROUP, HINT)
    elif QUANT == PER_GROUP:
        _quantise_groups(
            result, most, out + _beside(row * WIDTH, GROUP), scales + _beside(row * scale_stride, 0), group_stride,
            START, WIDTH, SIZE, GROUP, LARGEST, SCALING, HINT,
        )  # fmt: skip
    elif QUANT == NVFP4:
        _quantise_nvfp4(result, most, out, scale_in, scales, _beside(row, GROUP), START, WIDTH, SIZE, SWIZZLED)
    else:
        _quantise_mx(result, most, out, scales, _beside(row, GROUP), START, WIDTH, SIZE, QUANT)


@triton.jit
def _sum_and_most(sum_a, most_a, sum_b, most_b):
    return sum_a + sum_b, tl.maximum(most_a, most_b)


@triton.jit
def _quantise_rows(
    values, products, out, normed, scales, WIDTH: tl.constexpr, EPSILON: tl.constexpr, CHUNK: tl.constexpr,
    LARGEST: tl.constexpr, SCALING: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, HINT: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Rows in fp8 with a scale each. The mean square and the largest magnitude come from one reduction: fewer barriers.

    The largest of what is scaled and rounded is the largest, scaled and rounded: a row's scale is positive.
    """
    bits = magnitude(products[0])
    for i in tl.static_range(1, len(products)):
        bits = tl.maximum(bits, magnitude(products[i]))
    total, most = tl.reduce((_squares(values, len(values)), bits), 1, _sum_and_most)
    scale = tl.rsqrt(total * (1.0 / WIDTH) + EPSILON)
    own, inverse = quant_scale(rounded(most.to(tl.float32, bitcast=True) * scale, TYPE), LARGEST, SCALING)
    tl.store(scales + tl.zeros((ROWS,), tl.int32), own)
    for i in tl.static_range(0, len(products)):
        result = rounded(products[i] * scale[:, None], TYPE)
        if KEEP:
            write_chunk(normed, result, i * CHUNK, WIDTH, CHUNK, 0, USUAL)
        write_chunk(out, result * inverse[:, None], i * CHUNK, WIDTH, CHUNK, 0, HINT)


@triton.jit
def _quantise_groups(
    result, most, out, scales, group_stride, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """One chunk in fp8, and the scales of its groups.

    For programs of one row: with several, Triton 3.6 was seen to store wrong scales (768 columns, two rows, two warps).
    """
    own, inverse = quant_scale(most, LARGEST, SCALING)
    groups = START // GROUP + tl.arange(0, SIZE // GROUP)[None, :]
    tl.store(scales + groups.to(tl.int64) * group_stride, own, mask=groups * GROUP < WIDTH)
    write_chunk(out, result * inverse[:, :, None], START, WIDTH, SIZE, GROUP, HINT)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x):
    """The nearest integer of a number from 0 to 2^22, the even one of two."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _quantise_mx(
    normed, most, out, scales, row, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """One chunk of (ROWS, SIZE / 32, 32) in an MX format, and the exponents of its groups."""
    bits = magnitude(most)[:, :, None]
    exponent = ((bits + 0x200000) >> 23) - (8 if QUANT == MXFP8 else 2)
    exponent = tl.minimum(tl.maximum(exponent, 0), 254)
    groups = START // 32 + tl.arange(0, SIZE // 32)[None, :, None]
    byte = tl.where(bits < 0x7F800000, exponent, 255).to(tl.uint8)
    tl.store(scales + row * (WIDTH // 32) + groups, byte, mask=groups * 32 < WIDTH)
    half = (127 - exponent) // 2
    scaled = normed * _power_of_two(half) * _power_of_two(127 - exponent - half)
    if QUANT == MXFP8:
        write_chunk(out + row * WIDTH, saturated(scaled, 448.0), START, WIDTH, SIZE, 32, USUAL)
    else:
        _write_fp4(scaled, out + row * (WIDTH // 2), START, WIDTH, SIZE, 32)


@triton.jit
def _write_fp4(scaled, out, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """One chunk of (ROWS, SIZE / GROUP, GROUP), two values to a byte."""
    # The codes of e2m1 count steps of a half up to 2, of 1 up to 4, then of 2.
    size = tl.minimum(tl.abs(scaled), 6.0)
    code = tl.where(size <= 4.0, _nearest(size) + 2.0, _nearest(size * 0.5) + 4.0)
    code = tl.where(size <= 2.0, _nearest(size * 2.0), code)
    code = tl.where(scaled == scaled, code, 7.0).to(tl.int32)
    code |= (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1], GROUP // 2, 2)))
    first = START // 2 + tl.arange(0, SIZE // GROUP)[None, :, None] * (GROUP // 2)
    pairs = first + tl.arange(0, GROUP // 2)[None, None, :]
    tl.store(out + pairs, (low | (high << 4)).to(tl.uint8), mask=pairs * 2 < WIDTH)


@triton.jit
def _e4m3(x):
    """The byte of a number from 0 to 448 in e4m3fn, to nearest even, and what it stands for: on the bits, for GPUs without fp8."""
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    below = _nearest(x * 512.0)
    is_normal = x >= 0.015625
    value = tl.where(is_normal, (normal << 20).to(tl.float32, bitcast=True), below * (1.0 / 512.0))
    return tl.where(is_normal, normal - (120 << 3), below.to(tl.int32)), value


@triton.jit
def _quantise_nvfp4(
    normed, most, out, factor, scales, row, START: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """One chunk of (ROWS, SIZE / 16, 16) in NVFP4, and the scales of its groups: bytes, row by row or in tiles."""
    bits = magnitude(most)[:, :, None]
    whole = bits < 0x7F800000
    amax = tl.where(whole, bits, 0).to(tl.float32, bitcast=True)
    byte, own = _e4m3(tl.minimum(factor * (amax * (1.0 / 6.0)), 448.0))
    groups = START // 16 + tl.arange(0, SIZE // 16)[None, :, None]
    if SWIZZLED:
        tile = row // 128 * ((WIDTH // 16 + 3) // 4) + groups // 4
        at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + groups % 4
    else:
        at = row * (WIDTH // 16) + groups
    tl.store(scales + at, tl.where(whole, byte, 0x7F).to(tl.uint8), mask=groups * 16 < WIDTH)
    inverse = tl.where(own > 0.0, tl.div_rn(1.0, own * tl.div_rn(1.0, factor)), 0.0)
    _write_fp4(normed * inverse, out + row * (WIDTH // 2), START, WIDTH, SIZE, 16)


@triton.jit
def write_zeros(out, row, STRIDE: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr):
    """The columns from START to STRIDE of rows that lie STRIDE apart. SIZE: a power of two that is not less."""
    columns = START + tl.arange(0, SIZE)[None, :]
    zeros = tl.zeros((1, SIZE), tl.float32).to(out.dtype.element_ty)
    at = out + _beside(row * STRIDE, 0) + columns
    tl.store(at, tl.broadcast_to(zeros, at.shape), mask=columns < STRIDE)
