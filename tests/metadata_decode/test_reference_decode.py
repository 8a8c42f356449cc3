"""The reference decode where steps are odd: empty, ragged, strided, very long; and what it refuses."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from decode_support import (
    FP8,
    GFX942,
    GFX950,
    SCALE,
    VALUES,
    decode_unpadded,
    make_query,
    make_step,
    mla,
    plain_attention,
    with_heads,
)
from hypothesis import given
from hypothesis import strategies as st

from layerfuse.fusion.metadata import HeadCountError, PlanExceededError, allocate, plan_metadata
from layerfuse.fusion.metadata.reference_decode import decode_planned, tree_sum

TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def decoded(step, q, *, target=GFX942, units=6, plan_options=None, **options):
    heads = q.shape[1]
    plan = plan_metadata(
        *(with_heads(heads), target),
        batch=max(1, len(step.queries)),
        max_query_length=max(1, *step.queries, 1),
        page_size=step.page_size,
        cu_count=units,
        **(plan_options or {}),
    )
    buffers = allocate(plan, q.device)
    arguments = (q, step.kv_buffer, *step.indices)
    return decode_planned(buffers, *arguments, value_width=VALUES, softmax_scale=SCALE, **options)


def check(step, q, **options):
    found = decoded(step, q, **options)
    for one, other in zip(found, plain_attention(q, step, causal=options.get("causal", True)), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)
    return found


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_pages_and_queries(page_size, queries):
    step = make_step([queries] * 4, [1, 63, 64, 330], page_size=page_size)
    check(step, make_query(step, 12))


@pytest.mark.parametrize(
    ("queries", "lengths"),
    [
        pytest.param((), (), id="no sequence"),
        pytest.param((0, 0), (5, 0), id="no query"),
        pytest.param((1, 1), (0, 0), id="no key"),
        pytest.param((1,), (1,), id="one token"),
        pytest.param((1, 1, 1, 1, 1), (1, 1, 1, 1, 1), id="one token each"),
        pytest.param((1, 3, 0, 2, 4), (1_000, 1, 17, 0, 90), id="ragged"),
        pytest.param((4, 4), (2, 3), id="more queries than keys"),
    ],
)
@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
def test_odd_steps(queries, lengths, target):
    step = make_step(queries, lengths, page_size=16)
    check(step, make_query(step, 8), target=target)


def test_a_query_that_sees_nothing_is_zero():
    step = make_step((4, 1), (2, 0))
    o, lse = check(step, make_query(step, 4))
    blind = torch.tensor([True, True, False, False, True])
    assert not o[blind].any() and (lse[blind] == -math.inf).all() and lse[~blind].isfinite().all()


@pytest.mark.parametrize("units", [1, 2, 7, 64])
def test_any_number_of_units(units):
    step = make_step((2, 1), (500, 90))
    check(step, make_query(step, 8), units=units)


def test_without_causality():
    step = make_step((3, 2), (30, 70))
    check(step, make_query(step, 8), causal=False)


def test_100_000_tokens():
    """One sequence of a hundred thousand tokens beside short ones, over all units of a whole device."""
    step = make_step((1, 1, 2), (100_000, 3, 1_000), page_size=64)
    q = make_query(step, 8)
    check(step, q, units=304)
    found = decoded(attrs.evolve(step, kv_buffer=step.kv_buffer.float()), q.float(), units=304)
    for one, other in zip(found, plain_attention(q, step), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_one_unit_over_100_000_tokens():
    """Nothing is cut: the sum of all weights and values is one run."""
    step = make_step((1,), (100_000,), page_size=16)
    check(step, make_query(step, 1), units=1)


STRIDED = {
    "heads first": lambda q: q.transpose(0, 1).contiguous().transpose(0, 1),
    "every second head": lambda q: torch.stack((q, q + 1), 2).flatten(1, 2)[:, ::2],
    "columns of a wider tensor": lambda q: torch.cat((q, q, q), 2)[..., q.shape[2] : 2 * q.shape[2]],
    "dim first": lambda q: q.permute(2, 1, 0).contiguous().permute(2, 1, 0),
}


@pytest.mark.parametrize("how", STRIDED)
@pytest.mark.parametrize("heads", [8, 12, 16])
def test_strided_queries(heads, how):
    step = make_step((2, 1), (100, 40))
    q = make_query(step, heads)
    strided = STRIDED[how](q)
    assert torch.equal(strided, q) and not strided.is_contiguous()
    assert all(torch.equal(*pair) for pair in zip(decoded(step, strided), decoded(step, q), strict=True))


def test_a_cache_that_is_part_of_another():
    """Pages of a tensor with a layer dimension between, as engines allocate them."""
    step = make_step((2, 1), (100, 40), page_size=16)
    whole = torch.stack((step.kv_buffer, step.kv_buffer * torch.nan), 1)
    q = make_query(step, 8)
    inside = attrs.evolve(step, kv_buffer=whole[:, 0])
    assert not inside.kv_buffer.is_contiguous()
    assert all(torch.equal(*pair) for pair in zip(decoded(inside, q), decoded(step, q), strict=True))


@given(shift=st.floats(-500, 500), scale=st.sampled_from([1e-3, 1.0, 60.0]), seed=st.integers(0, 50))
def test_large_logits(shift, scale, seed):
    """The reduction weighs by differences of log-sum-exps, so that nothing overflows."""
    step = make_step((2, 1), (90, 33), seed=seed)
    shifted = step.kv_buffer * scale
    shifted[..., -1] += shift
    step = attrs.evolve(step, kv_buffer=shifted)
    q = make_query(step, 4, seed=seed) * 3
    for one, other in zip(decoded(step, q), plain_attention(q, step), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * scale)


def test_sparse_queries():
    """Each query has a list of its own: as many sequences, of one query each."""
    plan = plan_metadata(
        *(mla("deepseek-v3.2", 16), GFX950),
        batch=2,
        max_query_length=3,
        sparse=True,
        topk=64,
        cu_count=4,
    )
    step = make_step((1,) * 6, (64, 64, 64, 10, 11, 12))
    q = make_query(step, 8)
    arguments = (q, step.kv_buffer, *step.indices)
    found = decode_planned(allocate(plan, "cpu"), *arguments, value_width=VALUES, softmax_scale=SCALE)
    for one, other in zip(found, plain_attention(q, step), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12, 576, 1001])
def test_tree_sums_do_not_look_at_their_neighbours(count):
    x = torch.randn(count, 7, 33)
    every = tree_sum(x)
    torch.testing.assert_close(every, x.sum(0), rtol=1e-4, atol=1e-4)
    for i in range(7):
        assert torch.equal(tree_sum(x[:, i, 5:6]), every[i, 5:6])


def test_refusals():
    step = make_step((1, 1), (20, 30), page_size=16)
    q = make_query(step, 8)

    def refused(message, error=ValueError, q=q, kv_scale=None, **changes):
        with pytest.raises(error) as caught:
            decoded(attrs.evolve(step, **changes), q, kv_scale=kv_scale)
        assert message in str(caught.value)

    refused("kv_buffer: expected (pages, 16, 1, 11)", q=q[..., :11])
    refused("kv_indices: expected pages 0 to 1", kv_buffer=step.kv_buffer[:2])
    refused("kv_scale: fp8 has one and nothing else does; kv is torch.float64", kv_scale=2.0)
    refused("kv_scale: fp8 has one and nothing else does; kv is torch.float8", kv_buffer=step.kv_buffer.to(FP8))
    plan = plan_metadata(with_heads(8), GFX942, batch=1, page_size=16, cu_count=4)
    buffers = allocate(plan, "cpu")
    with pytest.raises(PlanExceededError):
        decode_planned(buffers, q, step.kv_buffer, *step.indices, softmax_scale=SCALE, value_width=VALUES)
    with pytest.raises(HeadCountError):
        decode_planned(
            buffers,
            q[:, :7],
            step.kv_buffer,
            *(each[:2] for each in step.indices[:2]),
            step.indices[2],
            step.indices[3][:1],
            softmax_scale=SCALE,
        )
    with pytest.raises(ValueError, match="value_width: expected 1 to 12"):
        decode_unpadded(q, step, 2, values=13)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cache", [torch.float64, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("heads", [4, 8, 12, 20, 128])
def test_on_a_gpu(heads, cache):
    """Padded is unpadded to the last bit there too: elements are added one by one, never by a reduction or a product."""
    step = make_step((2, 1, 0, 1), (300, 1, 9, 90), page_size=16, dtype=cache, device="cuda")
    q = make_query(step, heads, dtype=torch.float64 if cache == torch.float64 else torch.bfloat16, device="cuda")
    scale = {"kv_scale": 0.5} if cache == FP8 else {}
    kv_dtype = {"plan_options": {"kv_dtype": "fp8"}} if cache == FP8 else {}
    found = decoded(step, q, **kv_dtype, **scale)
    assert all(torch.equal(*pair) for pair in zip(found, decode_unpadded(q, step, 6, **scale), strict=True))
    tight = TIGHT if cache == torch.float64 else {"rtol": 2**-7, "atol": 1e-4}
    for one, other in zip(found, plain_attention(q, step, **scale), strict=True):
        torch.testing.assert_close(one.double(), other, **tight)
