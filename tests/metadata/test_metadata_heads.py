"""The head plan: what it decides for real models, and that everything derived from it agrees."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mla_layers import BF16, FP8, GFX942, GFX950, mla, with_heads

from layerfuse.fusion import Target
from layerfuse.fusion.backends.aiter.calls import Call
from layerfuse.fusion.backends.aiter.releases import RELEASES, ReleaseRange
from layerfuse.fusion.backends.aiter.restrictions import restrictions_of
from layerfuse.fusion.metadata import HeadCountError, HeadsRefusedError, MLAHeadPlan, plan_heads, plan_metadata


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        ("kimi-k2.5", 8, "8 -> 16, repeated twice"),
        ("kimi-k2.5", 16, "4 -> 16, repeated 4 times"),
        ("kimi-k2.5", 4, "16"),
        ("kimi-linear-48b-a3b", 8, "4 -> 16, repeated 4 times"),
        ("kimi-k3", 8, "12 -> 16, tiled and cut"),
        ("kimi-k3", 4, "24 -> 32, tiled and cut"),
        ("kimi-k3", 2, "48"),
        ("deepseek-v3", 16, "8 -> 16, repeated twice"),
        ("deepseek-v3", 1, "128"),
        ("glm-4.7-flash", 1, "20 -> 32, tiled and cut"),
        ("glm-4.7-flash", 2, "10 -> 16, tiled and cut"),
    ],
)
@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
def test_real_models(model, tp, expected, target):
    assert str(plan_heads(mla(model, tp), target, "v0.1.18", **FP8)) == expected


@pytest.mark.parametrize(
    ("release", "target", "dtypes", "expected"),
    [
        ("v0.1.20", GFX950, BF16, "24"),
        ("v0.1.19.post2", GFX950, BF16, "24 -> 32, tiled and cut"),
        ("v0.1.20", GFX942, BF16, "24 -> 32, tiled and cut"),
        ("v0.1.20", GFX950, FP8, "24 -> 32, tiled and cut"),
    ],
)
def test_24_heads_are_native_on_gfx950_in_bf16_since_the_reduction_knows_them(release, target, dtypes, expected):
    assert str(plan_heads(mla("kimi-k3", 4), target, release, **dtypes)) == expected


def test_a_build_that_can_be_several_releases_gets_what_all_of_them_take():
    releases = ReleaseRange("v0.1.19", "v0.1.20")
    assert plan_heads(mla("kimi-k3", 4), GFX950, releases, **BF16).kernel_heads == 32


@pytest.mark.parametrize(
    ("heads", "release", "target", "more", "fold"),
    [
        (64, "v0.1.17", GFX942, FP8, 4),
        (64, "v0.1.18", GFX942, FP8, 1),
        (128, "v0.1.16.post3", GFX950, FP8, 1),
        (48, "v0.1.20", GFX942, BF16, 3),
        (48, "v0.1.20", GFX950, BF16, 1),
        (16, "v0.1.16.post3", GFX942, BF16, 1),
    ],
)
def test_what_is_not_native_is_folded(heads, release, target, more, fold):
    plan = plan_heads(with_heads(heads), target, release, **more)
    assert (plan.how, plan.fold) == ("native", fold)
    assert ("folded" in plan.reason) == (fold > 1)


@pytest.mark.parametrize(
    ("heads", "release", "target", "more", "words"),
    [
        (8, None, Target.named("sm90"), {}, "gfx942 and gfx950, and the target is sm90"),
        (129, None, GFX950, {}, "at most 128"),
        (8, None, GFX950, {"q_dtype": "fp8"}, "an fp8 query needs an fp8 cache"),
        (16, "v0.1.16.post3", GFX942, {"max_query_length": 5}, "at most 4 queries"),
        (8, "v0.1.16.post3", GFX950, {"max_query_length": 2, "dcp": 2}, "their mask came with v0.1.17-rc0"),
    ],
)
def test_refusals_say_why(heads, release, target, more, words):
    with pytest.raises(HeadsRefusedError, match=words):
        plan_heads(with_heads(heads), target, release, **more)


def test_another_latent_is_refused():
    spec = attrs.evolve(mla("kimi-k2.5"), kv_lora_rank=256, kv_norm=attrs.evolve(mla("kimi-k2.5").kv_norm, width=256))
    with pytest.raises(HeadsRefusedError, match=r"512 \+ 64, this layer's are 256 \+ 64"):
        plan_heads(spec, GFX950)


def test_context_parallel_ranks_decode_each_others_heads():
    plan = plan_heads(mla("kimi-k2.5", 8), GFX950, dcp=8)
    assert (plan.num_heads, plan.kernel_heads) == (64, 64)
    plan = plan_heads(with_heads(12), GFX950, dcp=4)
    assert (plan.num_heads, plan.kernel_heads) == (48, 64)


# ---- everything agrees

plans = st.builds(
    lambda heads, kernel: (heads, max(heads, kernel)), st.integers(1, 128), st.sampled_from([16, 24, 32, 48, 64, 128])
)


@given(
    heads=st.integers(1, 256),
    tp=st.integers(1, 16),
    release=st.sampled_from(RELEASES),
    target=st.sampled_from([GFX942, GFX950]),
    dtypes=st.sampled_from([("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")]),
    queries=st.integers(1, 6),
    sparse=st.booleans(),
    batch=st.integers(1, 512),
)
def test_padding_buffers_and_cut_cannot_disagree(heads, tp, release, target, dtypes, queries, sparse, batch):
    spec = with_heads(heads * tp, tp)
    options = {"q_dtype": dtypes[0], "kv_dtype": dtypes[1], "max_query_length": queries, "sparse": sparse}
    try:
        plan = plan_metadata(spec, target, release, batch=batch, topk=2048 if sparse else -1, **options)
    except HeadsRefusedError as error:
        assert error.reason
        return
    made = plan.heads
    assert made.num_heads == spec.num_local_heads <= made.kernel_heads == plan.case.heads <= 128
    assert made.kernel_heads % 16 == 0 or made.kernel_heads == 24
    assert made == plan_heads(spec, target, release, **options)
    rows = plan.buffer("reduce_partial_map").shape[0] * (1 if sparse else queries)
    output = plan.scratch[0].shape
    assert output[0] == rows
    assert made.kernel_heads in (output[2], output[2] * made.fold)
    assert plan.total_bytes == sum(buffer.bytes for buffer in (*plan.buffers, *plan.scratch))
    if made.kernel_heads != 24:  # the binding asks for a multiple of 16 still
        call = Call(num_heads=made.kernel_heads, has_plan=True, arch=target.arch)
        one = ReleaseRange(release, release)
        for binding in ("mla_decode", "mla_metadata_info"):
            assert [r.reason for r in restrictions_of(binding, one, frozenset()) if r.when(call)] == []


@given(plan=plans, tokens=st.integers(0, 3), strided=st.booleans(), given_out=st.booleans())
def test_what_is_padded_is_cut_back(plan, tokens, strided, given_out):
    heads, kernel = plan
    made = plan_of(heads, kernel)
    q = torch.arange(tokens * heads * 6.0).view(tokens, heads, 6)
    q = q[..., ::2] if strided else q
    out = torch.full((tokens, kernel, q.shape[2]), torch.nan) if given_out else None
    padded = made.pad_query(q, out)
    assert padded.shape == (tokens, kernel, q.shape[2])
    assert out is None or padded is out
    source = [h // made.times if made.how == "repeat" else h % heads for h in range(kernel)]
    assert torch.equal(padded, q[:, source])
    assert torch.equal(made.cut_output(padded), q)
    lse = padded[..., 0].contiguous()
    assert torch.equal(made.cut_lse(lse), q[..., 0])
    assert made.cut_output(padded).untyped_storage().data_ptr() == padded.untyped_storage().data_ptr()


def plan_of(heads: int, kernel: int) -> MLAHeadPlan:
    return MLAHeadPlan(num_heads=heads, kernel_heads=kernel, reason="asked for")


def test_nothing_is_copied_where_the_layout_allows():
    q = torch.randn(4, 16, 8)
    assert plan_of(16, 16).pad_query(q) is q
    one = torch.randn(4, 1, 8)
    assert plan_of(1, 16).pad_query(one).data_ptr() == one.data_ptr()


def test_a_plan_of_fewer_heads_than_the_layer_has_is_none():
    with pytest.raises(ValueError, match="heads"):
        plan_of(8, 4)


def test_tensors_of_other_heads_are_refused():
    made = plan_of(8, 16)
    with pytest.raises(HeadCountError, match=r"q: expected \(tokens, 8, \.\.\.\) as planned, got \(2, 16, 4\)"):
        made.pad_query(torch.zeros(2, 16, 4))
    with pytest.raises(HeadCountError, match="o: expected"):
        made.cut_output(torch.zeros(2, 8, 4))
    with pytest.raises(HeadCountError, match="lse: expected"):
        made.cut_lse(torch.zeros(2, 16, 1))
    with pytest.raises(HeadCountError, match="out: expected"):
        made.pad_query(torch.zeros(2, 8, 4), torch.zeros(2, 8, 4))
