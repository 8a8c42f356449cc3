# ruff: noqa: N803, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""A few-token product for sm90 whose weights are on their way by TMA before the kernel in front has ended.

The weights wait in shared memory, of which a program takes so little that programs of two kernels fit on a processor: while one
kernel waits for activations, multiplies, and sums its parts, the memory already brings the weights of the next.
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
def _asked(x, x_scales, token, group, groups, k, depth, token_stride, group_stride, QUANT: gl.constexpr):
    at = gl.minimum(group, groups - 1)
    values = gl.load(x + token[:, None] * depth + (at * GROUP + k)[None, :])
    scale = values
    if not QUANT:
        scale = gl.load(x_scales + token * token_stride + at * group_stride)
    return values, scale


@gluon.jit(do_not_specialize=["tokens", "token_stride", "group_stride"])
def boxed_mm(
    x, x_scales, boxes, weight_scales, parts, arrived, out, tokens, columns, depth, token_stride, group_stride,
    TILE_N: gl.constexpr, TILE_M: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, RING: gl.constexpr,
    QUANT: gl.constexpr, FIRST: gl.constexpr, AHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Programs: tiles of TILE_N columns, times SPLIT parts of GROUPS groups. RING of these are in shared memory at a time."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TILE_M if TILE_M < 64 else 64, 32])
    by_token: gl.constexpr = gl.SliceLayout(0, mma)
    held: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile, part = gl.program_id(0), gl.program_id(1)
    groups = depth // GROUP
    first = part * GROUPS
    ring = gl.allocate_shared_memory(gl.float8e4nv, [RING, TILE_N, 128], boxes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(RING):
        mbarrier.expect(ready.index(i), TILE_N * 128)
        tma.async_copy_global_to_shared(boxes, [tile * TILE_N, (first + i) * GROUP], ready.index(i), ring.index(i))
    if FIRST:
        gdc_launch_dependents()
    left_scales = ()
    for i in gl.static_range(GROUPS):
        at = weight_scales + (tile * TILE_N // GROUP) * groups + gl.minimum(first + i, groups - 1)
        left_scales = left_scales + (gl.load(at),)
    gdc_wait()
    if not FIRST:
        gdc_launch_dependents()
    token = gl.minimum(gl.arange(0, TILE_M, gl.SliceLayout(1, wide)), tokens - 1)
    k = gl.arange(0, 128, gl.SliceLayout(0, wide))
    rights = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, TILE_M, 128], held)
    scales = gl.allocate_shared_memory(gl.float32, [GROUPS, TILE_M], flat)
    came = ()
    came_scales = ()
    for i in gl.static_range(AHEAD):
        values, scale = _asked(x, x_scales, token, first + i, groups, k, depth, token_stride, group_stride, QUANT)
        came = came + (values,)
        came_scales = came_scales + (scale,)
    total = gl.zeros([TILE_N, TILE_M], gl.float32, mma)
    for i in gl.static_range(GROUPS):
        if AHEAD < GROUPS or i == 0:
            # All of what was asked for, or one group at a time with the next on their way.
            for j in gl.static_range(GROUPS if AHEAD == GROUPS else 1):
                if i + j + AHEAD < GROUPS:
                    values, scale = _asked(
                        x, x_scales, token, first + i + j + AHEAD, groups, k, depth, token_stride, group_stride, QUANT
                    )
                    came = came + (values,)
                    came_scales = came_scales + (scale,)
                if QUANT:
                    value = came[i + j].to(gl.float32)
                    largest = gl.maximum(gl.max(gl.abs(value), 1), 1e-10)
                    scales.index(i + j).store(largest * (1.0 / 448.0))
                    rights.index(i + j).store((value * (448.0 / largest)[:, None]).to(gl.float8e4nv))
                else:
                    scales.index(i + j).store(came_scales[i + j])
                    rights.index(i + j).store(came[i + j])
            fence_async_shared()
        slot = i % RING
        mbarrier.wait(ready.index(slot), (i // RING) & 1)
        sums = warpgroup_mma(
            ring.index(slot), rights.index(i).permute((1, 0)), gl.zeros([TILE_N, TILE_M], gl.float32, mma),
            use_acc=False, is_async=True,
        )  # fmt: skip
        scale = scales.index(i).load(by_token) * gl.where(first + i < groups, left_scales[i], 0.0)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        total += sums * scale[None, :]
        if i + RING < GROUPS:
            barrier()
            mbarrier.expect(ready.index(slot), TILE_N * 128)
            tma.async_copy_global_to_shared(
                boxes, [tile * TILE_N, (first + i + RING) * GROUP], ready.index(slot), ring.index(slot)
            )
    n = tile * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(1, mma))
    m = gl.arange(0, TILE_M, by_token)
    at = m[None, :] * columns + n[:, None]
    mask = (m < tokens)[None, :] & (n < columns)[:, None]
    if SPLIT == 1:
        gl.store(out + at, total.to(gl.bfloat16), mask=mask)
    else:
        gl.store(parts + part * tokens * columns + at, total, mask=mask)
        barrier()
        if gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
            if TILE_M <= 16:
                several = ()
                for each in gl.static_range(SPLIT):
                    one = gl.load(parts + each * tokens * columns + at, mask=mask, other=0.0, cache_modifier=".cg")
                    several = several + (one,)
                total = several[0]
                for each in gl.static_range(1, SPLIT):
                    total += several[each]
            else:
                total = gl.zeros([TILE_N, TILE_M], gl.float32, mma)
                for each in gl.static_range(SPLIT):
                    total += gl.load(parts + each * tokens * columns + at, mask=mask, other=0.0, cache_modifier=".cg")
            gl.store(out + at, total.to(gl.bfloat16), mask=mask)
            gl.store(arrived + tile, 0)
