"""The metadata plan: buffers, scratch, prefill, warnings, groups and states, and that planning needs no torch."""

from __future__ import annotations

import attrs
import pytest
from helpers import real_model
from mla_layers import FP8, GFX942, GFX950, mla, with_heads

from layerfuse import registry
from layerfuse.adapters.specs import GatedDeltaNetSpec
from layerfuse.fusion.backends.aiter.releases import ReleaseRange
from layerfuse.fusion.metadata import (
    BufferSpec,
    MixedGroupError,
    PrefillPlan,
    byte_text,
    group_layers,
    plan_metadata,
    plan_state,
)

KIMI = mla("kimi-k2.5", 8)


def test_kimi_k2_5_at_tp_8():
    plan = plan_metadata(KIMI, GFX950, "v0.1.17", batch=256, **FP8)
    assert str(plan.heads) == "8 -> 16, repeated twice"
    assert [(buffer.name, buffer.shape, buffer.bytes) for buffer in plan.buffers] == [
        ("work_metadata_ptrs", (2,), 16),
        ("work_indptr", (257,), 1028),
        ("work_info_set", (511, 8), 16352),
        ("reduce_indptr", (257,), 1028),
        ("reduce_final_map", (256, 2), 2048),
        ("reduce_partial_map", (510,), 2040),
    ]
    assert plan.scratch == (
        BufferSpec(name="partial_output", shape=(510, 1, 16, 512), dtype="fp32"),
        BufferSpec(name="partial_lse", shape=(510, 1, 16, 1), dtype="fp32"),
    )
    assert plan.total_bytes == 22512 + 510 * 16 * 513 * 4
    assert plan.to_dict()["bytes"] == {"buffers": 22512, "scratch": 16744320, "total": 16766832}
    assert plan.warnings == ()


def test_sized_for_the_layers_own_heads_the_buffers_would_be_too_small():
    """The bug of vllm-project/vllm pull request 38615, at 4 queries per sequence."""
    plan = plan_metadata(KIMI, GFX942, "v0.1.18", batch=8, max_query_length=16, sparse=True, topk=2048)
    assert plan.heads.kernel_heads == 16
    many = plan_metadata(with_heads(40), GFX942, "v0.1.18", batch=8)
    few = plan_metadata(with_heads(32), GFX942, "v0.1.18", batch=8)
    assert many.heads.kernel_heads == 48
    assert many.buffer("reduce_final_map").shape[0] == 3 * 8 > few.buffer("reduce_final_map").shape[0]


def test_folded_queries_are_copied_and_the_output_moves():
    plan = plan_metadata(with_heads(48), GFX942, "v0.1.20", batch=8, max_query_length=2)
    assert {buffer.name: buffer.shape for buffer in plan.scratch} == {
        "partial_output": (plan.buffer("reduce_partial_map").shape[0] * 2, 1, 16, 512),
        "partial_lse": (plan.buffer("reduce_partial_map").shape[0] * 2, 1, 16, 1),
        "folded_query": (16, 48, 576),
        "unfolded_output": (16, 48, 512),
    }
    (warning,) = plan.warnings
    assert warning.startswith("AITER every release: 48 heads are folded")
    assert "points its output at new storage" in warning


@pytest.mark.parametrize(
    ("release", "batch", "more", "words"),
    [
        ("v0.1.17-longctx", 32, {}, "ignores its plan in steps of 32 sequences or more"),
        ("v0.1.16.post3", 512, {}, "131072 entries, and 4.0 GiB of scratch"),
        ("v0.1.16.post6", 512, {"max_split_per_batch": 16}, "max_split_per_batch 16 makes"),
    ],
)
def test_what_a_release_is_known_to_do_wrong_is_said(release, batch, more, words):
    (warning,) = plan_metadata(KIMI, GFX950, release, batch=batch, **more).warnings
    assert words in warning


