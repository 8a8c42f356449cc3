"""The traps of attribute names, 16 to 32: what exists but is None, what only a config says, what is wrapped or shared."""

from __future__ import annotations

from typing import Any

import pytest
import vllm_standins as vllm
from helpers import fresh_layer, fresh_model, real_model
from standins import module, weight
from test_traps import atom, transformers

from layerfuse import registry
from layerfuse.adapters import GatedDeltaNetSpec, GQASpec, KernelSpec, MLASpec, ResidualSpec


def test_trap_16_q_a_proj_exists_also_without_a_query_latent() -> None:
    layer = transformers("kimi-linear-48b-a3b", "3.self_attn")
    assert hasattr(layer, "q_a_proj") and hasattr(layer, "q_a_layernorm")
    assert "q_a_proj" not in dict(layer.named_children())
    spec = registry.spec_for(layer)
    assert (spec.q_lora_rank, spec.q_norm) == (None, None)


def test_trap_17_or_is_absent_and_none_one_level_down() -> None:
    layer = vllm.mla(q_lora=None)
    assert not hasattr(layer, "q_a_layernorm") and layer.mla_attn.q_a_layernorm is None
    assert registry.spec_for(layer).q_norm is None
    assert registry.spec_for(layer.mla_attn).q_norm is None
    # The other way round, a latent without its norm is missing and not None.
    layer = vllm.mla()
    del layer.q_a_layernorm
    with pytest.raises(AttributeError, match="does not say its q_norm"):
        registry.spec_for(layer)


def test_trap_18_an_indexer_of_none_does_not_mean_dense() -> None:
    # No spec speaks of sparsity, so that nothing can be concluded from it; with and without, the layer is the same MLA.
    layer = fresh_layer("deepseek-v3.2", "model.layers.0.self_attn")
    before = registry.spec_for(layer)
    assert layer.indexer is not None
    layer.indexer = None
    assert registry.spec_for(layer) == before


def test_trap_19_a_language_model_of_none_is_no_reason_to_crash() -> None:
    encoder_only = module("sglang.srt.models.kimi_k25:KimiK25ForConditionalGeneration", language_model=None)
    with pytest.raises(LookupError, match="nothing in this one looks like it"):
        registry.specs_in(encoder_only)


def test_trap_20_kimi_linear_rotates_nothing_and_keeps_the_width() -> None:
    model = real_model("kimi-linear-48b-a3b")
    assert not any("rotary" in type(part).__name__.lower() for part in model.modules())
    spec = registry.spec_for(model.get_submodule("model.layers.3.self_attn"))
    assert (spec.qk_rope_head_dim, spec.split_sizes) == (64, (512, 64))


def test_trap_21_the_k25_wrapper_is_read_by_its_layers_and_its_vision_tower_left_alone() -> None:
    model = real_model("kimi-k2.5")
    assert not hasattr(model.config, "num_attention_heads")
    assert model.config.get_text_config().model_type == "deepseek_v3"
    specs = registry.specs_in(model)
    assert len(specs) == 3 * 61 + 1
    assert all(path.startswith("model.language_model.layers.") for path, _ in specs[:-1])
    assert specs[-1][0] == "model.language_model"
    tower = next(part for path, part in model.named_modules() if path.endswith("vision_tower.layers.0.attn"))
    assert hasattr(tower, "num_heads") and registry.default.readers_for(type(tower)) == ()
    assert registry.unknown_in(model) == []


def test_trap_22_kimis_published_layer_numbers_are_one_based_and_ours_are_not() -> None:
    published = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}
    kinds = registry.model("kimi-linear-48b-a3b").kind_at()
    assert [i + 1 for i, kind in enumerate(kinds) if kind == "mla"] == published["full_attn_layers"]
    # transformers' own default pattern would be another: 4, 8, 12 counted from 0.
    config = pytest.importorskip("transformers").KimiLinearConfig(num_hidden_layers=27)
    default = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert default[:3] == [4, 8, 12]
    model = real_model("kimi-linear-48b-a3b")
    read = [type(spec) for _, spec in registry.specs_in(model) if isinstance(spec, (MLASpec, GatedDeltaNetSpec))]
    assert [i for i, kind in enumerate(read) if kind is MLASpec] == [3, 7, 11, 15, 19, 23, 26]


def test_trap_23_longcat_counts_its_attentions_twice_as_far_as_its_layers() -> None:
    model = real_model("longcat-flash")
    assert (model.config.num_layers, model.config.num_hidden_layers) == (28, 56)
    specs = registry.specs_in(model)
    attentions = [(path, spec) for path, spec in specs if isinstance(spec, MLASpec)]
    assert [spec.layer_index for _, spec in attentions] == list(range(56))
    assert [path for path, _ in attentions[:3]] == [
        "model.layers.0.self_attn.0",
        "model.layers.0.self_attn.1",
        "model.layers.1.self_attn.0",
    ]
    streams = [spec for _, spec in specs if isinstance(spec, ResidualSpec)]
    assert [spec.layer_index for spec in streams] == list(range(28))
    assert all(len(spec.input_norms) == len(spec.post_attention_norms) == 2 for spec in streams)
    # vLLM's two attentions of decoder layer 3, by their registered names.
    kernel = vllm.mla().mla_attn.mla_attn
    kernel.layer_name = "model.layers.3.self_attn.1.attn"
    assert registry.spec_for(kernel).layer_index == 7


