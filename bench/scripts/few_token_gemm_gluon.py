# ruff: noqa: N803, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""A few-token product for sm90 whose weights are on their way by TMA before the kernel in front has ended.

The weights wait in shared memory, of which a program takes so little that programs of two kernels fit on a processor: while one
kernel waits for activations, multiplies, and sums its parts, the memory already brings the weights of the next. Compiled by Triton 3.6
and 3.8 for sm90, and not run yet.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GROUP = gl.constexpr(128)
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _share(
    total, parts, arrived, out, tile, part, tokens, columns,
    TILE_N: gl.constexpr, TILE_M: gl.constexpr, SPLIT: gl.constexpr, EACH: gl.constexpr,
    mma: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Sum the parts of a tile, always in the same order: EACH tokens by each of its programs, or 0: all by the last to arrive."""
    n = tile * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(1, mma))
    m = gl.arange(0, TILE_M, gl.SliceLayout(0, mma))
    at = m[None, :] * columns + n[:, None]
    mask = (m < tokens)[None, :] & (n < columns)[:, None]
    if SPLIT == 1:
        gl.store(out + at, total.to(gl.bfloat16), mask=mask)
    else:
        gl.store(parts + part * tokens * columns + at, total, mask=mask)
        barrier()
        if EACH == 0:
            if gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
                several = ()
                for each in gl.static_range(SPLIT):
                    one = gl.load(parts + each * tokens * columns + at, mask=mask, other=0.0, cache_modifier=".cg")
                    several = several + (one,)
                total = several[0]
                for each in gl.static_range(1, SPLIT):
                    total += several[each]
                gl.store(out + at, total.to(gl.bfloat16), mask=mask)
                gl.store(arrived + tile, 0)
        else:
            # All programs of a tile together turn its highest bit, which each of them waits for.
            old = gl.atomic_add(arrived + tile, gl.where(part == 0, 2147483647 - (SPLIT - 2), 1), sem="acq_rel")
            seen = old
            while (seen ^ old) >= 0:
                seen = gl.atomic_add(arrived + tile, 0, sem="acquire")
            if part * EACH < tokens:
                own: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [num_warps, 1], [1, 0])
                row = part * EACH + gl.arange(0, EACH, gl.SliceLayout(1, own))
                column = tile * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(0, own))
                place = row[:, None] * columns + column[None, :]
                there = (row < tokens)[:, None] & (column < columns)[None, :]
                sums = gl.zeros([EACH, TILE_N], gl.float32, own)
                for each in gl.static_range(SPLIT):
                    sums += gl.load(
                        parts + each * tokens * columns + place, mask=there, other=0.0, cache_modifier=".cg"
                    )
                gl.store(out + place, sums.to(gl.bfloat16), mask=there)


@gluon.jit
def _multiplied(
    ring, right_ring, scales, ready, boxes, x_boxes, tile, first,
    TILE_N: gl.constexpr, TILE_M: gl.constexpr, GROUPS: gl.constexpr, RING: gl.constexpr, BOTH: gl.constexpr,
    ONCE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """BOTH: the right operand comes by TMA into a ring too; else it is there, all groups. ONCE: no product waits for another."""
    by_token: gl.constexpr = gl.SliceLayout(0, mma)
    total = gl.zeros([TILE_N, TILE_M], gl.float32, mma)
    if ONCE:
        several = ()
        for i in gl.static_range(GROUPS):
            mbarrier.wait(ready.index(i), 0)
            zeros = gl.zeros([TILE_N, TILE_M], gl.float32, mma)
            right = right_ring.index(i).permute((1, 0))
            several = several + (warpgroup_mma(ring.index(i), right, zeros, use_acc=False, is_async=True),)
        for i in gl.static_range(GROUPS):
            scale = scales.index(i).load(by_token)
            total += warpgroup_mma_wait(GROUPS - 1 - i, deps=(several[i],)) * scale[None, :]
    else:
        sums = total
        for i in range(GROUPS):
            slot = i % RING
            scale = scales.index(i).load(by_token)
            mbarrier.wait(ready.index(slot), (i // RING) & 1)
            right = right_ring.index(slot if BOTH else i).permute((1, 0))
            sums = warpgroup_mma(ring.index(slot), right, sums, use_acc=False, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            if RING < GROUPS:
                barrier()
                if i + RING < GROUPS:
                    at = (first + i + RING) * GROUP
                    mbarrier.expect(ready.index(slot), TILE_N * 128 + (TILE_M * 128 if BOTH else 0))
                    tma.async_copy_global_to_shared(boxes, [tile * TILE_N, at], ready.index(slot), ring.index(slot))
                    if BOTH:
                        tma.async_copy_global_to_shared(x_boxes, [0, at], ready.index(slot), right_ring.index(slot))
            total += sums * scale[None, :]
    return total


@gluon.jit
def _begun(
    boxes, weight_scales, tile, first, groups,
    TILE_N: gl.constexpr, GROUPS: gl.constexpr, RING: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Weights are asked for, with MORE bytes of others to come to each barrier. The ring, its barriers, and the weights' scales."""
    ring = gl.allocate_shared_memory(gl.float8e4nv, [RING, TILE_N, 128], boxes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.expect(ready.index(i), TILE_N * 128 + MORE)
        tma.async_copy_global_to_shared(boxes, [tile * TILE_N, (first + i) * GROUP], ready.index(i), ring.index(i))
    left_scales = ()
    for i in gl.static_range(GROUPS):
        at = weight_scales + (tile * TILE_N // GROUP) * groups + gl.minimum(first + i, groups - 1)
        left_scales = left_scales + (gl.where(first + i < groups, gl.load(at), 0.0),)
    return ring, ready, left_scales


@gluon.jit(do_not_specialize=["tokens", "token_stride", "group_stride"])
def boxed_mm(
    x, boxes, weight_scales, parts, arrived, out, tokens, columns, depth,
    TILE_N: gl.constexpr, TILE_M: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, RING: gl.constexpr,
    FIRST: gl.constexpr, ONCE: gl.constexpr, EACH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Programs: tiles of TILE_N columns, times SPLIT parts of GROUPS groups. RING of these are in shared memory at a time.

    x is bfloat16, and every program quantises what it reads.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TILE_M, 32])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    part, tile = gl.program_id(0), gl.program_id(1)
    groups = depth // GROUP
    first = part * GROUPS
    if FIRST:
        gdc_launch_dependents()
    ring, ready, left_scales = _begun(boxes, weight_scales, tile, first, groups, TILE_N, GROUPS, RING, 0)
    gdc_wait()
    if not FIRST:
        gdc_launch_dependents()
    token = gl.minimum(gl.arange(0, TILE_M, gl.SliceLayout(1, wide)), tokens - 1)
    k = gl.arange(0, 128, gl.SliceLayout(0, wide))
    rights = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, TILE_M, 128], gl.NVMMASharedLayout(128, 8, 2))
    scales = gl.allocate_shared_memory(gl.float32, [GROUPS, TILE_M], flat)
    came = ()
    for i in gl.static_range(GROUPS):
        at = gl.minimum(first + i, groups - 1) * GROUP
        came = came + (gl.load(x + token[:, None] * depth + (at + k)[None, :]),)
    for i in gl.static_range(GROUPS):
        value = came[i].to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(value), 1), 1e-10)
        scales.index(i).store(largest * ((1.0 / 448.0) * left_scales[i]))
        rights.index(i).store((value * (448.0 / largest)[:, None]).to(gl.float8e4nv))
    fence_async_shared()
    barrier()
    total = _multiplied(
        ring, rights, scales, ready, boxes, boxes, tile, first, TILE_N, TILE_M, GROUPS, RING, False, ONCE, mma
    )
    _share(total, parts, arrived, out, tile, part, tokens, columns, TILE_N, TILE_M, SPLIT, EACH, mma, num_warps)


