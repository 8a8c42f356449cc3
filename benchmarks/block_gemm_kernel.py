"""The Triton kernel of `block_gemm`: one program per tile of the result, which walks the depth by blocks of 128."""

import triton
import triton.language as tl


@triton.jit
def block_mm(
    x_ptr, x_scales_ptr, weight_ptr, weight_scales_ptr, out_ptr, rows, columns, depth, scale_row_stride, scale_group_stride,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """All tensors but the scales of x are contiguous; tile_n divides 128, tile_k is 128 and divides the depth."""
    m = tl.program_id(1) * tile_m + tl.arange(0, tile_m)
    n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    k = tl.arange(0, tile_k)
    inside = m < rows
    groups = depth // tile_k
    x_at = x_ptr + m[:, None].to(tl.int64) * depth + k[None, :]
    weight_at = weight_ptr + n[None, :].to(tl.int64) * depth + k[:, None]
    total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for group in range(groups):
        x = tl.load(x_at + group * tile_k, mask=inside[:, None], other=0.0)
        weight = tl.load(weight_at + group * tile_k, mask=n[None, :] < columns, other=0.0)
        x_scale = tl.load(x_scales_ptr + m * scale_row_stride + group * scale_group_stride, mask=inside, other=0.0)
        weight_scale = tl.load(weight_scales_ptr + (tl.program_id(0) * tile_n // 128) * groups + group)
        total += tl.dot(x, weight) * (x_scale * weight_scale)[:, None]
    at = out_ptr + m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(at, total.to(tl.bfloat16), mask=inside[:, None] & (n[None, :] < columns))
