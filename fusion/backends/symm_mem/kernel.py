# ruff: noqa: N803, N806, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""The kernel that sums one row over all ranks, adds the residual and norms: each program pushes its row and waits for its peers'.

`tests/fusion/symm_mem_protocol.py` has the same steps in plain Python, with the argument why they suffice. There is no multicast and no barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from ..triton.rows import (
    FRESH,
    USUAL,
    added,
    finish,
    read_chunk,
    read_rows,
    read_weight,
    row_numbers,
    write_chunk,
    write_rows,
    write_zeros,
)


@triton.jit
def _as_words(values, TYPE: tl.constexpr, WORD: tl.constexpr):
    """The bits of a row in TYPE. The NaN whose bits are all ones means that nothing has arrived: it becomes another NaN."""
    NAN: tl.constexpr = (1 << (WORD.primitive_bitwidth - 1)) - 1
    words = ()
    for i in tl.static_range(0, len(values)):
        bits = values[i].to(TYPE).to(WORD, bitcast=True)
        words = words + (tl.where(bits == -1, tl.full(bits.shape, NAN, WORD), bits),)
    return words


@triton.jit
def _address(buffers, owner, AFTER: tl.constexpr, WORD: tl.constexpr):
    """A place of the owner's buffer, AFTER so many bytes."""
    start = tl.load(buffers + owner) + AFTER
    return tl.multiple_of(start.to(tl.pointer_type(WORD)), 16)


