# ruff: noqa: N803 (constants of a kernel are written in capitals)
"""The Triton kernel of `few_token_gemm`: a block-scaled fp8 product with few tokens, which waits for its weights and little else.

Weights are the left operand, so that few tokens fill little of a tensor core's right one. The depth is split over programs, so that
there are enough of them to keep the memory busy; the last of a tile's programs to arrive sums their parts, always in the same order.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

GROUP = tl.constexpr(128)
"""Columns of a scale, and rows of a weight's."""
LARGEST = tl.constexpr(448.0)


@triton.jit
def _fetch_ahead(weight, row, depth, first, last):
    """Into the L2 cache: these columns of a weight's rows, half a row per thread."""
    length = tl.cdiv(last - first, 2) * GROUP
    half = tl.minimum(first * GROUP + tl.arange(0, 2) * length, last * GROUP - length)
    at = weight + row[:, None].to(tl.int64) * depth + half[None, :]
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [at, tl.zeros(at.shape, tl.int32) + length],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["tokens", "token_stride", "group_stride"])
def few_token_mm(
    x, x_scales, weight, weight_boxes, weight_scales, parts, arrived, out, tokens, columns, depth, token_stride, group_stride,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, SPLIT: tl.constexpr, QUANT: tl.constexpr,
    BOXES: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of TILE_N columns, times SPLIT. All tensors but the scales of x are contiguous.

    x (tokens, depth) is e4m3 with `x_scales` (tokens, depth / 128) of any strides; QUANT: bfloat16, and a program quantises what it
    reads. weight (columns, depth) is e4m3, with `weight_scales` (blocks of columns, depth / 128); BOXES: it is read by `weight_boxes`,
    its tensor descriptor of (TILE_N, 128). parts (SPLIT, tokens, columns) in float32 and arrived, zeros for each tile in int32, are
    used where SPLIT is not 1, and arrived is left as zeros. out (tokens, columns) is bfloat16.

    TILE_N divides 128, and TILE_M holds all tokens. EARLY: launched while the kernel in front ends; only x and what is written may
    depend on it. AHEAD: weights are fetched into the L2 cache before that kernel has ended.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    groups = depth // GROUP
    first, last = groups * part // SPLIT, groups * (part + 1) // SPLIT
    n = tile * TILE_N + tl.arange(0, TILE_N)
    m = tl.arange(0, TILE_M)
    k = tl.arange(0, GROUP)
    # Beyond the last row is the last one: a load without a mask, whose result nobody stores.
    row, token = tl.minimum(n, columns - 1), tl.minimum(m, tokens - 1)
    weight_at = weight + row[:, None].to(tl.int64) * depth + k[None, :]
    weight_scales_at = weight_scales + (tile * TILE_N // GROUP) * groups
    x_at = x + token[:, None] * depth + k[None, :]
    x_scales_at = x_scales + token * token_stride
    if AHEAD:
        _fetch_ahead(weight, row, depth, first, last)
    # Scales are loaded one turn before they are used, as the compiler only does so for what a dot reads.
    weight_scale = tl.load(weight_scales_at + first)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    if not QUANT:
        x_scale = tl.load(x_scales_at + first * group_stride)
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    for group in range(first, last):
        following = tl.minimum(group + 1, last - 1)
        next_weight_scale = tl.load(weight_scales_at + following)
        if BOXES:
            left = weight_boxes.load([tile * TILE_N, group * GROUP])
        else:
            left = tl.load(weight_at + group * GROUP, eviction_policy="evict_first")
        values = tl.load(x_at + group * GROUP)
        if QUANT:
            wide = values.to(tl.float32)
            x_scale = tl.maximum(tl.max(tl.abs(wide), 1), 1e-10) / LARGEST
            right = tl.clamp(wide / x_scale[:, None], -LARGEST, LARGEST).to(tl.float8e4nv)
            total += tl.dot(left, tl.trans(right)) * (x_scale * weight_scale)[None, :]
        else:
            next_x_scale = tl.load(x_scales_at + following * group_stride)
            total += tl.dot(left, tl.trans(values)) * (x_scale * weight_scale)[None, :]
            x_scale = next_x_scale
        weight_scale = next_weight_scale
    at = m[None, :] * columns + n[:, None]
    mask = (m < tokens)[None, :] & (n < columns)[:, None]
    if SPLIT == 1:
        tl.store(out + at, total.to(tl.bfloat16), mask=mask)
    else:
        tl.store(parts + part * tokens * columns + at, total, mask=mask)
        tl.debug_barrier()  # all of the program's stores, before its one thread says that it has arrived
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros((TILE_N, TILE_M), tl.float32)
            for each in tl.static_range(SPLIT):
                total += tl.load(parts + each * tokens * columns + at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + at, total.to(tl.bfloat16), mask=mask)
            tl.store(arrived + tile, 0)
