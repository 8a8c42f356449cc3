# ruff: noqa: N803, RUF005 (constants of a kernel are written in capitals; Triton knows no unpacking in a tuple)
"""The two kernels of routed experts with few tokens: gates and products of each expert that was chosen, then their weighted sum.

An expert's weights are read once, for all tokens: a token that did not choose it is multiplied too, which costs nothing where a product
waits for its weights, and is not stored. The program of a pair of token and expert leaves at once where an earlier pair has the same expert.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from .rows import magnitude, quant_scale


@triton.jit
def _expert_of(ids, pair, tokens, id_row, EXPERTS: tl.constexpr, TOPK: tl.constexpr, PAIRS: tl.constexpr):
    """The expert of a pair, and whether the pair is the first with it; of one that is none here, False."""
    every = tl.arange(0, PAIRS)
    chosen = tl.load(ids + every // TOPK * id_row + every % TOPK, mask=every < tokens * TOPK, other=-1)
    expert = tl.sum(tl.where(every == pair, chosen, 0), 0)
    before = tl.sum(((chosen == expert) & (every < pair)).to(tl.int32), 0)
    return expert, (pair < tokens * TOPK) & (expert >= 0) & (expert < EXPERTS) & (before == 0)


@triton.jit
def _choices(
    ids, expert, tokens, id_row, EXPERTS: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Where each token names an expert: (TOKENS, COLUMNS), true or false, and the places of its choices."""
    token, choice = tl.arange(0, TOKENS)[:, None], tl.arange(0, COLUMNS)[None, :]
    there = (token < tokens) & (choice < TOPK)
    chosen = tl.load(ids + token * id_row + choice, mask=there, other=-1)
    return there & (chosen < EXPERTS) & (chosen == expert), choice


