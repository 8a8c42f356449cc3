"""How a kernel is launched: rules over the widths, in a few steps over the number of rows.

They were found on an H200 (bench/results/row_norm_tuning.json) and hold for the
widths that were measured there. They count in threads, so that a wave of 64 takes the place of two warps; on AMD they
are a starting point that nobody has timed. What they come down to:

- Many rows: a thread holds about 16 to 40 columns. Fewer, and what each thread does once counts; more, and registers
  leave room for too few programs. Quantising costs instructions, so it goes to the upper end.
- Few rows: the two sides of a dual norm get a program each, of more threads than are worth it otherwise.
- An H200 starts about 800 programs per microsecond and moves 4.3 GB in a millisecond: a program that moves less than
  5 KB is what limits it, so narrow rows come several to a program, each with as many threads as its columns fill.
- Columns beyond the end of a row cost as much as others. A chunk that leaves few of them comes before a larger one.
- Scales of groups leave a program with two barriers for every chunk, so that group-quantised rows come in one chunk or two.
- What does not fit into the cache is read and written faster where reads are marked to leave the cache last.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

WIDEST = 65536
"""The widest row that one program holds in registers."""

STEPS = (128, 384, 640, 1024, 3072, 8192)
"""Rows up to which a step goes."""
_LITTLE, _LESS = 2048, 4800
"""Bytes that a row moves: below, rows come several to a program from the second step on, or in the last."""
_ENOUGH = 6000
"""Bytes that are worth a program of their own."""
_LARGEST_CHUNK = 8192
_LANES, _VECTOR = 32, 8
"""Threads of a row that shares its program, and columns that each of them handles at once."""
_ONE_BY_ONE = (4, 2, 1)
"""Columns per thread where rows are off the grid, and elements come one by one anyhow."""
_REGISTERS = 64
"""Registers of a thread with which four programs of eight warps fit on an SM."""
_CACHE = 40e6
"""Bytes that a cache does not hold besides what else is in it."""


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
    hold: bool = False
    "What is read is marked to leave the cache last."
    registers: int = 0
    "The most of a thread where launches overlap; 0: as the compiler likes."


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
    return bisect_left(STEPS, rows)


class Row(NamedTuple):
    """What is known of a single norm for as long as a layer lives."""

    width: int
    item_size: int
    "Bytes of an element of the rows."
    adds: bool
    "Whether a residual is read and the sum written."
    quantised: bool
    kept: bool
    "Whether the norm is written besides its quantisation."
    group_size: int
    "Columns per scale, 0 without groups."
    per_token: bool
    "Whether a scale goes with each row."
    aligned: bool
    "Whether all rows start on the 16-byte grid."

    @property
    def moved(self) -> int:
        """Bytes that a row reads and writes, scales apart."""
        whole = 1 + 2 * self.adds + (self.kept or not self.quantised)
        return self.width * (whole * self.item_size + self.quantised)


def launch_row(step: int, row: Row, wave: int) -> Launch:
    """The launch of a norm of single rows.

    Args:
        step: from `regime`.
        row: what is normed.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    plan = _launch_row(step, row, wave)
    if row.item_size != 2 or step > 3 or plan.rows > 1 or plan.warps > 8:
        return plan
    # Where a thread has room the limit is what it may take: the compiler would keep to 48 or fewer, and read bit by bit.
    held = row.width / (32 * plan.warps)
    roomy = held <= 24 or (held < 32 and not row.adds)
    # 256 rows are two programs on each SM, and two more of the next launch. Without room for four a launch waits for the one
    # in front, which is taken for why 72 registers took 6.4 instead of 5.0 us with 7168 columns (H100, Triton 3.6).
    crowded = row.group_size > 0 and step > 0 and plan.warps == 8
    return plan._replace(registers=_REGISTERS) if roomy or crowded else plan


def _launch_row(step: int, row: Row, wave: int) -> Launch:
    width = row.width
    hold = _hold(step, row.moved)
    together = 1 if row.group_size else _rows_together(step, row.moved, row.aligned)
    if together > 1:
        return _several(width, 0, together, wave, hold)
    if row.group_size:
        return _grouped_row(step, row, wave, hold)
    # Quantising costs instructions, and a static scale leaves no second reduction to wait for: more columns at once.
    share = 900 if row.quantised else 1024
    warps = min(max(power_of_two(width / share), min(4, power_of_two(width / 256))), 32)
    columns: tuple[int, ...] = _ONE_BY_ONE if not row.aligned else (8, 4) if step < 4 and not row.per_token else (4, 8)
    if row.quantised and not row.per_token and row.aligned:
        # Many rows are read sixteen bytes at a time, even if columns are idle.
        columns = (8, 4) if step <= 3 else (8,)
        warps = warps if step <= 3 or row.adds else min(warps, max(4, power_of_two(width / 2048)))
    return Launch(_chunk(width, 32 * warps, columns), 0, 0, 1, False, _waves(warps, wave), hold)


