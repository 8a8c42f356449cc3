# ruff: noqa: N803 (constants of a kernel are written in capitals)
"""The kernel of the query ops: the rope of heads, and in front of it the absorbed latent where it is not there already."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from .rows import rounded, saturated
from .turning import NOT_TURNED, angle, read_pairs, turned, write_pairs


@triton.jit(
    do_not_specialize=[
        "rows", "latent_token", "latent_head", "rope_token", "rope_head", "out_token", "out_head", "table_rows",
        "cos_stride", "sin_stride",
    ]
)  # fmt: skip
def query(
    q_latent, q_rope, cos, sin, positions, scale_in, out,
    rows, latent_token, latent_head, rope_token, rope_head, out_token, out_head, table_rows, cos_stride, sin_stride,
    HEADS: tl.constexpr, KV_WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    LATENT_UNIT: tl.constexpr, ROPE_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    LATENT: tl.constexpr, STATIC: tl.constexpr, LARGEST: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS heads per program, those of all tokens counted through. The rope goes behind KV_WIDTH columns.

    LATENT: those are copied from q_latent; without it q_rope may be what is written to. STATIC: everything is divided by a scale.
    """
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = number < rows
    token, head = (number // HEADS).to(tl.int64), number % HEADS
    at = (token * out_token + head * out_head) * OUT_UNIT
    scale = 1.0
    if STATIC:
        scale = 1.0 / tl.load(scale_in)
    first, second = read_pairs(
        q_rope, (token * rope_token + head * rope_head) * ROPE_UNIT, mask, ROPE_WIDTH, HALF, PAIRS
    )
    if LATENT:
        start = (token * latent_token + head * latent_head) * LATENT_UNIT
        for i in tl.static_range(0, (KV_WIDTH + CHUNK - 1) // CHUNK):
            column = i * CHUNK + tl.arange(0, CHUNK)[None, :]
            inside = mask[:, None] & (column < KV_WIDTH)
            value = tl.load(q_latent + start[:, None] + column, mask=inside, other=0.0)
            if STATIC:
                value = saturated(value.to(tl.float32) * scale, LARGEST)
            tl.store(out + at[:, None] + column, value.to(out.dtype.element_ty), mask=inside)
    if PAIRS != NOT_TURNED:
        position = tl.load(positions + token, mask=mask, other=0).to(tl.int64)
        c = angle(cos, position, table_rows, cos_stride, ROPE_WIDTH, HALF)
        s = angle(sin, position, table_rows, sin_stride, ROPE_WIDTH, HALF)
        first, second = turned(first, second, c, s)
    if STATIC:
        first, second = rounded(first, q_rope.dtype.element_ty), rounded(second, q_rope.dtype.element_ty)
        first, second = saturated(first * scale, LARGEST), saturated(second * scale, LARGEST)
    if not LATENT:
        tl.debug_barrier()  # every column is read before one is written, by whichever threads
    write_pairs(out, at + KV_WIDTH, mask, first, second, ROPE_WIDTH, HALF, PAIRS)