@pytest.mark.parametrize(
    ("target", "release", "batch", "more"),
    [
        (GFX950, "v0.1.17", 256, {}),
        (GFX950, "v0.1.18", 31, {}),
        (GFX942, "v0.1.18", 256, {}),
        (GFX950, "v0.1.18", 256, {"max_query_length": 2}),
        (GFX950, "v0.1.18", 256, FP8),
        (GFX950, "v0.1.17-rc0", 512, {"max_split_per_batch": 16}),
    ],
)
def test_and_nothing_is_said_of_what_is_right(target, release, batch, more):
    assert plan_metadata(KIMI, target, release, batch=batch, **more).warnings == ()


def test_the_scratch_of_v0_1_16_is_32_gib_with_128_heads():
    spec = mla("deepseek-v3", 1)
    plan = plan_metadata(spec, GFX950, "v0.1.16.post3", batch=512, max_split_per_batch=16, **FP8)
    assert byte_text(plan.scratch_bytes) == "32.1 GiB"
    assert "32.1 GiB of scratch" in plan.warnings[0]
    assert byte_text(plan_metadata(spec, GFX950, "v0.1.17", batch=512, **FP8).scratch_bytes) == "127.7 MiB"


def test_an_interval_of_releases_gets_the_largest():
    releases = ReleaseRange("v0.1.16.post6", "v0.1.17")
    both, one = (plan_metadata(with_heads(64), GFX950, each, batch=64) for each in (releases, "v0.1.16.post6"))
    assert both.buffers == one.buffers


def test_fp8_prefill_has_a_head_rule_of_its_own():
    plan = plan_metadata(KIMI, GFX950, "v0.1.16.post3", batch=4, prefill_length=8192, **FP8)
    assert isinstance(plan.prefill, PrefillPlan)
    assert (str(plan.prefill.heads), str(plan.heads)) == ("8", "8 -> 16, repeated twice")
    assert {buffer.name: buffer.shape for buffer in plan.prefill.buffers} == {
        "work_metadata_ptrs": (2,),
        "work_indptr": (257,),
        "work_info_set": ((4 + 31) * 32 * 8, 8),
        "reduce_indptr": (129,),
        "reduce_final_map": (128, 2),
        "reduce_partial_map": (35 * 32,),
    }
    assert plan.prefill.scratch[0].shape == (35 * 32 * 256, 8, 128)
    assert plan.total_bytes == plan.buffer_bytes + plan.scratch_bytes + plan.prefill.total_bytes
    padded = plan_metadata(mla("kimi-k3", 4), GFX950, "v0.1.16.post3", batch=4, prefill_length=64, **FP8).prefill
    assert isinstance(padded, PrefillPlan)
    assert str(padded.heads) == "24 -> 32, tiled and cut"


@pytest.mark.parametrize(
    ("model", "release", "more", "words"),
    [
        ("kimi-k2.5", "v0.1.16.post3", {"prefill_length": 64}, "the cache is bf16"),
        ("kimi-k2.5", "v0.1.16.post3", FP8, "no length"),
        ("glm-4.7-flash", "v0.1.16.post3", {"prefill_length": 64, **FP8}, "heads of 192 and 128, this layer's are 256 and 256"),
    ],
)  # fmt: skip
def test_where_there_is_no_fp8_prefill_the_plan_says_why(model, release, more, words):
    assert words in plan_metadata(mla(model, 1), GFX950, release, batch=4, **more).prefill


@pytest.mark.parametrize(
    "more", [{"batch": 0}, {"max_query_length": 0}, {"page_size": 3}, {"dcp": 0}, {"q_dtype": "fp16"}, {"sparse": True}]
)
def test_numbers_that_cannot_be(more):
    with pytest.raises(
        ValueError, match=r"whole number from 1 on|power of two|takes bf16 and fp8|topk is given for sparse"
    ):
        plan_metadata(KIMI, GFX950, **{"batch": 1, **more})


# ---- groups and states


def test_layers_of_one_model_are_one_group():
    (group,) = group_layers(registry.model("kimi-k2.5").specs(8, 0))
    assert (group.name, len(group.layers), group.is_mla) == ("MLA, 8 heads", 61, True)


def test_kimi_linear_asks_only_the_layers_that_apply():
    delta, latent = group_layers(registry.model("kimi-linear-48b-a3b").specs(8, 0))
    assert (delta.name, len(delta.layers), delta.is_mla) == ("gated delta net, 4 key and 4 value heads", 20, False)
    assert (latent.name, len(latent.layers), latent.is_mla) == ("MLA, 4 heads", 7, True)
    assert group_layers(registry.model("gpt-oss-20b").specs(1, 0)) == ()