@gluon.jit(do_not_specialize=["tokens", "token_stride", "group_stride"])
def both_boxed_mm(
    x_boxes, x_scales, boxes, weight_scales, parts, arrived, out, tokens, columns, depth, token_stride, group_stride,
    TILE_N: gl.constexpr, TILE_M: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, RING: gl.constexpr,
    ONCE: gl.constexpr, EACH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `boxed_mm`, of quantised activations, which come by TMA too."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TILE_M, 32])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    spread: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    part, tile = gl.program_id(0), gl.program_id(1)
    groups = depth // GROUP
    first = part * GROUPS
    gdc_launch_dependents()
    right_ring = gl.allocate_shared_memory(gl.float8e4nv, [RING, TILE_M, 128], x_boxes.layout)
    scales = gl.allocate_shared_memory(gl.float32, [GROUPS, TILE_M], flat)
    ring, ready, left_scales = _begun(boxes, weight_scales, tile, first, groups, TILE_N, GROUPS, RING, TILE_M * 128)
    gdc_wait()
    for i in gl.static_range(RING):
        tma.async_copy_global_to_shared(x_boxes, [0, (first + i) * GROUP], ready.index(i), right_ring.index(i))
    token = gl.minimum(gl.arange(0, TILE_M, spread), tokens - 1)
    came = ()
    for i in gl.static_range(GROUPS):
        at = x_scales + token * token_stride + gl.minimum(first + i, groups - 1) * group_stride
        came = came + (gl.load(at),)
    for i in gl.static_range(GROUPS):
        scales.index(i).store(came[i] * left_scales[i])
    barrier()
    total = _multiplied(
        ring, right_ring, scales, ready, boxes, x_boxes, tile, first, TILE_N, TILE_M, GROUPS, RING, True, ONCE, mma
    )
    _share(total, parts, arrived, out, tile, part, tokens, columns, TILE_N, TILE_M, SPLIT, EACH, mma, num_warps)
