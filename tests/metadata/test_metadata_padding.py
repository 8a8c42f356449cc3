"""Padding is neutral: a padded run, cut back, is the unpadded run to the last bit, and both are plain attention."""

from __future__ import annotations

import pytest
import torch
from guarded import VALUES, padded, unpadded
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_layers import GFX942, GFX950, mla, with_heads
from mla_oracle import Schedule, make_step, plain_attention

from layerfuse.fusion.backends.aiter.releases import RELEASES
from layerfuse.fusion.metadata import HeadsRefusedError, plan_heads, plan_metadata


def check(plan, step):
    found = padded(plan, step)
    schedule = Schedule.of(plan)
    for one, other in zip(found, unpadded(schedule.parts, step, grain=schedule.grain), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found, plain_attention(step, VALUES), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
def test_every_head_count(target):
    """In float64, every head by the same additions in the same order. Ragged: a query may see no key, or none be there."""
    for heads in range(1, 129):
        plan = plan_metadata(with_heads(heads), target, batch=5, max_query_length=2, cu_count=5)
        check(plan, make_step(heads, (2, 1, 2, 0, 2), (83, 1, 0, 9, 30)))


@pytest.mark.parametrize(
    ("name", "tp", "heads", "kernel_heads"),
    [
        ("kimi-k2.5", 8, 8, 16),
        ("kimi-linear-48b-a3b", 8, 4, 16),
        ("kimi-k3", 8, 12, 16),
        ("kimi-k3", 4, 24, 32),
        ("deepseek-v3", 16, 8, 16),
        ("glm-4.7-flash", 1, 20, 32),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn)],
    ids=["float64", "bf16", "fp8-cache"],
)
def test_real_models_at_their_own_widths(name, tp, heads, kernel_heads, dtype, cache):
    """Padded is unpadded to the last bit in every dtype, and plain attention of the same inputs within rounding."""
    spec = mla(name, tp)
    kv = "bf16" if cache is None else "fp8"
    plan = plan_metadata(spec, GFX942, batch=3, max_query_length=2, page_size=16, cu_count=3, kv_dtype=kv)
    assert (plan.heads.num_heads, plan.heads.kernel_heads) == (heads, kernel_heads)
    step = make_step(heads, (2, 1, 1), (53, 20, 1), width=spec.latent_width, dtype=dtype, cache=cache)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    options = {"values": spec.kv_lora_rank, "dtype": compute, "scale": spec.softmax_scale}
    o, lse = padded(plan, step, **options)
    alone, alone_lse = unpadded(Schedule.of(plan).parts, step, **options)
    assert o.dtype == dtype
    assert torch.equal(o, alone)
    assert torch.equal(lse, alone_lse)
    expected, expected_lse = plain_attention(step, spec.kv_lora_rank, spec.softmax_scale)
    exact = 1e-12 if dtype == torch.float64 else 2e-5
    rounding = 1e-12 if dtype == torch.float64 else 2**-8  # half a unit of bfloat16: 2**-9
    torch.testing.assert_close(o.double(), expected, rtol=rounding, atol=exact)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=exact, atol=exact)


@settings(max_examples=80)
@given(
    heads=st.integers(1, 128),
    target=st.sampled_from([GFX942, GFX950]),
    release=st.sampled_from(RELEASES),
    dtype=st.sampled_from(["bf16", "fp8"]),
    page_size=st.sampled_from([1, 16, 64]),
    sequences=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 150)), max_size=6),
    units=st.integers(1, 9),
    mode=st.sampled_from([{}, {}, {"fast": False}, {"intra_batch": True}, {"max_split_per_batch": 3}]),
    seed=st.integers(0, 99),
)
def test_any_step_of_any_release(heads, target, release, dtype, page_size, sequences, units, mode, seed):
    queries, lengths = zip(*sequences, strict=True) if sequences else ((), ())
    options = {"q_dtype": dtype, "kv_dtype": dtype, "max_query_length": max([1, *queries]), "page_size": page_size}
    try:
        plan = plan_metadata(
            with_heads(heads), target, release, batch=max(1, len(queries)), cu_count=units, **options, **mode
        )
    except HeadsRefusedError:
        return
    check(plan, make_step(heads, queries, lengths, seed=seed))


def test_sparse_queries_are_sequences_of_their_own():
    """Each query has a list of keys of its own: as many sequences, of one query each."""
    spec = mla("deepseek-v3.2", 16)
    plan = plan_metadata(spec, GFX950, batch=2, max_query_length=3, sparse=True, topk=64, cu_count=4)
    check(plan, make_step(8, (1,) * 6, (64, 64, 64, 10, 11, 12)))


@pytest.mark.parametrize(("heads", "how"), [(1, "repeat"), (8, "repeat"), (5, "tile"), (20, "tile"), (100, "tile")])
def test_what_is_padded_with_does_not_matter_to_what_is_cut_out(heads, how):
    """The heads that are thrown away may hold anything, infinities included."""
    plan = plan_heads(with_heads(heads), GFX942)
    assert plan.how == how
    step = make_step(heads, (1, 2), (40, 17))
    clean = plan.pad_query(step.q)
    dirty = torch.full_like(clean, torch.inf)
    plan.cut_output(dirty).copy_(step.q)
    (o, lse), (dirty_o, dirty_lse) = (unpadded(3, step, q=q) for q in (clean, dirty))
    assert torch.equal(plan.cut_output(o), plan.cut_output(dirty_o))
    assert torch.equal(plan.cut_lse(lse), plan.cut_lse(dirty_lse))