@triton.jit(do_not_specialize=["tokens", "x_row", "scale_row", "scale_group", "id_row", "weight_row", "weight_expert"])
def few_token_experts_up(
    x, x_scale, weight, weight_scale, ids, parts, arrived, out,
    tokens, x_row, scale_row, scale_group, id_row, weight_row, weight_expert,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, INNER: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, X_UNIT: tl.constexpr, WEIGHT_UNIT: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of TILE columns of one expert, rounded to out's dtype, over GROUPS groups of BLOCK columns of the depth, per program.

    weight (EXPERTS, 2 * INNER, DEPTH): gates, then the others. parts (pairs, tiles, SPLIT, 2 * TILE, TOKENS) in float32 and arrived as in
    `few_token_linear`. out (tokens * TOPK, INNER): a row where a token chose its expert first, others as they are. WIDE: for Triton's interpreter.
    """
    depth_groups: tl.constexpr = DEPTH // BLOCK
    tiles: tl.constexpr = INNER // TILE
    part, tile, pair = (
        tl.program_id(0) % SPLIT,
        tl.program_id(0) // SPLIT % tiles,
        tl.program_id(0) // (SPLIT * tiles),
    )
    if EARLY:
        tl_cuda.gdc_wait()  # for the router: nothing is known before
        tl_cuda.gdc_launch_dependents()
    expert, first_of_it = _expert_of(ids, pair, tokens, id_row, EXPERTS, TOPK, PAIRS)
    if first_of_it:
        first = part * GROUPS
        n, m, k = tl.arange(0, 2 * TILE), tl.arange(0, TOKENS), tl.arange(0, BLOCK)
        column = tile * TILE + n % TILE
        row = tl.where(n < TILE, column, column + INNER).to(tl.int64)
        token = tl.minimum(m, tokens - 1).to(tl.int64)
        weight_at = (
            weight
            + expert.to(tl.int64) * weight_expert * WEIGHT_UNIT
            + (row * weight_row)[:, None] * WEIGHT_UNIT
            + k[None, :]
        )
        scale_at = weight_scale + (expert.to(tl.int64) * (2 * INNER // BLOCK) + row // BLOCK) * depth_groups
        x_at = x + (token * x_row)[:, None] * X_UNIT + k[None, :]
        lefts = ()
        left_scales = ()
        rights = ()
        right_scales = ()
        for i in tl.static_range(GROUPS):
            group = tl.minimum(first + i, depth_groups - 1)
            lefts = lefts + (tl.load(weight_at + group * BLOCK, eviction_policy="evict_first"),)
            left_scales = left_scales + (tl.load(scale_at + group),)
        for i in tl.static_range(GROUPS):
            group = tl.minimum(first + i, depth_groups - 1)
            # Groups beyond the last are zeros: the weights there are the last ones once more.
            rights = rights + (
                tl.load(x_at + group * BLOCK, mask=((first + i) * BLOCK + k < DEPTH)[None, :], other=0.0),
            )
            right_scales = right_scales + (tl.load(x_scale + token * scale_row + group * scale_group),)
        total = tl.zeros((2 * TILE, TOKENS), tl.float32)
        for i in tl.static_range(GROUPS):
            if WIDE:
                product = tl.dot(lefts[i].to(tl.float32), tl.trans(rights[i].to(tl.float32)), input_precision="ieee")
            else:
                product = tl.dot(lefts[i], tl.trans(rights[i]))
            total += product * right_scales[i][None, :] * left_scales[i][:, None]
        mine = parts + (pair * tiles + tile).to(tl.int64) * (SPLIT * 2 * TILE * TOKENS)
        tl.store(mine + part * (2 * TILE * TOKENS) + n[:, None] * TOKENS + m[None, :], total)
        tl.debug_barrier()
        if tl.atomic_add(arrived + pair * tiles + tile, 1, sem="acq_rel") == SPLIT - 1:
            half = tl.arange(0, TILE)
            at = mine + half[:, None] * TOKENS + m[None, :]
            gate = tl.zeros((TILE, TOKENS), tl.float32)
            up = tl.zeros((TILE, TOKENS), tl.float32)
            for each in tl.static_range(SPLIT):
                gate += tl.load(at + each * (2 * TILE * TOKENS), cache_modifier=".cg")
                up += tl.load(at + each * (2 * TILE * TOKENS) + TILE * TOKENS, cache_modifier=".cg")
            # Rounded where an engine writes them.
            gate = gate.to(out.dtype.element_ty).to(tl.float32)
            up = up.to(out.dtype.element_ty).to(tl.float32)
            result = gate / (1.0 + tl.exp(-gate)) * up
            chose, choice = _choices(ids, expert, tokens, id_row, EXPERTS, TOPK, COLUMNS, TOKENS)
            place = m * TOPK + tl.min(tl.where(chose, choice, TOPK), 1)
            mask = (tl.max(chose.to(tl.int32), 1) > 0)[None, :] & (half < TILE)[:, None]
            tl.store(
                out + place.to(tl.int64)[None, :] * INNER + (tile * TILE + half)[:, None],
                result.to(out.dtype.element_ty),
                mask=mask,
            )
            tl.store(arrived + pair * tiles + tile, 0)


@triton.jit(do_not_specialize=["tokens", "id_row", "router_row", "weight_row", "weight_expert", "out_row", "split"])
def few_token_experts_down(
    x, weight, weight_scale, ids, router, parts, arrived, out,
    tokens, id_row, router_row, weight_row, weight_expert, out_row, split,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, CHOICES: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHT_UNIT: tl.constexpr, LARGEST: tl.constexpr, SCALING: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, EACH: tl.constexpr, BATCH: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """TILE columns of what EACH pairs of token and expert add to all tokens, per program; the last of a tile's programs sums.

    BATCH groups of BLOCK columns of their weights are asked for at once.
    x (tokens * TOPK, INNER) as `few_token_experts_up` writes it: quantised here. weight (EXPERTS, COLUMNS, INNER), router (tokens, TOPK)
    in float32. AHEAD: weights are read while the kernel in front, which has read the same ids, may still run.
    """
    groups: tl.constexpr = INNER // BLOCK
    batches: tl.constexpr = (EACH * groups + BATCH - 1) // BATCH
    part, tile = tl.program_id(0) % split, tl.program_id(0) // split
    if EARLY:
        tl_cuda.gdc_launch_dependents()
        if batches > 1 or not AHEAD:
            tl_cuda.gdc_wait()
    n, m, k = tile * TILE + tl.arange(0, TILE), tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    row = tl.minimum(n, COLUMNS - 1).to(tl.int64)
    weight_at = weight + (row * weight_row)[:, None] * WEIGHT_UNIT + k[None, :]
    scale_at = weight_scale + tile * TILE // BLOCK * groups
    total = tl.zeros((TILE, TOKENS), tl.float32)
    for batch in range(batches):
        lefts = ()
        left_scales = ()
        experts = ()
        for i in tl.static_range(BATCH):
            unit = batch * BATCH + i
            group = unit % groups
            expert, first_of_it = _expert_of(ids, part * EACH + unit // groups, tokens, id_row, EXPERTS, TOPK, PAIRS)
            # What is left out is zeros, of an expert that is none.
            there = first_of_it & (unit < EACH * groups)
            expert = tl.where(there, expert, 0).to(tl.int64)
            left = tl.load(
                weight_at + expert * weight_expert * WEIGHT_UNIT + group * BLOCK,
                mask=(k < tl.where(there, BLOCK, 0))[None, :], other=0.0, eviction_policy="evict_first",
            )  # fmt: skip
            lefts = lefts + (left,)
            scale = tl.load(scale_at + expert * (((COLUMNS + BLOCK - 1) // BLOCK) * groups) + group)
            left_scales = left_scales + (tl.where(there, scale, 0.0),)
            experts = experts + (tl.where(there, expert, EXPERTS),)
        if EARLY and AHEAD and batches == 1:
            tl_cuda.gdc_wait()
        for i in tl.static_range(BATCH):
            group = (batch * BATCH + i) % groups
            chose, choice = _choices(ids, experts[i], tokens, id_row, EXPERTS, TOPK, CHOICES, TOKENS)
            place = m * TOPK + tl.min(tl.where(chose, choice, TOPK - 1), 1)
            has = tl.max(chose.to(tl.int32), 1) > 0
            at = x + place.to(tl.int64)[:, None] * INNER + group * BLOCK + k[None, :]
            wide = tl.load(at, mask=has[:, None], other=0.0).to(tl.float32)
            weights = tl.sum(tl.load(router + m[:, None] * router_row + choice, mask=chose, other=0.0), 1)
            scale, inverse = quant_scale(tl.max(magnitude(wide), 1).to(tl.float32, bitcast=True), LARGEST, SCALING)
            right = (wide * inverse[:, None]).to(weight.dtype.element_ty)
            if WIDE:
                product = tl.dot(lefts[i].to(tl.float32), tl.trans(right.to(tl.float32)), input_precision="ieee")
            else:
                product = tl.dot(lefts[i], tl.trans(right))
            # A broken expert breaks the tokens that chose it.
            total += tl.where(has[None, :], product * (scale * left_scales[i] * weights)[None, :], 0.0)
    mine = parts + (tile * split).to(tl.int64) * (TILE * TOKENS) + tl.arange(0, TILE)[:, None] * TOKENS + m[None, :]
    tl.store(mine + part * (TILE * TOKENS), total)
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == split - 1:
        total = tl.zeros((TILE, TOKENS), tl.float32)
        for start in range(0, split, 8):
            several = ()
            for each in tl.static_range(8):  # at once: each takes as long as all of them
                # Of the last eight those that are not there are the last one once more, and count nothing.
                at = mine + tl.minimum(start + each, split - 1) * (TILE * TOKENS)
                several = several + (tl.load(at, cache_modifier=".cg"),)
            for each in tl.static_range(8):
                total += tl.where(start + each < split, several[each], 0.0)
        at = m.to(tl.int64)[None, :] * out_row + n[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (n < COLUMNS)[:, None])
        tl.store(arrived + tile, 0)
