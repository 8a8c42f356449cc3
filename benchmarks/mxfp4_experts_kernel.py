"""The Triton kernels of `mxfp4_experts`: the products of an expert's 4-bit weights with its tokens, and the sum over experts.

Weights are the left operand, so that few tokens fill little of a tensor core's right one. They lie as `packed` leaves them.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(16)
"""Rows of a weight whose blocks lie beside each other, so that 16 bytes of each fill whole cache lines."""

# e2m1 is s e e m, which is bfloat16's sign, two lowest bits of the exponent and highest of the mantissa: in these places the value
# is 2 ** 126 times too small, exactly, also where e is 0 and bfloat16's number subnormal. The scale makes up for it.
# In a word of 8 codes, each half holds 4: in place, 3 lower, 6 lower, and the last in the bits that are left. So half a word gives
# the same columns of 4 pairs of neighbours; bfloat16's multiplication does not flush subnormals.
_UNPACK = tl.constexpr("""{
    .reg .b32 t, u;
    and.b32 t, $4, 0x81C081C0;
    mul.bf16x2 $0, t, $5;
    shl.b32 t, $4, 3;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 $1, t, $5;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 $2, t, $5;
    shl.b32 t, $4, 1;
    and.b32 t, t, 0x80008000;
    shr.b32 u, $4, 3;
    and.b32 u, u, 0x01800180;
    or.b32 t, t, u;
    shr.b32 u, $4, 7;
    and.b32 u, u, 0x00400040;
    or.b32 t, t, u;
    mul.bf16x2 $3, t, $5;
}""")


@triton.jit
def _unpacked(weight, scale):
    """What `_UNPACK` does, for the interpreter, which knows no assembly: (rows, bytes) to two times the same in float32."""
    rows: tl.constexpr = weight.shape[0]
    words: tl.constexpr = weight.shape[1] // 4
    first, second = tl.split(tl.reshape(weight.to(tl.int32), (rows, words, 2, 2)))
    half = first | second << 8
    last = (half << 1 & 0x8000) | (half >> 3 & 0x0180) | (half >> 7 & 0x0040)
    low = tl.join(half & 0x81C0, half << 3 & 0x81C0)
    high = tl.join(half << 6 & 0x81C0, last)
    # As float32 with the same upper half: the interpreter multiplies bfloat16 wrongly.
    scale = (scale << 16).to(tl.float32, bitcast=True)
    low = (tl.reshape(tl.permute(low, (0, 1, 3, 2)), weight.shape) << 16).to(tl.float32, bitcast=True)
    high = (tl.reshape(tl.permute(high, (0, 1, 3, 2)), weight.shape) << 16).to(tl.float32, bitcast=True)
    return low * scale, high * scale


@triton.jit
def expert_mm(
    x_ptr, ids_ptr, weight_ptr, scales_ptr, bias_ptr, factors_ptr, out_ptr, pairs, columns, depth, alpha, limit,
    top_k: tl.constexpr, gated: tl.constexpr, by_pair: tl.constexpr, every: tl.constexpr, interpreted: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """A program: some rows of one expert's weight, with all tokens of that expert.

    ids, factors: of pairs (token, chosen expert), (pairs,). weight (experts, columns / 16, blocks, 16, 16) bytes and scales
    (experts, columns / 16, blocks, 16), `packed`. Gated: x has a row per token, gate and up take turns in the product, and
    (pairs, columns / 2) comes out. Not gated: x has a row per pair, and out too: the product times the router's factor.

    `tile_n` divides columns. A program's expert is its pair's where no pair before has it, or with more pairs than experts, its number. `every`: a power
    of two, at least `pairs`; all are looked through for those with the expert.
    """
    p = tl.arange(0, every)
    ids = tl.load(ids_ptr + p, mask=p < pairs, other=-1).to(tl.int32)
    number = tl.program_id(1)
    expert = tl.load(ids_ptr + number).to(tl.int32) if by_pair else number
    same = ids == expert
    count = tl.sum(same.to(tl.int32), 0)
    earlier = tl.sum((same & (p < number)).to(tl.int32), 0) if by_pair else 0
    if (earlier == 0) & (count > 0):
        place = tl.cumsum(same.to(tl.int32), 0) - 1
        blocks = depth // 32
        n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
        byte = tl.arange(0, tile_k // 2)
        block = tl.arange(0, tile_k // 32)
        first_block = (expert.to(tl.int64) * columns + n // GROUP * GROUP) * blocks + n % GROUP
        weight_at = weight_ptr + first_block[:, None] * 16 + (byte // 16 * GROUP * 16 + byte % 16)[None, :]
        scales_at = scales_ptr + first_block[:, None] + (block * GROUP)[None, :]
        column = byte // 16 * 32 + byte % 16
        bias = tl.load(bias_ptr + expert.to(tl.int64) * columns + n).to(tl.float32)
        for first in range(0, count, tile_m):
            m = first + tl.arange(0, tile_m)
            inside = m < count
            pair = tl.sum(tl.where(same[None, :] & (place[None, :] == m[:, None]), p[None, :], 0), 1)
            row = pair // top_k if gated else pair
            x_at = x_ptr + row[None, :].to(tl.int64) * depth + column[:, None]
            total = tl.zeros((tile_n, tile_m), dtype=tl.float32)
            for at in range(0, blocks, tile_k // 32):
                there = at + byte // 16 < blocks
                weight = tl.load(weight_at + at * (GROUP * 16), mask=there[None, :], other=0)
                scale = tl.load(scales_at + at * GROUP, mask=(at + block < blocks)[None, :], other=0)
                low = tl.load(x_at + at * 32, mask=there[:, None] & inside[None, :], other=0.0)
                high = tl.load(x_at + (at * 32 + 16), mask=there[:, None] & inside[None, :], other=0.0)
                # The exponent of a bfloat16, in both halves of a word.
                scale = scale.to(tl.int32) * 0x00800080
                scale = tl.broadcast_to(scale[:, :, None], (tile_n, tile_k // 32, 16))
                scale = tl.reshape(scale, (tile_n, tile_k // 2))
                if interpreted:
                    left, right = _unpacked(weight, scale)
                    low, high = low.to(tl.float32), high.to(tl.float32)
                else:
                    left, right = tl.inline_asm_elementwise(
                        _UNPACK,
                        "=r,=r,=r,=r,r,r,r,r,r",
                        [weight, scale],
                        (tl.bfloat16, tl.bfloat16),
                        is_pure=True,
                        pack=4,
                    )
                total = tl.dot(left, low, total)
                total = tl.dot(right, high, total)
            total += bias[:, None]
            if gated:
                gate, up = tl.split(tl.permute(tl.reshape(total, (tile_n // 2, 2, tile_m)), (0, 2, 1)))
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
                inner = (up + 1.0) * gate * tl.sigmoid(gate * alpha)
                half = tl.program_id(0) * (tile_n // 2) + tl.arange(0, tile_n // 2)
                out_at = out_ptr + pair[None, :].to(tl.int64) * (columns // 2) + half[:, None]
                tl.store(out_at, inner.to(tl.bfloat16), mask=inside[None, :])
            else:
                factor = tl.load(factors_ptr + pair, mask=inside, other=0.0).to(tl.float32)
                out_at = out_ptr + pair[None, :].to(tl.int64) * columns + n[:, None]
                tl.store(out_at, total * factor[None, :], mask=inside[None, :])


@triton.jit
def sum_parts(parts_ptr, out_ptr, columns, top_k: tl.constexpr, tile: tl.constexpr):
    """(tokens, top_k, columns) in float32 to (tokens, columns) in bfloat16; a program: some columns of a token."""
    n = tl.program_id(0) * tile + tl.arange(0, tile)
    token = tl.program_id(1).to(tl.int64)
    total = tl.zeros((tile,), dtype=tl.float32)
    for one in tl.static_range(top_k):
        total += tl.load(parts_ptr + (token * top_k + one) * columns + n, mask=n < columns, other=0.0)
    tl.store(out_ptr + token * columns + n, total.to(tl.bfloat16), mask=n < columns)