def _grouped_row(step: int, row: Row, wave: int, hold: bool) -> Launch:
    """One row per program, in one chunk, or in quarters and what is left."""
    width, least = row.width, row.group_size
    few, whole = step <= 3, max(power_of_two(width), least)
    one = whole <= 4096 if row.adds or not few else whole <= _LARGEST_CHUNK and 4 * width > 3 * whole
    if one and (few or width == whole):
        warps = power_of_two(width / 400) if few else power_of_two(width / 1024)
        return Launch(whole, 0, 0, 1, False, _waves(min(warps, 16), wave), hold)
    if few and whole <= _LARGEST_CHUNK and not row.adds:  # a little more than half of the whole
        chunk, tail = _halves(width, least)
        return Launch(chunk, tail, 0, 1, False, _waves(4, wave), hold)
    chunk, tail = _quarters(width, least) if width > 4096 else _halves(width, least)
    warps = power_of_two(width / (1024 if few else 2048)) if width > 4096 else power_of_two(width / 1408)
    return Launch(chunk, tail, 0, 1, False, _waves(min(warps, 32), wave), hold)


def _quarters(width: int, least: int) -> tuple[int, int]:
    """A chunk of about a quarter of a row, and what is left behind the last whole one where that is less."""
    quarter = max(min(power_of_two(width) // 4, _LARGEST_CHUNK), least)
    if width % quarter and width % (quarter // 2) == 0 and width // (quarter // 2) <= 6 and quarter // 2 >= least:
        return quarter // 2, 0
    return _with_tail(width, quarter, least)


def _halves(width: int, least: int) -> tuple[int, int]:
    return _with_tail(width, max(power_of_two(width // 2 + 1), least), least)


def _with_tail(width: int, chunk: int, least: int) -> tuple[int, int]:
    rest = width % chunk
    tail = max(power_of_two(rest), least) if rest and width > chunk else 0
    return chunk, tail if tail < chunk else 0


def launch_gated(step: int, heads: int, width: int, group_size: int, wave: int) -> Launch:
    """The launch of a gated norm: `chunk` holds a head, `rows` are heads.

    Args:
        step: from `regime`, of the number of heads of all tokens.
        heads: of a token, where a program takes all of them; 0: a program takes any heads.
        width: of a head.
        group_size: columns per scale, 0 without groups.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    block = power_of_two(width)
    if heads:
        rows = power_of_two(heads)
        warps = rows * block // (32 * (8 if step <= 5 else 16))
    elif group_size and group_size < block:
        # What is laid out anew for the groups stays in a warp.
        rows, warps = 1 if step <= 4 else max(1, 1024 // block), max(1, block // 1024)
    else:
        # More columns per thread where there is work enough, most where each head has a scale, which costs instructions.
        columns, each = (
            (1024, 4) if step <= 3 else (2048, 8) if not group_size else (2048, 4) if step <= 5 else (4096, 16)
        )
        rows = max(1, columns // block)
        warps = rows * block // (32 * each)
    return Launch(block, 0, 0, rows, False, _waves(min(max(1, warps), 16), wave))


def launch_product(step: int, width: int, whole: bool, group: int, wave: int) -> Launch:
    """The launch of a gated MLP's product: `rows` are groups of a program.

    Args:
        step: from `regime`, of the number of rows.
        width: columns of the product.
        whole: whether a program takes a whole row, for one scale per token.
        group: columns that share a scale, or are handled as one.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    if whole:
        most = power_of_two(width)
        if most <= 2 * _LARGEST_CHUNK and 4 * width >= 3 * most:  # in one chunk, which leaves few threads idle
            warps, chunk = min(power_of_two(width / (256 if step == 0 else 512)), 32), most
        else:
            warps = min(power_of_two(width / (1024 if step >= 5 and width <= 4096 else 576)), 32)
            chunk = min(most, 32 * warps * 4)
        # Few rows: all of a row is on its way at once, where the compiler would keep to 32 registers and read bit by bit.
        few = step <= 1 and warps <= 8
        return Launch(chunk, 0, 0, 1, False, _waves(warps, wave), registers=_REGISTERS if few else 0)
    # Little work: as many programs as there can be. Much of it: sixteen columns per thread instead of eight.
    much = step > 0 and STEPS[step - 1] * width >= 4e6
    columns = 512 if step == 0 else 2048
    return Launch(group, 0, 0, max(1, columns // group), False, _waves(4 if much or step == 0 else 8, wave))


def launch_dual(step: int, dual: Dual, wave: int) -> Launch:
    """The launch of a dual norm.

    Args:
        step: from `regime`.
        dual: what is normed.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    q, kv, total, widest = dual.q_width, dual.kv_width, dual.q_width + dual.kv_width, max(dual.q_width, dual.kv_width)
    moved = 2 * total * dual.item_size - (q * (dual.item_size - 1) if dual.quantised else 0)
    hold = _hold(step, moved)
    # Not in groups: Triton 3.6 stores wrong scales for some of these shapes.
    together = 1 if dual.group_size else _rows_together(step, moved, dual.aligned)
    if together > 1:
        return _several(q, kv, together, wave, hold)
    if dual.quantised:
        split = step == 0 or (step == 1 and q <= 2048) or (step <= 3 and q <= 3072 and not dual.group_size)
        warps = power_of_two(total / 1408)
    else:
        split = step <= 3 or (step == 4 and (total * dual.item_size > 4224 or not dual.aligned))
        # With four warps a row of up to 1408 columns leaves enough registers for 2048 rows at once, with two up to 2112.
        warps = max(power_of_two(total / 1280), min(4 if step != 4 or total <= 1408 else 1, power_of_two(total / 640)))
    if split:
        warps = power_of_two(widest / (512 if widest > 3072 and step < 2 else 1024))
        warps = max(warps, 1 if widest <= 1024 and dual.aligned else 4)
    elif not dual.aligned:
        warps = max(power_of_two(total / 1408), 4 if step < 4 else 1)
    warps = min(warps, 32)
    if dual.group_size and dual.aligned:
        return _grouped(step, dual, warps, split, wave, hold)._replace(registers=_REGISTERS if step <= 3 else 0)
    columns: tuple[int, ...] = _ONE_BY_ONE
    if dual.aligned:
        columns = (8, 4) if dual.quantised or warps == 1 or widest > 24 * 32 * warps else (4, 8)
    chunk = max(_chunk(q, 32 * warps, columns), dual.group_size)
    return Launch(chunk, 0, _chunk(kv, 32 * warps, columns), 1, split, _waves(warps, wave), hold)


def launch_latents(step: int, dual: Dual, form: str, wave: int) -> Launch:
    """The launch of the norms with rope and cache write: a token per program, or per two of them.

    Fewer threads than for a dual norm: the entry's side is a quarter of the row, and its angles are read behind its position.

    Args:
        step: from `regime`.
        dual: what is normed.
        form: of the cache: plain, fp8 or fp8_ds_mla. Each 128 columns of the last have a scale: the latent is one chunk.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    widest, whole = power_of_two(max(dual.q_width, dual.kv_width)), power_of_two(dual.kv_width)
    kv_chunk = max(whole, 128) if form == "fp8_ds_mla" else min(whole, 1024)
    if dual.group_size or not dual.aligned:
        plan = launch_dual(step, dual, wave)
        if plan.rows == 1:
            return plan._replace(kv_chunk=kv_chunk)
    # Few tokens: a program for each side. Many: the two sides' reads overlap in one, and an fp8 entry costs instructions.
    converts = form != "plain" and 3 <= step < len(STEPS)
    warps = min(max(1, widest // (1024 if step == 0 or converts else 2048)), 8)
    chunk = _chunk(dual.q_width, 32 * warps, (16, 32) if warps == 1 else (8, 16))
    return Launch(max(chunk, dual.group_size), 0, kv_chunk, 1, step < 3, _waves(warps, wave), False)


def launch_query(step: int, width: int, quantised: bool, wave: int) -> Launch:
    """The launch of the query ops: `rows` are heads of a program. A thread has sixteen columns.

    Args:
        step: from `regime`, of the number of heads of all tokens.
        width: columns of a head that are copied; of the rope alone, its own.
        quantised: whether the query comes out in fp8.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    chunk = min(power_of_two(width), 256 if quantised and step == len(STEPS) else 512)
    rows = 1 if step <= 1 else 4
    return Launch(chunk, 0, 0, rows, False, _waves(max(1, rows * chunk // 512), wave))


def launch_heads(step: int, k_heads: int, width: int, wave: int) -> tuple[int, int, int]:
    """Heads, tokens and warps of a program of `qk_norm_rope`: eight heads, and eight columns for a thread: the best of a short sweep on one H100, which was not kept.

    Args:
        step: from `regime`, of the number of tokens.
        k_heads: heads of the key.
        width: of a head.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    columns = power_of_two(width)
    rows = max(1, min(8, 2048 // columns))
    # Few tokens: as many programs as there can be. Many: so many tokens that the key's heads fill their programs.
    tokens = 1 if step == 0 else rows // math.gcd(rows, k_heads)
    return rows, tokens, _waves(max(1, rows * columns // 256), wave)


def launch_absorb(block: int, heads: int, latent: int, depth: int, wave: int) -> tuple[int, int, int]:
    """Columns and warps of a program of `mla_query_absorb`, and heads that are roped together.

    Many programs where the weights are few, large reads where they are many.

    Args:
        block: tokens of a program.
        heads: of a token.
        latent: columns of the product.
        depth: bytes of a column of the weight, and of a token's part of the query, as a program holds them.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    columns, warps, together = 64, 2 if block == 32 else 4, 4
    if heads * latent > 16384:
        columns, warps, together = (256, 8, 16) if block == 16 else (128, 4, 4)
    # Both factors of a product lie in shared memory: 64 KiB on some AMD GPUs, which keep the query elsewhere, 99 KiB on NVIDIA's small ones.
    while columns > 16 and (columns * depth > 64 << 10 or (columns + block) * depth > 96 << 10):
        columns //= 2
    return max(16, min(power_of_two(latent), columns)), _waves(warps, wave), together


def _hold(step: int, moved: int) -> bool:
    """Whether reads are marked to stay, which takes 2 to 3 % off a launch that does not fit into the cache."""
    return step >= 5 and moved * STEPS[step - 1] >= _CACHE


def _rows_together(step: int, moved: int, aligned: bool) -> int:
    """How many rows a program takes that would move too little with one."""
    if (step >= 1 and moved <= _LITTLE) or (step == len(STEPS) and moved <= _LESS and aligned):
        return min(16, power_of_two(_ENOUGH / moved))
    return 1


def _several(width: int, kv_width: int, rows: int, wave: int, hold: bool) -> Launch:
    """Several rows per program, none of which takes more than one warp."""
    chunk = min(power_of_two(width), _LANES * _VECTOR)
    kv_chunk = min(power_of_two(kv_width), _LANES * _VECTOR) if kv_width else 0
    threads = rows * max(1, max(chunk, kv_chunk) // _VECTOR)
    return Launch(chunk, 0, kv_chunk, rows, False, max(1, min(threads, 256) // wave), hold)


def _grouped(step: int, dual: Dual, warps: int, split: bool, wave: int, hold: bool) -> Launch:
    """One row per program, q in one chunk, or in large ones and what is left."""
    width, least = dual.q_width, dual.group_size
    chunk, tail = max(power_of_two(width), least), 0
    if split and chunk <= _LARGEST_CHUNK:
        warps = max(min(8, chunk // (256 if step == 0 else 512)), power_of_two(max(width, dual.kv_width) / 1024))
    else:
        chunk = max(min(power_of_two(width // 2 + 1), _LARGEST_CHUNK), least)
        rest = width % chunk if width > chunk else 0
        tail = max(power_of_two(rest), least) if rest else 0
        if tail >= chunk:  # one chunk for both, if it may be that large
            chunk, tail = min(2 * chunk, max(_LARGEST_CHUNK, least)), 0
        elif step == 3 and 2 * tail == chunk:  # measured for 1536 columns: 0.96 instead of 1.11 of a copy at 1024 rows
            chunk, tail = tail, 0
    return Launch(chunk, tail, _chunk(dual.kv_width, 32 * warps, (8, 4)), 1, split, _waves(warps, wave), hold)


def _chunk(width: int, threads: int, columns: tuple[int, ...]) -> int:
    """So many columns per thread that the fewest are idle; the first where it is the same."""
    most = power_of_two(width)
    sizes = [min(threads * number, most) for number in columns]
    return min((size for size in sizes if width <= 16 * size), key=lambda size: -width % size, default=max(sizes))


def _waves(warps: int, wave: int) -> int:
    return max(1, min(warps * 32, 1024) // wave)


def power_of_two(number: float) -> int:
    """The smallest power of two that is not below a positive number."""
    size = 1
    while size < number:
        size *= 2
    return size
