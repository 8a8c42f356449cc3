"""Padding is neutral: a padded run, cut back, is the unpadded run, bit for bit, and both are plain attention."""

from __future__ import annotations

import attrs
import pytest
import torch
from decode_support import (
    FP8,
    GFX942,
    GFX950,
    SCALE,
    VALUES,
    Guarded,
    decode_unpadded,
    make_query,
    make_step,
    mla,
    plain_attention,
    with_heads,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from layerfuse.fusion.metadata import allocate, plan_heads, plan_metadata
from layerfuse.fusion.metadata.reference_decode import decode_planned
from layerfuse.fusion.metadata.reference_schedule import ScheduleShape

UNITS = 5
QUERIES, LENGTHS = (2, 1, 2, 0, 2), (83, 1, 0, 9, 30)


def padded_run(plan, step, q, *, values=VALUES, **options):
    """Through the plan, in guarded buffers of exactly its sizes, which must be left whole."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    guarded = Guarded(plan, values=values, dtype=dtype)
    found = decode_planned(
        *(guarded.buffers, q, step.kv_buffer, *step.indices),
        value_width=values,
        scratch=guarded.scratch,
        **{"softmax_scale": SCALE, **options},
    )
    assert guarded.broken == []
    return found


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
@pytest.mark.parametrize("heads", range(1, 129))
def test_every_head_count(heads, target):
    """Both in float64, every head by the same additions in the same order: equal to the last bit."""
    plan = plan_metadata(with_heads(heads), target, batch=5, max_query_length=2, page_size=16, cu_count=UNITS)
    step = make_step(QUERIES, LENGTHS, page_size=16)
    q = make_query(step, heads)
    o, lse = padded_run(plan, step, q)
    alone, alone_lse = decode_unpadded(q, step, ScheduleShape.of(plan).parts)
    assert o.shape == (step.tokens, heads, VALUES) and lse.shape == (step.tokens, heads)
    assert torch.equal(o, alone) and torch.equal(lse, alone_lse)
    expected, expected_lse = plain_attention(q, step)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-13)


REAL = [
    ("kimi-k2.5", 8, 8, 16),
    ("kimi-linear-48b-a3b", 8, 4, 16),
    ("kimi-k3", 8, 12, 16),
    ("kimi-k3", 4, 24, 32),
    ("deepseek-v3", 16, 8, 16),
    ("glm-4.7-flash", 1, 20, 32),
]


@pytest.mark.parametrize(("name", "tp", "heads", "kernel_heads"), REAL)
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, FP8),
    ],
    ids=["float64", "float32", "bf16", "fp8-cache"],
)
def test_real_models_at_their_own_widths(name, tp, heads, kernel_heads, dtype, cache):
    """Padded is unpadded to the last bit in every dtype; and plain attention of the same inputs within rounding."""
    spec = mla(name, tp)
    plan = plan_metadata(
        *(spec, GFX942),
        batch=3,
        max_query_length=2,
        page_size=16,
        cu_count=3,
        kv_dtype="fp8" if cache == FP8 else "bf16",
    )
    assert (plan.heads.num_heads, plan.heads.kernel_heads) == (heads, kernel_heads)
    scale = {"kv_scale": 0.37} if cache == FP8 else {}
    values = spec.kv_lora_rank
    step = make_step((2, 1, 1), (53, 20, 1), page_size=16, dim=spec.latent_width, dtype=cache)
    q = make_query(step, heads, dtype=dtype)
    options = {"softmax_scale": spec.softmax_scale, **scale}
    o, lse = padded_run(plan, step, q, values=values, **options)
    alone, alone_lse = decode_unpadded(q, step, ScheduleShape.of(plan).parts, values, **options)
    assert o.dtype == dtype and torch.equal(o, alone) and torch.equal(lse, alone_lse)
    expected, expected_lse = plain_attention(q, step, values, scale=spec.softmax_scale, **scale)
    exact = 1e-12 if dtype == torch.float64 else 2e-5
    rounding = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-8}[dtype]  # half a unit: 2**-9
    torch.testing.assert_close(o.double(), expected, rtol=rounding, atol=exact)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=exact, atol=exact)


@settings(max_examples=40)
@given(
    heads=st.integers(1, 128),
    target=st.sampled_from([GFX942, GFX950]),
    release=st.sampled_from(["v0.1.9", "v0.1.12", "v0.1.14", "v0.1.16.post6", "v0.1.18", "v0.1.20.post1"]),
    fp8=st.booleans(),
    page_size=st.sampled_from([1, 16, 64]),
    sequences=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 150)), max_size=6),
    units=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_step_of_any_release(heads, target, release, fp8, page_size, sequences, units, seed):
    dtype = "fp8" if fp8 else "bf16"
    most = max([1, *(queries for queries, _ in sequences)])
    options = {"q_dtype": dtype, "kv_dtype": dtype, "max_query_length": most}
    plan = plan_metadata(
        *(with_heads(heads), target, release),
        **options,
        batch=max(1, len(sequences)),
        page_size=page_size if release != "v0.1.9" else 1,
        cu_count=units,
    )
    step = make_step([q for q, _ in sequences], [k for _, k in sequences], page_size=plan.page_size, seed=seed)
    q = make_query(step, heads, seed=seed)
    o, lse = padded_run(plan, step, q)
    alone, alone_lse = decode_unpadded(q, step, ScheduleShape.of(plan).parts, tile_rows=heads)
    assert torch.equal(o, alone) and torch.equal(lse, alone_lse)
    expected, expected_lse = plain_attention(q, step)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("heads", "how"), [(1, "repeat"), (8, "repeat"), (5, "tile"), (20, "tile"), (100, "tile")])
def test_what_is_padded_with_does_not_matter_to_what_is_cut_out(heads, how):
    """The heads that are thrown away may hold anything, infinities included."""
    plan = plan_heads(with_heads(heads), GFX942)
    assert plan.how == how
    step = make_step((1, 2), (40, 17))
    q = make_query(step, heads)
    clean = plan.pad_query(q)
    dirty = clean.clone()
    own = plan.cut_output(torch.arange(plan.kernel_heads).view(1, -1, 1)).flatten()
    others = [head for head in range(plan.kernel_heads) if head not in own.tolist()]
    dirty[:, others] = torch.inf
    for pair in zip(decode_unpadded(clean, step, 3), decode_unpadded(dirty, step, 3), strict=True):
        assert torch.equal(*(each[:, own] for each in pair))


def test_absorbed_is_expanded():
    """Against keys and values expanded for every head by its own projections, as the model's definition has them."""
    heads, rank, nope, rope, v = 5, 24, 10, 6, 7
    step = make_step((2, 1, 3), (40, 1, 17), dim=rank + rope, page_size=16)
    random = torch.Generator().manual_seed(3)
    w_uk, w_uv = (torch.randn(heads, width, rank, generator=random, dtype=torch.float64) for width in (nope, v))
    q_nope, q_rope = (torch.randn(step.tokens, heads, d, generator=random, dtype=torch.float64) for d in (nope, rope))
    plan = plan_metadata(with_heads(heads), GFX950, batch=3, max_query_length=3, page_size=16, cu_count=UNITS)
    absorbed = torch.cat((torch.einsum("thn,hnr->thr", q_nope, w_uk), q_rope), -1)
    o, _ = padded_run(plan, step, absorbed, values=rank)
    found = torch.einsum("thr,hvr->thv", o, w_uv)
    begin = 0
    for sequence, (queries, length) in enumerate(zip(step.queries, step.lengths, strict=True)):
        latent, rope_key = step.keys(sequence).split([rank, rope], -1)
        for head in range(heads):
            keys = torch.cat((latent @ w_uk[head].T, rope_key), -1)
            values = latent @ w_uv[head].T
            for query in range(queries):
                token, sees = begin + query, length - queries + 1 + query
                own = torch.cat((q_nope[token, head], q_rope[token, head]))
                expected = (keys[:sees] @ own * SCALE).softmax(0) @ values[:sees]
                torch.testing.assert_close(found[token, head], expected, rtol=1e-11, atol=1e-11)
        begin += queries


def test_an_fp8_cache_against_the_cache_before_it_was_rounded():
    """e4m3 keeps 4 bits, so that an entry is off by at most 1/16 of itself. Stated, for normally distributed entries at
    Kimi-K2.5's width: 8 percent of the output, root mean square, and no log-sum-exp by more than the worst logit."""
    spec = mla("kimi-k2.5", 8)
    step = make_step((1, 2), (200, 77), dim=spec.latent_width, page_size=16)
    kv_scale = float(step.kv_buffer.nan_to_num(0.0).abs().max()) / torch.finfo(FP8).max
    rounded = attrs.evolve(step, kv_buffer=(step.kv_buffer / kv_scale).to(FP8))
    q = make_query(step, 8, dtype=torch.bfloat16)
    plan = plan_metadata(spec, GFX950, batch=2, max_query_length=2, kv_dtype="fp8", page_size=16, cu_count=3)
    o, lse = decode_planned(
        *(allocate(plan, "cpu"), q, rounded.kv_buffer, *step.indices),
        softmax_scale=spec.softmax_scale,
        kv_scale=torch.tensor(kv_scale),
    )
    expected, expected_lse = plain_attention(q, step, spec.kv_lora_rank, scale=spec.softmax_scale)
    error, size = ((each**2).mean().sqrt() for each in (o.double() - expected, expected))
    assert error < 0.08 * size
    off = max(
        float(torch.einsum("qhd,kd->qhk", q.double(), rounded.keys(i).double() * kv_scale - step.keys(i)).abs().max())
        for i in range(2)
    )
    assert (lse.double() - expected_lse).abs().max() < off * spec.softmax_scale + 1e-5


def test_an_fp8_query():
    step = make_step((1, 1), (50, 33), dtype=FP8)
    q = make_query(step, 8).to(FP8)
    plan = plan_metadata(with_heads(8), GFX942, batch=2, q_dtype="fp8", kv_dtype="fp8", cu_count=3)
    o, lse = padded_run(plan, step, q, q_scale=0.5, kv_scale=2.0)
    alone, alone_lse = decode_unpadded(q, step, ScheduleShape.of(plan).parts, q_scale=0.5, kv_scale=2.0)
    assert o.dtype == torch.bfloat16 and torch.equal(o, alone) and torch.equal(lse, alone_lse)
    expected, expected_lse = plain_attention(q.float() * 0.5, step, kv_scale=2.0)
    torch.testing.assert_close(o.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
