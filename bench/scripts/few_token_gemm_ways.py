# ruff: noqa: N803, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""Other ways to multiply by few tokens, tried in `few_token_gemm`: weights in registers before the kernel in front has ended, and
tiles so narrow that no program shares its depth with another.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

GROUP = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)


@triton.jit
def _quantised(values, AXIS: tl.constexpr):
    wide = values.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), AXIS, keep_dims=True), 1e-10) / LARGEST
    return tl.clamp(wide / scale, -LARGEST, LARGEST).to(tl.float8e4nv), scale


@triton.jit
def _share(total, parts, arrived, out, tile, part, at, mask, tokens, columns, SPLIT: tl.constexpr):
    """Of a tile's programs the last to arrive sums all parts, always in the same order."""
    if SPLIT == 1:
        tl.store(out + at, total.to(tl.bfloat16), mask=mask)
    else:
        tl.store(parts + part * tokens * columns + at, total, mask=mask)
        tl.debug_barrier()
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


@triton.jit(do_not_specialize=["tokens", "token_stride", "group_stride"])
def held_mm(
    x, x_scales, weight, weight_scales, parts, arrived, out, tokens, columns, depth, token_stride, group_stride,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr, QUANT: tl.constexpr,
    FIRST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """All of a program's weights are asked for at once, and stay in registers until the activations are there.

    GROUPS: of a part, the last of which may have fewer. FIRST: the next kernel is let in before this one waits. AHEAD: how many
    groups of x are asked for before the first is multiplied.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
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
    at = m[None, :] * columns + n[:, None]
    mask = (m < tokens)[None, :] & (n < columns)[:, None]
    _share(total, parts, arrived, out, tile, part, at, mask, tokens, columns, SPLIT)


@triton.jit(do_not_specialize=["tokens", "token_stride", "group_stride"])
def narrow_mm(
    x, x_scales, weight, weight_scales, parts, arrived, out, tokens, columns, depth, token_stride, group_stride,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, QUANT: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """WIDE groups at a time, each by a warp of its own; the warps' sums meet at the end."""
    tile, part = tl.program_id(0), tl.program_id(1)
    groups = depth // GROUP
    steps = tl.cdiv(groups, SPLIT * WIDE)
    first = part * steps * WIDE
    n, m, k, w = tile * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_M), tl.arange(0, GROUP), tl.arange(0, WIDE)
    row, token = tl.minimum(n, columns - 1), tl.minimum(m, tokens - 1)
    weight_at = weight + row[None, :, None].to(tl.int64) * depth + k[None, None, :]
    scales_at = weight_scales + (tile * TILE_N // GROUP) * groups
    x_at = x + token[None, :, None] * depth + k[None, None, :]
    if FIRST:
        tl_cuda.gdc_launch_dependents()
    tl_cuda.gdc_wait()
    if not FIRST:
        tl_cuda.gdc_launch_dependents()
    total = tl.zeros((WIDE, TILE_N, TILE_M), tl.float32)
    for step in range(steps):
        group = first + step * WIDE + w
        there = group < groups
        offset = (group * GROUP)[:, None, None]
        left = tl.load(weight_at + offset, mask=there[:, None, None], other=0.0, eviction_policy="evict_first")
        values = tl.load(x_at + offset, mask=there[:, None, None], other=0.0)
        left_scale = tl.load(scales_at + group, mask=there, other=0.0)
        if QUANT:
            right, scale = _quantised(values, 2)
            scale = tl.reshape(scale, (WIDE, TILE_M))
        else:
            right = values
            scale = tl.load(
                x_scales + (token * token_stride)[None, :] + (group * group_stride)[:, None],
                mask=there[:, None],
                other=0.0,
            )
        total += tl.dot(left, tl.trans(right, 0, 2, 1)) * (scale * left_scale[:, None])[:, None, :]
    at = m[None, :] * columns + n[:, None]
    mask = (m < tokens)[None, :] & (n < columns)[:, None]
    _share(tl.sum(total, 0), parts, arrived, out, tile, part, at, mask, tokens, columns, SPLIT)
