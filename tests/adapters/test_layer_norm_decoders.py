"""Decoders with LayerNorms and plain MLPs: blocks side by side, norms behind the adds, and what of such layers no spec describes."""

from __future__ import annotations

from typing import Any

import pytest
from fake_ranks import cut, ranks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402

from layerfuse import registry  # noqa: E402
from layerfuse.adapters import (  # noqa: E402
    FinalNormSpec,
    GQASpec,
    LayerNormSpec,
    MLPSpec,
    Parallel,
    ParallelUnknownError,
    ResidualSpec,
    SpecError,
)
from layerfuse.adapters.sources import Const  # noqa: E402
from layerfuse.fusion import Target, plan, sites_of  # noqa: E402
from layerfuse.fusion.sites import Site  # noqa: E402

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 32}


def small(name: str, **words: Any) -> Any:
    """A real model of this class, as small as can be, on the meta device."""
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **words})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def specs(model: Any, of: type) -> list[Any]:
    return [spec for _, spec in registry.specs_in(model, of=of)]


def sites(model: Any) -> dict[str, Site]:
    """Of the last layer's stream."""
    path, spec = registry.specs_in(model, of=ResidualSpec)[-1]
    return {site.role: site for site in sites_of(path, spec)}


# ---- norms


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_norm_says_its_bias(bias: bool) -> None:
    layer = small("Llama").model.layers[0]
    layer.input_layernorm = nn.LayerNorm(64, eps=3e-5, bias=bias, device="meta")
    read = registry.spec_for(layer).input_norm
    assert read == LayerNormSpec(width=64, epsilon=3e-5, has_weight=True, has_bias=bias)
    assert [linear.path for linear in read.consumers] == ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]


def test_norms_without_weights_or_with_one_that_counts_from_1() -> None:
    assert specs(small("Olmo"), FinalNormSpec)[0].final_norm == LayerNormSpec(
        width=64, epsilon=1e-5, has_weight=False, has_bias=False
    )
    (norm,) = specs(small("Nemotron", head_dim=16, num_key_value_heads=2), ResidualSpec)[0].input_norms
    assert (norm.weight_offset, norm.has_weight, norm.has_bias) == (1.0, True, True)
    assert specs(small("Cohere"), ResidualSpec)[0].input_norm.has_bias is False


def test_no_fusion_of_rms_norms_is_planned_at_a_layer_norm() -> None:
    model = small("Starcoder2", num_key_value_heads=2)
    found = plan(registry.specs_in(model), Target.named("cpu"))
    assert {decision.kind for decision in found.decisions} == {"not_applicable"}
    reasons = {d.reason for d in found.at("model.layers.1:input") if d.fusion == "add_rms_norm"}
    assert reasons == {"the norm is no RMSNorm: LayerNormSpec"}
    (no_gate,) = {d.reason for d in found.at("model.layers.1.mlp:activation")}
    assert no_gate == "the MLP has no gate, so that there is no product in front of its down-projection"


# ---- blocks side by side


def test_a_layer_whose_mlp_reads_the_attentions_norm() -> None:
    model = small("GPTJ", n_embd=64, n_head=4, n_layer=2, rotary_dim=8)
    (spec, _) = specs(model, ResidualSpec)
    assert (spec.parallel_residual, len(spec.input_norms), spec.post_attention_norms) == (True, 1, ())
    assert [linear.path for linear in spec.input_norm.consumers] == [
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "mlp.fc_in",
    ]
    found = sites(model)
    assert found["input"].adds and found["input"].absent is None
    assert found["post_attention"].absent == "the MLP reads the norm that the attention reads"


@pytest.mark.parametrize("parallel", [True, False])
def test_the_same_class_has_its_blocks_side_by_side_or_in_turn(parallel: bool) -> None:
    found = sites(small("GPTNeoX", use_parallel_residual=parallel))
    assert [found["post_attention"].adds, found["input"].adds] == [not parallel, True]
    assert len(found["post_attention"].norms) == 1
    spec = specs(small("StableLm", use_parallel_residual=parallel), ResidualSpec)[0]
    assert (spec.parallel_residual, len(spec.post_attention_norms)) == (parallel, 0 if parallel else 1)
    read = [linear.path for linear in spec.input_norm.consumers]
    assert read[3:] == (["mlp.gate_proj", "mlp.up_proj"] if parallel else [])
    assert spec.input_norm.consumers[0].shares_input == tuple(read[1:])
    spec = specs(small("Falcon", parallel_attn=parallel), ResidualSpec)[0]
    assert (spec.parallel_residual, len(spec.post_attention_norms)) == (parallel, 0 if parallel else 1)


def test_two_results_that_are_added_at_once_are_not_summed_as_one() -> None:
    norm = LayerNormSpec(width=64, epsilon=1e-5, has_weight=True, has_bias=False)
    spec = ResidualSpec(
        hidden_size=64,
        layer_index=1,
        parallel=Parallel(size=2, rank=0),
        parallel_residual=True,
        input_norms=(norm,),
        post_attention_norms=(),
    )
    assert [site.reduced for site in sites_of("", spec)] == [0, 1]
    one = ResidualSpec(
        hidden_size=64, layer_index=1, parallel=spec.parallel, input_norms=(norm,), post_attention_norms=()
    )
    assert one.is_one_block and not spec.is_one_block
    with pytest.raises(SpecError, match="post_attention_norms: expected"):
        ResidualSpec(
            hidden_size=64,
            layer_index=1,
            parallel=spec.parallel,
            input_norms=(norm,),
            post_attention_norms=(norm, norm),
        )


