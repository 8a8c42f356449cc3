"""How a kernel is launched: rules over the widths, in a few steps over the number of rows.

They were found on an H200 (benchmarks/results/row_norm_tuning.json, by benchmarks/row_norm_tuning.py) and hold for the
widths that were measured there. They count in threads, so that a wave of 64 takes the place of two warps; on AMD they
are a starting point that nobody has timed. What they come down to:

- Many rows: a thread holds about 16 to 40 columns. Fewer, and what each thread does once counts; more, and registers
  leave room for too few programs. Quantising costs instructions, so it goes to the upper end.
- Few rows: the two sides of a dual norm get a program each, of more threads than are worth it otherwise.
- An H200 starts about 800 programs per microsecond and moves 4.3 GB in a millisecond: a program that moves less than
  5 KB is what limits it, so narrow rows come several to a program, each with as many threads as its columns fill.
- Columns beyond the end of a row cost as much as others. A chunk that leaves few of them comes before a larger one.
- Scales of groups leave a program with two barriers for every chunk, so that group-quantised rows come in one chunk or two.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

WIDEST = 65536
"""The widest row that one program holds in registers."""

_STEPS = (128, 384, 1024, 3072, 8192)
"""Rows up to which a step goes."""
_LITTLE, _LESS = 2048, 4500
"""Bytes that a row moves: below, rows come several to a program from the second step on, or in the last."""
_ENOUGH = 6000
"""Bytes that are worth a program of their own."""
_LARGEST_CHUNK = 8192
_LANES, _VECTOR = 32, 8
"""Threads of a row that shares its program, and columns that each of them handles at once."""


class Launch(NamedTuple):
    """The launch parameters of one kernel variant."""

    chunk: int
    "Columns that are handled at once; a power of two."
    tail: int
    "Columns of the last chunk, 0 where it is like the others."
    kv_chunk: int
    "Like chunk, of the key/value side; 0 for a kernel without one."
    rows: int
    "Rows of a program."
    split: bool
    "Two programs per row."
    warps: int


class Dual(NamedTuple):
    """What is known of a dual norm for as long as a layer lives."""

    q_width: int
    kv_width: int
    item_size: int
    "Bytes of an element of q and kv."
    quantised: bool
    "Whether q comes out in fp8."
    group_size: int
    "Columns per scale, 0 without groups."
    aligned: bool
    "Whether all rows start on the 16-byte grid."


def regime(rows: int) -> int:
    """The step for this many rows."""
    return bisect_left(_STEPS, rows)


def launch_single(step: int, width: int, item_size: int, aligned: bool, wave: int) -> Launch:
    """The launch of a norm that reads two rows and writes two.

    Args:
        step: from `regime`.
        width: columns.
        item_size: bytes of an element.
        aligned: whether all rows start on the 16-byte grid.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    together = _rows_together(step, 4 * width * item_size, aligned)
    if together > 1:
        return _several(width, 0, together, wave)
    warps = max(_power_of_two(width / 1024), min(4, _power_of_two(width / 256)))
    vector = _VECTOR if aligned and step < 3 else _VECTOR // 2
    return _whole(width, 0, min(warps, 32), vector, False, wave)


def launch_dual(step: int, dual: Dual, wave: int) -> Launch:
    """The launch of a dual norm.

    Args:
        step: from `regime`.
        dual: what is normed.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    q, kv, total, widest = dual.q_width, dual.kv_width, dual.q_width + dual.kv_width, max(dual.q_width, dual.kv_width)
    moved = 2 * total * dual.item_size - (q * (dual.item_size - 1) if dual.quantised else 0)
    # Not in groups: Triton 3.6 stores wrong scales for some of these shapes.
    together = 1 if dual.group_size else _rows_together(step, moved, dual.aligned)
    if together > 1:
        return _several(q, kv, together, wave)
    if dual.quantised:
        split = step == 0 or (step == 1 and q <= 2048) or (step == 2 and q <= 3072 and not dual.group_size)
        warps = _power_of_two(total / 1408)
    else:
        split = step <= 2 or (step == 3 and total * dual.item_size > 4224)
        # With four warps a row of up to 1408 columns leaves enough registers for 2048 rows at once, with two up to 2112.
        least = 4 if dual.aligned and (step != 3 or total <= 1408) else 1
        warps = max(_power_of_two(total / 1280), min(least, _power_of_two(total / 640)))
    if split and dual.group_size:
        chunk = max(_power_of_two(q), dual.group_size)
        warps = max(1, min(8, chunk // (256 if step == 0 else 512)), _power_of_two(widest / 1024))
        if chunk <= _LARGEST_CHUNK:
            return Launch(chunk, 0, _chunk(kv, 32 * warps, _VECTOR), 1, True, _waves(warps, wave))
    elif split and widest <= 1024 and dual.aligned:
        warps = 1
    elif split:
        warps = max(4, _power_of_two(widest / (512 if widest > 3072 and step < 2 else 1024)))
    if dual.group_size:
        return _grouped(dual, min(warps, 32), split, wave)
    vector = _VECTOR if dual.aligned and (split or dual.quantised) else _VECTOR // 2
    return _whole(q, kv, min(warps, 32), vector, split, wave)


def _rows_together(step: int, moved: int, aligned: bool) -> int:
    """How many rows a program takes that would move too little with one."""
    if (step >= 1 and moved <= _LITTLE) or (step >= len(_STEPS) and moved <= _LESS and aligned):
        return min(16, _power_of_two(_ENOUGH / moved))
    return 1


def _several(width: int, kv_width: int, rows: int, wave: int) -> Launch:
    """Several rows per program, none of which takes more than one warp."""
    chunk = min(_power_of_two(width), _LANES * _VECTOR)
    kv_chunk = min(_power_of_two(kv_width), _LANES * _VECTOR) if kv_width else 0
    threads = rows * max(1, max(chunk, kv_chunk) // _VECTOR)
    return Launch(chunk, 0, kv_chunk, rows, False, max(1, min(threads, 256) // wave))


def _whole(width: int, kv_width: int, warps: int, vector: int, split: bool, wave: int) -> Launch:
    """One row per program, in chunks of one size."""
    chunk, kv_chunk = (_chunk(columns, 32 * warps, vector) if columns else 0 for columns in (width, kv_width))
    return Launch(chunk, 0, kv_chunk, 1, split, _waves(warps, wave))


def _grouped(dual: Dual, warps: int, split: bool, wave: int) -> Launch:
    """One row per program, q in large chunks and what is left of it."""
    width, least = dual.q_width, dual.group_size
    chunk = max(min(_power_of_two(width // 2 + 1), _LARGEST_CHUNK), least)
    rest = width % chunk if width > chunk else 0
    tail = max(_power_of_two(rest), least) if rest else 0
    if tail >= chunk:  # one chunk for both, if it may be that large
        chunk, tail = min(2 * chunk, max(_LARGEST_CHUNK, least)), 0
    return Launch(chunk, tail, _chunk(dual.kv_width, 32 * warps, _VECTOR), 1, split, _waves(warps, wave))


def _chunk(width: int, threads: int, first: int) -> int:
    """Four or eight columns per thread: what leaves fewer columns idle; where it is the same, `first`."""
    most = _power_of_two(width)
    sizes = [min(threads * columns, most) for columns in (first, 12 - first)]
    return min(sizes, key=lambda size: -width % size)


def _waves(warps: int, wave: int) -> int:
    return max(1, min(warps * 32, 1024) // wave)


def _power_of_two(number: float) -> int:
    """The smallest power of two that is not below a positive number."""
    size = 1
    while size < number:
        size *= 2
    return size
