# ruff: noqa: N803, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""The kernel of a linear with few tokens, which waits for its weights and little else.

A program asks for all its weights at once, before the kernel in front has ended where they do not depend on it, and quantises the
activations that it reads, or takes them as they were quantised. The depth is split, so that enough programs read; the last of a tile's programs to arrive sums their parts,
always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from .rows import magnitude, quant_scale


@triton.jit(do_not_specialize=["tokens", "x_row", "scale_row", "scale_group", "weight_row"])
def few_token_linear(
    x, x_scale, weight, weight_scale, parts, arrived, out,
    tokens, x_row, scale_row, scale_group, weight_row,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, X_UNIT: tl.constexpr, WEIGHT_UNIT: tl.constexpr,
    LARGEST: tl.constexpr, SCALING: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
    SPLIT: tl.constexpr, GIVEN: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """TILE columns of the product of all tokens, no more than TOKENS, over GROUPS groups of BLOCK columns, per program.

    parts (tiles, SPLIT, TILE, TOKENS) in float32 holds what the programs of a tile have summed, and arrived counts them: zeros, and left as
    zeros. GIVEN: x is quantised, with x_scale; else x_scale is not read. WIDE: for Triton's interpreter, which multiplies no fp8. AHEAD: weights are read while the kernel in front may still run.
    """
    depth_groups: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
    short: tl.constexpr = DEPTH % BLOCK != 0
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    first = part * GROUPS
    n, m, k = tile * TILE + tl.arange(0, TILE), tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    # Beyond the last is the last one: a load without a mask, whose result nobody stores.
    row, token = tl.minimum(n, COLUMNS - 1).to(tl.int64), tl.minimum(m, tokens - 1).to(tl.int64)
    weight_at = weight + (row * weight_row)[:, None] * WEIGHT_UNIT + k[None, :]
    scale_at = weight_scale + tile * TILE // BLOCK * depth_groups
    x_at = x + (token * x_row)[:, None] * X_UNIT + k[None, :]
    if EARLY:
        tl_cuda.gdc_launch_dependents()
        if not AHEAD:
            tl_cuda.gdc_wait()
    lefts = ()
    left_scales = ()
    for i in tl.static_range(GROUPS):
        group = tl.minimum(first + i, depth_groups - 1)
        at = weight_at + group * BLOCK
        if short:
            left = tl.load(at, mask=(group * BLOCK + k < DEPTH)[None, :], other=0.0, eviction_policy="evict_first")
        else:
            left = tl.load(at, eviction_policy="evict_first")
        lefts = lefts + (left,)
        left_scales = left_scales + (tl.load(scale_at + group),)
    if EARLY and AHEAD:
        tl_cuda.gdc_wait()
    rights = ()
    right_scales = ()
    for i in tl.static_range(GROUPS):
        group = tl.minimum(first + i, depth_groups - 1)
        # Groups beyond the last are zeros: the weights there are the last ones once more.
        column = (first + i) * BLOCK + k
        if short or depth_groups != SPLIT * GROUPS:
            right = tl.load(x_at + group * BLOCK, mask=(column < DEPTH)[None, :], other=0.0)
        else:
            right = tl.load(x_at + group * BLOCK)
        rights = rights + (right,)
        if GIVEN:
            right_scales = right_scales + (tl.load(x_scale + token * scale_row + group * scale_group),)
    total = tl.zeros((TILE, TOKENS), tl.float32)
    for i in tl.static_range(GROUPS):
        if GIVEN:
            right, scale = rights[i], right_scales[i]
        else:
            wide = rights[i].to(tl.float32)
            scale, inverse = quant_scale(tl.max(magnitude(wide), 1).to(tl.float32, bitcast=True), LARGEST, SCALING)
            right = (wide * inverse[:, None]).to(weight.dtype.element_ty)
        if WIDE:
            product = tl.dot(lefts[i].to(tl.float32), tl.trans(right.to(tl.float32)), input_precision="ieee")
        else:
            product = tl.dot(lefts[i], tl.trans(right))
        total += product * (scale * left_scales[i])[None, :]
    at = m[None, :] * COLUMNS + n[:, None]
    mask = (m < tokens)[None, :] & (n < COLUMNS)[:, None]
    _hand_in(total, 1.0, 1.0, 0.0, parts, arrived, out, at, mask, tile, part, TOKENS, TILE, SPLIT, False, False)


@triton.jit
def _finish(total, left_scale, right_scale, bias, out, at, mask, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Store what all programs of a tile have summed, with scales of its columns and tokens and the bias if there are any."""
    if SCALED:
        total = total * left_scale * right_scale
    if BIAS:
        total += bias
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _hand_in(
    total, left_scale, right_scale, bias, parts, arrived, out, at, mask, tile, part,
    TOKENS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Leave what one program has summed, or be the last of a tile's to arrive, and finish."""
    if SPLIT == 1:
        _finish(total, left_scale, right_scale, bias, out, at, mask, SCALED, BIAS)
    else:
        # A tile's part is TOKENS numbers for each column, also of tokens that are not there: stores and loads need no mask.
        mine = (
            parts
            + tile * (SPLIT * TILE * TOKENS)
            + tl.arange(0, TILE)[:, None] * TOKENS
            + tl.arange(0, TOKENS)[None, :]
        )
        tl.store(mine + part * (TILE * TOKENS), total)
        tl.debug_barrier()  # all of the program's stores, before its one thread says that it has arrived
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
            if SPLIT <= 16:  # all of them at once, while there are registers for it
                several = ()
                for each in tl.static_range(SPLIT):
                    several = several + (tl.load(mine + each * (TILE * TOKENS), cache_modifier=".cg"),)
                total = several[0]
                for each in tl.static_range(1, SPLIT):
                    total += several[each]
            else:
                total = tl.zeros((TILE, TOKENS), tl.float32)
                for each in range(SPLIT):
                    total += tl.load(mine + each * (TILE * TOKENS), cache_modifier=".cg")
            _finish(total, left_scale, right_scale, bias, out, at, mask, SCALED, BIAS)
            tl.store(arrived + tile, 0)


@triton.jit(do_not_specialize=["tokens", "x_row", "scale_row", "weight_row"])
def few_token_plain(
    x, x_scale, weight, weight_scale, bias, parts, arrived, out,
    tokens, x_row, scale_row, weight_row,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, X_UNIT: tl.constexpr, WEIGHT_UNIT: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr, HELD: tl.constexpr,
    SCALED: tl.constexpr, CHANNELS: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same without scales inside of the sum, in groups of BLOCK columns: HELD of them are on their way at once.

    SCALED: weights and activations in fp8, each with scales of a whole row that wait for the end: one per token, scale_row apart, and one per
    column of the product where CHANNELS, else one. Not SCALED: weights and activations of 16 bits, and no scale is read. BIAS: one number per
    column is added at the end; else bias is not read.
    """
    depth_groups: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
    short: tl.constexpr = DEPTH % BLOCK != 0
    masked: tl.constexpr = short or depth_groups != SPLIT * GROUPS
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    first = part * GROUPS
    n, m, k = tile * TILE + tl.arange(0, TILE), tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    row, token = tl.minimum(n, COLUMNS - 1).to(tl.int64), tl.minimum(m, tokens - 1).to(tl.int64)
    weight_at = weight + (row * weight_row)[:, None] * WEIGHT_UNIT + k[None, :]
    x_at = x + (token * x_row)[:, None] * X_UNIT + k[None, :]
    if EARLY:
        tl_cuda.gdc_launch_dependents()
        if not AHEAD:
            tl_cuda.gdc_wait()
    added = tl.load(bias + row).to(tl.float32)[:, None] if BIAS else 0.0
    left_scale, right_scale = 1.0, 1.0
    if SCALED:
        left_scale = tl.load(weight_scale + row)[:, None] if CHANNELS else tl.load(weight_scale)
    lefts = ()
    for i in tl.static_range(HELD):
        lefts = lefts + (_columns(weight_at, first + i, k, DEPTH, BLOCK, short, "evict_first"),)
    if EARLY and AHEAD:
        tl_cuda.gdc_wait()
    if SCALED:
        right_scale = tl.load(x_scale + token * scale_row)[None, :]
    rights = ()
    for i in tl.static_range(HELD):
        rights = rights + (_columns(x_at, first + i, k, DEPTH, BLOCK, masked, ""),)
    total = tl.zeros((TILE, TOKENS), tl.float32)
    for i in tl.static_range(GROUPS):
        if i + HELD < GROUPS:
            lefts = lefts + (_columns(weight_at, first + i + HELD, k, DEPTH, BLOCK, short, "evict_first"),)
            rights = rights + (_columns(x_at, first + i + HELD, k, DEPTH, BLOCK, masked, ""),)
        if WIDE:
            total += tl.dot(lefts[i].to(tl.float32), tl.trans(rights[i].to(tl.float32)), input_precision="ieee")
        elif SCALED:  # Hopper's tensor cores keep 14 bits of a sum of fp8 products: each group is summed anew
            total += tl.dot(lefts[i], tl.trans(rights[i]))
        else:
            total = tl.dot(lefts[i], tl.trans(rights[i]), total)
    at = m[None, :] * COLUMNS + n[:, None]
    mask = (m < tokens)[None, :] & (n < COLUMNS)[:, None]
    _hand_in(
        total, left_scale, right_scale, added, parts, arrived, out, at, mask, tile, part, TOKENS, TILE, SPLIT, SCALED, BIAS
    )  # fmt: skip


@triton.jit
def _columns(
    rows, group, k, DEPTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr
):  # fmt: skip
    """One group of columns of all rows. MASKED: those beyond the last are zeros, else they are the last group's once more."""
    at = rows + tl.minimum(group, (DEPTH - 1) // BLOCK) * BLOCK
    if MASKED:
        return tl.load(at, mask=(group * BLOCK + k < DEPTH)[None, :], other=0.0, eviction_policy=POLICY)
    return tl.load(at, eviction_policy=POLICY)
