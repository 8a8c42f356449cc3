# ruff: noqa: N803, N806 (constants of a kernel are written in capitals)
"""The other way to sum rows in one shot, to measure it: a rank leaves its row at home, says so, and reads its peers' rows.

A flag per row and peer, released and acquired, stands where the pushing kernel needs none. Two halves take turns, so that a row is
written again only when every peer has said that it is a call further. It is for rows of whole 16 bytes, and norms without more.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pull_row_norm(
    x, residual, weight, out, residual_out, rows_of, flags_of, epochs,
    WORLD: tl.constexpr, RANK: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0)
    epoch = tl.load(epochs + row) + 1
    place = ((epoch % 2) * MOST + row) * WIDTH
    columns = tl.arange(0, CHUNK)
    mask = columns < WIDTH
    mine = tl.load(x + row * WIDTH + columns, mask=mask, other=0.0)
    home = tl.multiple_of(tl.load(rows_of + RANK).to(tl.pointer_type(TYPE)), 16)
    tl.store(home + place + columns, mine, mask=mask)
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        flags = tl.load(flags_of + (RANK + step) % WORLD).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + RANK * MOST + row, epoch, sem="release", scope="sys")
    others = tl.load(residual + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    for source in tl.static_range(0, WORLD):
        if source != RANK:
            flag = tl.load(flags_of + RANK).to(tl.pointer_type(tl.int32)) + source * MOST + row
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:
                pass
    tl.debug_barrier()
    total = tl.zeros((CHUNK,), tl.float32)
    for source in tl.static_range(0, WORLD):
        if source == RANK:
            total += mine.to(tl.float32)
        else:
            theirs = tl.multiple_of(tl.load(rows_of + source).to(tl.pointer_type(TYPE)), 16)
            total += tl.load(theirs + place + columns, mask=mask, other=0.0, volatile=True).to(tl.float32)
    tl.store(epochs + row, epoch)
    total += others
    tl.store(residual_out + row * WIDTH + columns, total, mask=mask)
    scale = tl.rsqrt(tl.sum(total * total) / WIDTH + EPSILON)
    tl.store(out + row * WIDTH + columns, total * scale * weights, mask=mask)