# ---- norms behind the adds


def test_norms_behind_the_adds_give_the_stream() -> None:
    model = small("Bert", intermediate_size=256, is_decoder=True)
    path, spec = registry.specs_in(model, of=ResidualSpec)[1]
    assert (path, spec.layer_index, spec.input_norms, spec.post_attention_norms) == ("bert.encoder.layer.1", 1, (), ())
    assert [norm.module for norm in spec.post_norms] == ["attention.output.LayerNorm", "output.LayerNorm"]
    assert {norm.epsilon for norm in spec.post_norms} == {1e-12}
    assert all("behind its adds" in (site.absent or "") for site in sites(model).values())
    assert specs(model, FinalNormSpec) == []
    assert registry.unknown_in(model) == []  # the norm of the head is none of the stream
    (mlp, _) = specs(model, MLPSpec)
    assert (mlp.intermediate_size, mlp.activation, mlp.layer_index) == (256, "gelu", 0)
    assert [linear.path for linear in mlp.consumers] == ["output.dense"]


def test_norms_stand_on_one_side_of_the_adds_alone() -> None:
    norm = LayerNormSpec(width=64, epsilon=1e-5, has_weight=True, has_bias=True)
    said = {"hidden_size": 64, "layer_index": 0, "parallel": Parallel(size=1, rank=0)}
    with pytest.raises(SpecError, match="post_norms: expected 2 and no others, got 2 beside 1 in front"):
        ResidualSpec(**said, input_norms=(norm,), post_attention_norms=(norm,), post_norms=(norm, norm))
    with pytest.raises(SpecError, match="a norm's width 64 is not the hidden_size 32"):
        ResidualSpec(**{**said, "hidden_size": 32}, input_norms=(), post_attention_norms=(), post_norms=(norm, norm))


# ---- what no spec describes


@pytest.mark.parametrize(
    ("name", "words", "what"),
    [
        ("Bert", {"is_decoder": True, "add_cross_attention": True}, "it has a crossattention"),
        ("GPT2", {"add_cross_attention": True}, "it has a crossattention"),
        ("XGLM", {"add_cross_attention": True}, "it has a encoder_attn"),
        ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 64}, "do_layer_norm_before as not is True"),
        (
            "Bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True",
        ),
        ("Falcon", {"new_decoder_architecture": True}, "it has a ln_attn"),
        ("Cohere2Moe", {"rms_norm_eps": 1e-6, "layer_types": None}, "self_attn.config.rms_norm_eps is 1e-06"),
    ],
)
def test_a_layer_of_another_kind_is_refused_with_what_tells(name: str, words: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError) as caught:
        registry.specs_in(small(name, **words))
    assert caught.value.problems == (f"{what}, and no spec describes such a layer",)


# ---- attention, sharding


def test_a_window_of_some_layers_is_none_of_the_others() -> None:
    model = small("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=7)
    assert [spec.sliding_window for spec in specs(model, GQASpec)] == [None, 7]
    kinds = ["sliding_attention", "full_attention"]
    model = small("Exaone4", layer_types=kinds, sliding_window=9, num_key_value_heads=2, sliding_window_pattern=2)
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [9, 9]
    assert [spec.sliding_window for spec in specs(model, GQASpec)] == [9, None]


def test_one_key_value_head_for_all_queries() -> None:
    for name in ("Falcon", "GPTBigCode"):
        assert {spec.num_kv_heads for spec in specs(small(name, multi_query=True), GQASpec)} == {1}
        model = small(name, multi_query=False)
        assert {spec.num_kv_heads for spec in specs(model, GQASpec)} == {4}


def test_a_conv1d_of_gpt2_is_whole_or_says_nothing() -> None:
    layer = small("GPT2").transformer.h[0]
    assert registry.spec_for(layer.mlp).intermediate_size == 256
    layer.mlp.c_proj.weight = nn.Parameter(torch.empty(128, 64, device="meta"))
    with pytest.raises(ParallelUnknownError):
        registry.spec_for(layer.mlp)


def test_ranks_share_the_columns_of_a_plain_mlp() -> None:
    with ranks((4,), ("tp",), 1) as mesh:
        mlp = small("Starcoder2", intermediate_size=128, num_key_value_heads=4).model.layers[0].mlp
        cut(mlp.c_proj, mesh, 1)
        spec = registry.spec_for(mlp)
    assert (spec.intermediate_size, spec.local_intermediate_size, spec.parallel) == (128, 32, Parallel(size=4, rank=1))


def test_sglangs_layers_whose_parts_read_one_norm() -> None:
    layers = registry.adapters()["sglang_decoders"].layers.items()
    said = {key: facts.parsed.get("parallel_residual") for key, several in layers for facts in several}
    assert {key.rpartition(":")[2] for key, parsed in said.items() if parsed == (Const(True),)} == {
        "Cohere2MoeDecoderLayer",
        "CohereDecoderLayer",
        "GPTJBlock",
        "PhiLayer",
    }
