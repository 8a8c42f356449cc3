# ruff: noqa: N803, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""A few-token product whose weights are on their way to registers before the kernel in front has ended; tried in `few_token_gemm_try`."""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

GROUP = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)


@triton.jit
def _quantised(values, AXIS: tl.constexpr):
    wide = values.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), AXIS, keep_dims=True), 1e-10)
    return (wide * (LARGEST / largest)).to(tl.float8e4nv), largest * (1.0 / LARGEST)


@triton.jit
def _share(
    total, parts, arrived, out, tile, part, tokens, columns,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, SPLIT: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a tile, always in the same order: EACH tokens by each of its programs, or 0: all by the last to arrive."""
    n, m = tile * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    at = m[None, :] * columns + n[:, None]
    mask = (m < tokens)[None, :] & (n < columns)[:, None]
    if SPLIT == 1:
        tl.store(out + at, total.to(tl.bfloat16), mask=mask)
    else:
        tl.store(parts + part * tokens * columns + at, total, mask=mask)
        tl.debug_barrier()
        if EACH == 0:
            if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
                several = ()
                for each in tl.static_range(SPLIT):
                    several = several + (
                        tl.load(parts + each * tokens * columns + at, mask=mask, other=0.0, cache_modifier=".cg"),
                    )
                total = several[0]
                for each in tl.static_range(1, SPLIT):
                    total += several[each]
                tl.store(out + at, total.to(tl.bfloat16), mask=mask)
                tl.store(arrived + tile, 0)
        else:
            # All programs of a tile together turn its highest bit, which each of them waits for.
            old = tl.atomic_add(arrived + tile, tl.where(part == 0, 2147483647 - (SPLIT - 2), 1), sem="acq_rel")
            seen = old
            while (seen ^ old) >= 0:
                seen = tl.atomic_add(arrived + tile, 0, sem="acquire")
            if part * EACH < tokens:
                row = part * EACH + tl.arange(0, EACH)
                place = row[:, None] * columns + n[None, :]
                there = (row < tokens)[:, None] & (n < columns)[None, :]
                sums = tl.zeros((EACH, TILE_N), tl.float32)
                for each in tl.static_range(SPLIT):
                    sums += tl.load(
                        parts + each * tokens * columns + place, mask=there, other=0.0, cache_modifier=".cg"
                    )
                tl.store(out + place, sums.to(tl.bfloat16), mask=there)


@triton.jit(do_not_specialize=["tokens", "token_stride", "group_stride"])
def held_mm(
    x, x_scales, weight, weight_scales, parts, arrived, out, tokens, columns, depth, token_stride, group_stride,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr, QUANT: tl.constexpr,
    FIRST: tl.constexpr, AHEAD: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """All of a program's weights are asked for at once, and stay in registers until the activations are there.

    GROUPS: of a part, the last of which may have fewer. FIRST: the next kernel is let in before this one waits. AHEAD: how many
    groups of x are asked for before the first is multiplied.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    groups = depth // GROUP
    first = part * GROUPS
    n, m, k = tile * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_M), tl.arange(0, GROUP)
    row, token = tl.minimum(n, columns - 1), tl.minimum(m, tokens - 1)
    weight_at = weight + row[:, None].to(tl.int64) * depth + k[None, :]
    scales_at = weight_scales + (tile * TILE_N // GROUP) * groups
    if FIRST:
        tl_cuda.gdc_launch_dependents()
    lefts = ()
    left_scales = ()
    for i in tl.static_range(GROUPS):
        group = tl.minimum(first + i, groups - 1)
        lefts = lefts + (tl.load(weight_at + group * GROUP, eviction_policy="evict_first"),)
        left_scales = left_scales + (tl.where(first + i < groups, tl.load(scales_at + group), 0.0),)
    tl_cuda.gdc_wait()
    if not FIRST:
        tl_cuda.gdc_launch_dependents()
    x_at = x + token[:, None] * depth + k[None, :]
    rights = ()
    right_scales = ()
    for i in tl.static_range(AHEAD if AHEAD < GROUPS else GROUPS):
        group = tl.minimum(first + i, groups - 1)
        rights = rights + (tl.load(x_at + group * GROUP),)
        if not QUANT:
            right_scales = right_scales + (tl.load(x_scales + token * token_stride + group * group_stride),)
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    for i in tl.static_range(GROUPS):
        if i + AHEAD < GROUPS:
            group = tl.minimum(first + i + AHEAD, groups - 1)
            rights = rights + (tl.load(x_at + group * GROUP),)
            if not QUANT:
                right_scales = right_scales + (tl.load(x_scales + token * token_stride + group * group_stride),)
        if QUANT:
            right, scale = _quantised(rights[i], 1)
            scale = tl.reshape(scale, (TILE_M,))
        else:
            right, scale = rights[i], right_scales[i]
        total += tl.dot(lefts[i], tl.trans(right)) * (scale * left_scales[i])[None, :]
    _share(total, parts, arrived, out, tile, part, tokens, columns, TILE_N, TILE_M, SPLIT, EACH)


@triton.jit(do_not_specialize=["tokens", "token_stride", "group_stride"])
def quantise_groups(x, values, scales, tokens, depth, token_stride, group_stride, GROUPS: tl.constexpr):
    """GROUPS groups of a token per program. All groups of all tokens are counted through."""
    tl_cuda.gdc_launch_dependents()
    groups = depth // GROUP
    number = tl.minimum(tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), tokens * groups - 1)
    at = number[:, None].to(tl.int64) * GROUP + tl.arange(0, GROUP)[None, :]
    tl_cuda.gdc_wait()
    right, scale = _quantised(tl.load(x + at), 1)
    tl.store(values + at, right)
    scale = tl.reshape(scale, (GROUPS,))
    tl.store(scales + number // groups * token_stride + number % groups * group_stride, scale)