def test_trap_24_head_counts_are_not_derived_from_a_query_projection_twice_as_wide() -> None:
    layer = transformers("qwen3-next-80b-a3b", "3.self_attn")
    assert layer.q_proj.out_features // layer.head_dim == 2 * 16
    assert registry.spec_for(layer).num_heads == 16
    # Where the config does not tell, the output projection does, and it is right for both architectures.
    for name, path, heads in (
        ("qwen3-next-80b-a3b", "model.layers.3.self_attn", 16),
        ("gpt-oss-20b", "model.layers.0.self_attn", 64),
    ):
        layer = fresh_layer(name, path)
        of_the_rope = ("head_dim", "rope_parameters", "max_position_embeddings")
        config = {name: getattr(layer.config, name) for name in ("hidden_size", "num_key_value_heads", *of_the_rope)}
        layer.config = type("Config", (), config)()
        assert registry.spec_for(layer).num_heads == heads


def test_trap_25_a_next_token_layer_is_one_more_layer_with_its_own_index() -> None:
    # vLLM numbers it on; nothing here takes the number of layers for a bound. The entry does not count it.
    layer = vllm.mla(index=61)
    assert registry.spec_for(layer).layer_index == 61
    assert registry.model("deepseek-v3").num_hidden_layers == 61
    assert len(real_model("deepseek-v3").model.layers) == 61


def test_trap_26_shared_modules_are_named_once_and_the_layer_found_all_the_same() -> None:
    layer = vllm.mla()
    assert layer.kv_a_layernorm is layer.mla_attn.kv_a_layernorm
    model = module("torch.nn:Model", first=layer)
    # One layer, however many of its parts are layers too; the kernels are there for those who ask.
    assert [path for path, _ in registry.specs_in(model)] == ["first"]
    assert [path for path, _ in registry.specs_in(model, of=KernelSpec)] == ["first.mla_attn.mla_attn"]


def test_trap_27_vllms_transformers_backend_holds_totals_outside_and_shares_inside() -> None:
    # The transformers module itself, whose projections vLLM replaced by its own, with vLLM's kernel layer set on it.
    layer = fresh_layer("deepseek-v3")
    layer.attn = vllm.mla().mla_attn.mla_attn
    layer.kv_b_proj = vllm.linear(8, 5, input_size=512, output_size=32768)
    layer.o_proj = vllm.linear(8, 5, input_size=16384, output_size=7168)
    assert registry.spec_for(layer.attn).num_local_heads == 16
    # The outside cannot tell its sharding any more: it says so, and is not taken for whole.
    with pytest.raises(LookupError, match="the weight of kv_b_proj: RowParallelLinear has no"):
        registry.spec_for(layer)
    from layerfuse.adapters import Parallel

    assert registry.spec_for(layer, parallel=Parallel(size=8, rank=5)).num_local_heads == 16


def test_trap_30_query_replication_in_a_forward_is_not_a_count_of_the_layer() -> None:
    layer = vllm.mla()
    before = registry.spec_for(layer)
    layer.mla_attn.dcp_q_replicate = True
    assert registry.spec_for(layer) == before
    assert registry.spec_for(layer.mla_attn).num_local_heads == 16


def test_trap_31_attributes_stay_totals_under_transformers_sharding_and_the_weight_tells() -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from fake_ranks import ranks, with_plan

    model = fresh_model("deepseek-v2-lite")
    layer = model.get_submodule("model.layers.0.self_attn")
    with ranks((2,), ("tp",), rank=1) as mesh:
        with_plan(model, mesh)
        assert (layer.num_heads, layer.kv_b_proj.out_features) == (16, 16 * 256)
        spec = registry.spec_for(layer)
    assert (spec.num_local_heads, spec.parallel.size, spec.parallel.rank) == (8, 2, 1)


def test_trap_32_a_head_width_derived_from_the_share_is_the_layers_own_number() -> None:
    # `head_dim or hidden_size // self.num_heads` in the engines divides by this rank's heads. It happens before any
    # layer can be read, and only for checkpoints without head_dim: the entry's number differs from the layer's then.
    layer: Any = atom("qwen3-next-80b-a3b", "3.self_attn")
    layer.head_dim = layer.hidden_size // layer.num_heads
    layer.q_norm.weight = layer.k_norm.weight = weight(layer.head_dim)
    read = registry.spec_for(layer)
    declared = next(spec for _, spec in registry.model("qwen3-next-80b-a3b").specs(8, 5) if isinstance(spec, GQASpec))
    assert (read.head_dim, declared.head_dim) == (1024, 256)
    for entry in registry.models().values():  # so every declared model says its own
        assert all(kind.head_dim > 0 for kind in entry.layers.values() if kind.family == "gqa")


def test_one_version_only_names_are_read_under_either() -> None:
    """The table `One version only`: transformers 4.57 with flash-linear-attention, and older SGLang and vLLM."""
    layer = fresh_layer("qwen3-next-80b-a3b", "model.layers.0.linear_attn")
    before = registry.spec_for(layer)
    layer.norm.eps = layer.norm.variance_epsilon
    del layer.norm.variance_epsilon
    assert registry.spec_for(layer) == before
    assert isinstance(before, GatedDeltaNetSpec)
    assert "vllm:Qwen3NextGatedDeltaNet" in registry.layer_classes()
