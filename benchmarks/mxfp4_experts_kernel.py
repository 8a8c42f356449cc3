"""The Triton kernels of `mxfp4_experts`: which expert has which tokens, and the products of one expert with its tokens."""

import triton
import triton.language as tl


@triton.jit
def group_pairs(
    ids_ptr, order_ptr, experts_ptr, starts_ptr, counts_ptr, number_ptr, pairs, tile: tl.constexpr, part: tl.constexpr
):  # fmt: skip
    """Pairs (token, chosen expert) in the order of experts, and for each expert that has any: where they start, how many.

    One program, which compares all with all. `tile`: a power of two, at least `pairs`; `part` divides it.
    """
    p = tl.arange(0, tile)
    mine = tl.load(ids_ptr + p, mask=p < pairs, other=1 << 20).to(tl.int32)
    below = tl.zeros((tile,), dtype=tl.int32)
    earlier, count, group = below, below, below
    for start in range(0, tile, part):
        q = start + tl.arange(0, part)
        others = tl.load(ids_ptr + q, mask=q < pairs, other=1 << 20).to(tl.int32)
        smaller = (others[None, :] < mine[:, None]).to(tl.int32)
        same = (others[None, :] == mine[:, None]).to(tl.int32)
        is_first = (tl.sum(same * (p[:, None] < q[None, :]), 0) == 0).to(tl.int32)
        below += tl.sum(smaller, 1)
        earlier += tl.sum(same * (q[None, :] < p[:, None]), 1)
        count += tl.sum(same, 1)
        group += tl.sum(smaller * is_first[None, :], 1)
    inside = p < pairs
    tl.store(order_ptr + below + earlier, p, mask=inside)
    first = inside & (earlier == 0)
    tl.store(experts_ptr + group, mine, mask=first)
    tl.store(starts_ptr + group, below, mask=first)
    tl.store(counts_ptr + group, count, mask=first)
    tl.store(number_ptr, tl.max(tl.where(first, group, 0), 0) + 1)


@triton.jit
def expert_mm(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, factors_ptr, out_ptr,
    order_ptr, experts_ptr, starts_ptr, counts_ptr, number_ptr, columns, depth, blocks, alpha, limit,
    top_k: tl.constexpr, gated: tl.constexpr, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """A program: some columns of one expert's product with all of its tokens.

    weight (experts, columns, depth / 2), two e2m1 in a byte; scales (experts, columns, blocks), e8m0 of 32 each.
    Gated: x has a row per token, and gate and up of the product take turns; (pairs, columns / 2) comes out, in the order of
    experts. Not gated: x is that, and its product times the router's factor goes to the row of its pair.
    """
    group = tl.program_id(1)
    if group < tl.load(number_ptr):
        expert = tl.load(experts_ptr + group).to(tl.int64)
        start = tl.load(starts_ptr + group)
        count = tl.load(counts_ptr + group)
        n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
        k = tl.arange(0, tile_k)
        byte = tl.arange(0, tile_k // 2)
        block = tl.arange(0, tile_k // 32)
        used = n < columns
        weight_at = weight_ptr + (expert * columns + n[None, :]) * (depth // 2) + byte[:, None]
        scales_at = scales_ptr + (expert * columns + n[:, None]) * blocks + block[None, :]
        bias = tl.load(bias_ptr + expert * columns + n, mask=used, other=0.0).to(tl.float32)
        for first in range(0, count, tile_m):
            m = first + tl.arange(0, tile_m)
            inside = m < count
            pair = tl.load(order_ptr + start + m, mask=inside, other=0)
            row = pair // top_k if gated else start + m
            x_at = x_ptr + row[:, None].to(tl.int64) * depth + k[None, :]
            total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
            for at in range(0, depth, tile_k):
                x = tl.load(x_at + at, mask=inside[:, None] & (at + k < depth)[None, :], other=0.0)
                packed = (at // 2 + byte < depth // 2)[:, None] & used[None, :]
                weight = tl.load(weight_at + at // 2, mask=packed, other=0)
                scaled = used[:, None] & (at // 32 + block < blocks)[None, :]
                scales = tl.load(scales_at + at // 32, mask=scaled, other=0)
                total = tl.dot_scaled(x, None, "bf16", weight, scales, "e2m1", acc=total)
            total += bias[None, :]
            if gated:
                gate, up = tl.split(tl.reshape(total, (tile_m, tile_n // 2, 2)))
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
                total = (up + 1.0) * gate * tl.sigmoid(gate * alpha)
                half = tl.program_id(0) * (tile_n // 2) + tl.arange(0, tile_n // 2)
                out_at = out_ptr + (start + m)[:, None].to(tl.int64) * (columns // 2) + half[None, :]
                tl.store(out_at, total.to(tl.bfloat16), mask=inside[:, None] & (half < columns // 2)[None, :])
            else:
                factor = tl.load(factors_ptr + pair, mask=inside, other=0.0).to(tl.float32)
                out_at = out_ptr + pair[:, None].to(tl.int64) * columns + n[None, :]
                tl.store(out_at, total * factor[:, None], mask=inside[:, None] & used[None, :])