def test_target_and_draft_of_different_heads_get_a_group_each():
    """The case of vllm-project/vllm pull request 43543: 8 and 4 heads."""
    models = {"target": [("attn", with_heads(8))], "draft": [("attn", with_heads(4))]}
    target, draft = group_layers(models)
    assert (target.layers, draft.layers) == (("target/attn",), ("draft/attn",))
    with pytest.raises(MixedGroupError) as caught:
        group_layers(models, groups={"decode": ["target/attn", "draft/attn"]})
    assert caught.value.layers == ("target/attn", "draft/attn")
    assert caught.value.differences == ("local query heads 8 and 4",)
    (one,) = group_layers(models, groups={"decode": ["target/attn"]})
    assert (one.name, one.spec.num_local_heads) == ("decode", 8)


def test_a_group_of_two_kinds_names_the_kinds():
    specs = dict(registry.model("kimi-linear-48b-a3b").specs(8, 0))
    delta, latent = group_layers(specs.items())
    with pytest.raises(MixedGroupError, match="kind gated delta net and MLA") as caught:
        group_layers(specs.items(), groups={"all": [delta.layers[0], latent.layers[0]]})
    assert len(caught.value.differences) == 1


def test_a_group_of_a_layer_that_is_not_there():
    with pytest.raises(KeyError, match="no layer that metadata is planned for"):
        group_layers([("attn", KIMI)], groups={"all": ["mlp"]})


def delta_net(name: str, tp: int) -> GatedDeltaNetSpec:
    return next(spec for _, spec in registry.model(name).specs(tp, 0) if isinstance(spec, GatedDeltaNetSpec))


@pytest.mark.parametrize(
    ("model", "tp", "conv", "recurrent"),
    [
        ("kimi-linear-48b-a3b", 8, (3 * 4 * 128, 3), (4, 128, 128)),
        ("kimi-linear-48b-a3b", 1, (3 * 32 * 128, 3), (32, 128, 128)),
        ("qwen3-next-80b-a3b", 1, (2 * 16 * 128 + 32 * 128, 3), (32, 128, 128)),
        ("qwen3-next-80b-a3b", 4, (2 * 4 * 128 + 8 * 128, 3), (8, 128, 128)),
    ],
)
def test_the_state_of_a_delta_net_is_of_local_heads(model, tp, conv, recurrent):
    plan = plan_state(delta_net(model, tp), batch=3)
    assert (plan.conv.shape, plan.recurrent.shape) == (conv, recurrent)
    per_sequence = conv[0] * conv[1] * 2 + recurrent[0] * 128 * 128 * 4
    assert (plan.bytes_per_sequence, plan.bytes) == (per_sequence, 3 * per_sequence)
    assert plan.to_dict()["bytes"] == plan.bytes


def test_speculated_tokens_widen_the_convolutions_state():
    spec = delta_net("qwen3-next-80b-a3b", 4)
    assert plan_state(spec, speculated=2).conv.shape[1] == 5
    with pytest.raises(ValueError, match="is a whole number from"):
        plan_state(spec, batch=0)


def test_layers_that_differ_in_epsilon_only_share_a_group():
    other = attrs.evolve(KIMI, kv_norm=attrs.evolve(KIMI.kv_norm, epsilon=1e-3))
    assert len(group_layers([("a", KIMI), ("b", other)])) == 1


@pytest.mark.parametrize(("model", "groups"), [("deepseek-v3", {"MLA, 128 heads": 61}), ("gpt-oss-20b", {})])
def test_real_layers_are_grouped_as_declared_ones_are(model, groups):
    found = group_layers(registry.specs_in(real_model(model)))
    assert {group.name: len(group.layers) for group in found} == groups
    declared = group_layers(registry.model(model).specs())
    plans = [[plan_metadata(group.spec, GFX950, batch=8).buffers for group in each] for each in (found, declared)]
    assert plans[0] == plans[1]