@triton.jit
def _looked(
    slots, START: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    WORLD: tl.constexpr, RANK: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One chunk of each peer's row, as far as it has arrived."""
    parts = ()
    for source in tl.static_range(0, WORLD):
        if source != RANK:
            parts = parts + (read_chunk(slots + source * APART, START, WIDTH, CHUNK, GROUP, FRESH),)
    return parts


@triton.jit
def _missing(parts):
    """Whether any word has not arrived: each is asked, as nothing says that several arrive at once."""
    missing = (parts[0] == -1).to(tl.int32)
    for i in tl.static_range(1, len(parts)):
        missing |= (parts[i] == -1).to(tl.int32)
    return tl.max(missing)


@triton.jit
def _summed(
    words, slots, TYPE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    WORLD: tl.constexpr, RANK: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The float32 sum over the ranks, in their order. What was read becomes empty again, for the call after the next."""
    sums = ()
    for i in tl.static_range(0, len(words)):
        parts = _looked(slots, i * CHUNK, WIDTH, CHUNK, GROUP, WORLD, RANK, APART)
        while _missing(parts) != 0:
            parts = _looked(slots, i * CHUNK, WIDTH, CHUNK, GROUP, WORLD, RANK, APART)
        total = tl.zeros(words[i].shape, tl.float32)
        for source in tl.static_range(0, WORLD):
            if source == RANK:
                total += words[i].to(TYPE, bitcast=True).to(tl.float32)
            else:
                part = parts[source if source < RANK else source - 1]
                total += part.to(TYPE, bitcast=True).to(tl.float32)
                empty = tl.full(part.shape, -1, part.dtype)
                write_chunk(slots + source * APART, empty, i * CHUNK, WIDTH, CHUNK, GROUP, USUAL)
        sums = sums + (total,)
    return sums


@triton.jit
def _received(
    slot, TYPE: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """A row of the stream as its owner sent it. What was read becomes empty again."""
    values = ()
    for i in tl.static_range(0, COUNT):
        bits = read_chunk(slot, i * CHUNK, WIDTH, CHUNK, GROUP, FRESH)
        while tl.max((bits == -1).to(tl.int32)) != 0:
            bits = read_chunk(slot, i * CHUNK, WIDTH, CHUNK, GROUP, FRESH)
        write_chunk(slot, tl.full(bits.shape, -1, bits.dtype), i * CHUNK, WIDTH, CHUNK, GROUP, USUAL)
        values = values + (bits.to(TYPE, bitcast=True).to(tl.float32),)
    return values


@triton.jit(do_not_specialize=["rows", "x_units", "residual_units", "scale_stride", "group_stride"])
def all_reduce_row_norm(
    x, residual, weight, scale_in, out, scales, normed, residual_out, buffers, phases, ticket,
    rows, x_units, residual_units, scale_stride, group_stride,
    WORLD: tl.constexpr, RANK: tl.constexpr, SHOTS: tl.constexpr, MOST: tl.constexpr, PITCH: tl.constexpr,
    IN_ORDER: tl.constexpr,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, OFFSET: tl.constexpr, X_UNIT: tl.constexpr, RESIDUAL_UNIT: tl.constexpr,
    QUANT: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr, KEEP: tl.constexpr,
    PADDED: tl.constexpr, ZEROS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum a row of WIDTH columns over WORLD ranks, add the residual's, and norm it as `row_norm` does.

    buffers: the addresses of all ranks' buffers. In one shot they are of (2 phases, WORLD sources, MOST rows, PITCH words).
    In two they are of (2, WORLD, MOST / WORLD, PITCH) for the parts of the rows that a rank owns, and behind that, of
    (2, MOST, PITCH) for the stream: the owner adds its residual, and all ranks norm the row as it is stored.
    phases: for each row, the phase of its next call.
    IN_ORDER: programs take a ticket, as there are more of them than the GPU surely holds at once.
    EARLY: the next kernel may come up meanwhile; it waits for the end of this one.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    WORD: tl.constexpr = tl.int16 if TYPE.primitive_bitwidth == 16 else tl.int32
    OWNED: tl.constexpr = MOST if SHOTS == 1 else (MOST + WORLD - 1) // WORLD
    APART: tl.constexpr = OWNED * PITCH
    if EARLY:
        tl_cuda.gdc_wait()
    if IN_ORDER:
        first = tl.atomic_add(ticket, 1, sem="relaxed")
        if first == rows - 1:
            tl.store(ticket, 0)
    else:
        first = tl.program_id(0)
    row = row_numbers(first, rows, 1)
    phase = tl.load(phases + row)
    words = _as_words(read_rows(x, row, x_units, X_UNIT, WIDTH, CHUNK, 0, GROUP, USUAL), TYPE, WORD)
    place = phase.to(tl.int64) * (WORLD * APART) + (row if SHOTS == 1 else row // WORLD) * PITCH
    owner = (row % WORLD).to(tl.int32)
    if SHOTS == 1:
        for step in tl.static_range(1, WORLD):  # each rank begins with another peer
            theirs = _address(buffers, (RANK + step) % WORLD, 0, WORD)
            write_rows(words, theirs + RANK * APART + place, row, 0, WIDTH, CHUNK, 0, GROUP, USUAL)
    elif owner != RANK:
        theirs = _address(buffers, owner, 0, WORD)
        write_rows(words, theirs + RANK * APART + place, row, 0, WIDTH, CHUNK, 0, GROUP, USUAL)
    # While the rows are on their way.
    if EARLY:
        tl_cuda.gdc_launch_dependents()
    if PADDED > WIDTH:
        write_zeros(out, row, PADDED, WIDTH, ZEROS)
    weights = read_weight(weight, row, WIDTH, CHUNK, 0, GROUP)
    mine = _address(buffers, RANK, 0, WORD) + place
    if SHOTS == 1:
        others = read_rows(residual, row, residual_units, RESIDUAL_UNIT, WIDTH, CHUNK, 0, GROUP, USUAL)
        values = added(_summed(words, mine, TYPE, WIDTH, CHUNK, GROUP, WORLD, RANK, APART), others)
    else:
        AFTER: tl.constexpr = 2 * WORLD * APART * (WORD.primitive_bitwidth // 8)
        slot = (phase.to(tl.int64) * MOST + row) * PITCH
        if owner == RANK:
            others = read_rows(residual, row, residual_units, RESIDUAL_UNIT, WIDTH, CHUNK, 0, GROUP, USUAL)
            sums = _summed(words, mine, TYPE, WIDTH, CHUNK, GROUP, WORLD, RANK, APART)
            sent = _as_words(added(sums, others), TYPE, WORD)
            for step in tl.static_range(1, WORLD + 1):
                theirs = _address(buffers, (RANK + step) % WORLD, AFTER, WORD) + slot
                write_rows(sent, theirs, row, 0, WIDTH, CHUNK, 0, GROUP, USUAL)
        values = _received(_address(buffers, RANK, AFTER, WORD) + slot, TYPE, len(words), WIDTH, CHUNK, GROUP)
    tl.store(phases + row, 1 - phase)
    write_rows(values, residual_out, row, WIDTH, WIDTH, CHUNK, 0, GROUP, USUAL)
    finish(
        values, weights, out, normed, scale_in, scales, row, scale_stride, group_stride,
        WIDTH, EPSILON, OFFSET, CHUNK, 0, QUANT, GROUP, LARGEST, SCALING, KEEP, PADDED, 1, USUAL, TYPE,
    )  # fmt: skip
