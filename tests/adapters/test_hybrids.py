"""Real hybrid models of transformers on the meta device: what their mixers are, and the norms of their streams."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from layerfuse import registry
from layerfuse.adapters import (
    ActivationQuant,
    GatedMLPSpec,
    GQASpec,
    LayerNormSpec,
    LayerReader,
    MLPSpec,
    ResidualSpec,
    SpecError,
)
from layerfuse.adapters.hybrids import TRANSFORMERS_MAMBA2
from layerfuse.adapters.specs import GatedNormSpec, Mamba2Spec, OtherMixerSpec
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.fusion.sites import sites_of

transformers = pytest.importorskip("transformers")
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer  # noqa: E402

SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_d_conv": 3,
}  # fmt: skip


def read(name: str, **config: Any) -> dict[str, Any]:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class(**config))
    return {path.partition(".")[2]: spec for path, spec in registry.specs_in(model)}


def mamba2(read_off: Any, eps: float, before: bool = False, **changes: Any) -> None:
    """Holds a spec to the sizes that the configs here give."""
    norm = GatedNormSpec(width=128, epsilon=eps, activation="silu", norm_before_gate=before, group_size=64)
    expected = {
        "hidden_size": 64, "num_heads": 8, "num_local_heads": 8, "head_dim": 16, "ssm_state_size": 32, "num_groups": 2,
        "num_local_groups": 2, "conv_kernel_size": 3, "output_norm": norm, **changes,
    }  # fmt: skip
    assert isinstance(read_off, Mamba2Spec)
    assert {name: getattr(read_off, name) for name in expected} == expected


def test_bamba_alternates_mamba2_and_attention() -> None:
    specs = read("BambaForCausalLM", **SMALL, **HEADS, **MAMBA, attn_layer_indices=[1], rms_norm_eps=1e-4)
    mamba2(specs["layers.0.mamba"], 1e-4)
    assert isinstance(specs["layers.1.self_attn"], GQASpec)
    for layer, mixer, last in (
        ("layers.0", "mamba.in_proj", "mamba.out_proj"),
        ("layers.1", "self_attn.q_proj", "self_attn.o_proj"),
    ):
        stream = specs[layer]
        assert mixer in [linear.path for linear in stream.input_norm.consumers]
        assert [linear.path for linear in stream.post_attention_norm.producers] == [last]
        assert [linear.path for linear in stream.gives] == ["feed_forward.down_proj"]
    assert [linear.path for linear in specs["layers.0.mamba"].output_norm.consumers] == ["out_proj"]


@pytest.mark.parametrize("before", [False, True])
def test_falcon_h1_has_both_in_a_layer_and_maybe_no_norm(before: bool) -> None:
    config = {**SMALL, **HEADS, **MAMBA, "mamba_d_ssm": 128, "rms_norm_eps": 1e-4, "head_dim": 16}
    normed = read("FalconH1ForCausalLM", **config, mamba_rms_norm=True, mamba_norm_before_gate=before)
    mamba2(normed["layers.1.mamba"], 1e-4, before)
    assert isinstance(normed["layers.1.self_attn"], GQASpec)
    assert not normed["layers.1"].added_as_given
    (norm,) = normed["layers.1"].input_norms
    assert norm.consumers == (), "a factor stands between it and what reads it"
    assert [linear.path for linear in normed["layers.1"].post_attention_norm.consumers] == [
        "feed_forward.gate_proj",
        "feed_forward.up_proj",
    ]
    bare = read("FalconH1ForCausalLM", **config, mamba_rms_norm=False)
    mamba2(bare["layers.1.mamba"], 1e-4, output_norm=None)


def test_the_factors_in_falcon_h1s_mlps_are_read_and_no_product_of_theirs_is_fused() -> None:
    config = {**SMALL, **HEADS, **MAMBA, "mamba_d_ssm": 128, "rms_norm_eps": 1e-4, "head_dim": 16}
    for factors in ((0.5, 2.0), (1.0, 1.0)):
        mlp = read("FalconH1ForCausalLM", **config, mlp_multipliers=list(factors))["layers.1.feed_forward"]
        assert isinstance(mlp, GatedMLPSpec)
        assert (mlp.gate_multiplier, mlp.down_multiplier) == factors
        quantised = attrs.evolve(
            mlp, quant=ActivationQuant(group_size=128), intermediate_size=128, local_intermediate_size=128
        )
        decided = plan([("layers.1.feed_forward", quantised)], Target.named("sm90"), FusionConfig(level=2))
        (one,) = [each for each in decided.decisions if each.fusion == "silu_mul_group_quant"]
        refused = "its gate is multiplied by 0.5 in front of the activation; the fused op has no factor there"
        assert (one.kind, one.reason == refused) == (("expected", False) if factors[0] == 1 else ("refused", True))


def test_granites_hybrid_has_experts_behind_either() -> None:
    specs = read(
        "GraniteMoeHybridForCausalLM", **SMALL, **HEADS, **MAMBA, layer_types=["mamba", "attention"], rms_norm_eps=1e-4,
        mamba_expand=2, shared_intermediate_size=48, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    mamba2(specs["layers.0.mamba"], 1e-4)
    assert specs["layers.0.shared_mlp"].intermediate_size == 48
    assert specs["layers.1"].experts.num_experts == 4
    assert not specs["layers.0"].added_as_given


def test_nemotron_h_is_made_of_layers_of_one_block() -> None:
    specs = read(
        "NemotronHForCausalLM", **{**SMALL, "num_hidden_layers": 3}, **HEADS, head_dim=16, mamba_num_heads=8, mamba_head_dim=16,
        ssm_state_size=32, n_groups=2, conv_kernel=3, layers_block_type=["mamba", "mlp", "attention"], layer_norm_epsilon=1e-4,
    )  # fmt: skip
    mamba2(specs["layers.0.mixer"], 1e-4)
    assert type(specs["layers.1.mixer"]) is MLPSpec
    assert specs["layers.1.mixer"].activation == "relu2"
    assert isinstance(specs["layers.2.mixer"], GQASpec)
    reads = ("mixer.in_proj", "mixer.up_proj", "mixer.q_proj")
    gives = ("mixer.out_proj", "mixer.down_proj", "mixer.o_proj")
    for index, (first, last) in enumerate(zip(reads, gives, strict=True)):
        stream = specs[f"layers.{index}"]
        assert stream.is_one_block
        assert stream.input_norm.consumers[0].path == first
        assert [linear.path for linear in stream.gives] == [last]
        (site,) = sites_of("", stream)
        assert (site.role, site.adds) == ("input", index > 0)


def test_mamba2_alone_and_a_mixer_without_a_spec() -> None:
    specs = read("Mamba2ForCausalLM", **SMALL, num_heads=8, head_dim=16, state_size=32, n_groups=2, conv_kernel=3)
    mamba2(specs["layers.0.mixer"], 1e-5)
    specs = read("MambaForCausalLM", **SMALL)
    assert isinstance(specs["layers.1.mixer"], OtherMixerSpec)
    assert (specs["layers.1.mixer"].mixer, specs["layers.1.mixer"].layer_index) == ("mamba", 1)
    assert sites_of("", specs["layers.1.mixer"]) == ()
    assert specs["layers.1"].is_one_block


def test_layers_without_an_index_take_it_from_their_name() -> None:
    specs = read("RecurrentGemmaForCausalLM", **SMALL, **HEADS, head_dim=16, attention_window_size=7, lru_width=64,
                 block_types=["recurrent", "attention"])  # fmt: skip
    assert (specs["layers.0.temporal_block"].mixer, specs["layers.0.temporal_block"].layer_index) == ("recurrence", 0)
    assert specs["layers.1.temporal_block"].sliding_window == 7
    assert [specs[f"layers.{i}"].layer_index for i in (0, 1)] == [0, 1]
    assert specs["layers.0"].input_norm.weight_offset == 1.0


def test_rwkvs_norms_are_layer_norms_that_no_linear_reads_as_they_are() -> None:
    specs = read("RwkvForCausalLM", **SMALL, intermediate_size=96, layer_norm_epsilon=1e-4)
    stream = specs["blocks.1"]
    assert isinstance(stream, ResidualSpec)
    assert isinstance(stream.input_norm, LayerNormSpec)
    assert (stream.input_norm.epsilon, stream.input_norm.consumers) == (1e-4, ())


def test_a_rank_holds_its_share_of_heads_and_groups() -> None:
    spec = read("Mamba2ForCausalLM", **SMALL, num_heads=8, head_dim=16, state_size=32, n_groups=2)["layers.0.mixer"]
    two, four = spec.shard(2, 1), spec.shard(4)
    assert (two.num_local_heads, two.num_local_groups, two.conv_dim) == (4, 1, 4 * 16 + 2 * 32)
    assert (four.num_local_heads, four.num_local_groups, four.state_shape) == (2, 1, (2, 16, 32))
    with pytest.raises(SpecError, match="8 heads cannot be shared equally by 3"):
        spec.shard(3)
    # One group a rank: its norm is that of a row. Four ranks: two of them have the heads of one group between them.
    (site,) = sites_of("", two)
    assert (site.absent, site.norms[0].width, site.norms[0].group_size, site.quantised_width) == (None, 64, 64, 64)
    assert "variance is over the heads of 2 ranks" in str(sites_of("", four)[0].absent)


def test_a_flag_for_a_norm_is_a_flag() -> None:
    where = {"where": "num_heads"}
    odd = TRANSFORMERS_MAMBA2.but(output_norm={**TRANSFORMERS_MAMBA2.words["output_norm"], **where})
    with torch.device("meta"):
        layer = Mamba2Mixer(transformers.Mamba2Config(**SMALL, num_heads=8, head_dim=16, n_groups=2), 0)
    with pytest.raises(SpecError, match="output_norm: expected num_heads to be true or false, got 8"):
        LayerReader("transformers:Mamba2Mixer", "mine", odd).read(layer)
