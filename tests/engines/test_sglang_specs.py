"""Whole real SGLang 0.5.23 models, built without a GPU, against what models.toml declares of them.

Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import in_turn

from layerfuse import registry
from layerfuse.adapters import NO_ROPE, ActivationQuant, GQASpec, MLASpec, ResidualSpec, WeightSpec
from layerfuse.registry.inspect import inspect, read_modelopt

sglang_layers = pytest.importorskip("sglang_layers")
from sglang_host import published_config  # noqa: E402
from sglang_layers import MODELS, build_model, build_of  # noqa: E402
from whole_models import (  # noqa: E402
    cases,
    check_changed,
    check_every_layer,
    check_kernel_layers,
    check_stages,
    norms_that_feed_nothing,
)

WITHOUT_STAGES = ("longcat-flash", "qwen3-next")
"""One is built whole on every rank, and the other stops."""


@pytest.mark.parametrize(("name", "tp", "rank"), cases(MODELS))
def test_every_layer_reads_as_declared_and_its_kernel_layers_hold_the_same_on_this_rank(
    name: str, tp: int, rank: int
) -> None:
    model = build_model(name, tp=tp, rank=rank)
    check_every_layer(model, "sglang", name, tp, rank)
    assert check_kernel_layers(model) > 0
    # The key/value latent goes to the cache, and gpt-oss has nothing but experts after its attention.
    allowed = "post_attention_layernorm" if name.startswith("gpt-oss") else "kv_a_layernorm"
    assert {found.partition(".")[2] for found in norms_that_feed_nothing(model)} <= {allowed}


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "kimi-linear", "qwen3-next"])
def test_a_layer_that_was_changed_is_what_it_is_now(name: str) -> None:
    check_changed(build_model(name, tp=2, rank=1))


def layer_of(name: str, path: str) -> Any:
    return build_model(name, tp=8, rank=5).get_submodule(f"model.layers.{path}")


def test_trap_07_the_absorbed_kernel_has_other_head_widths() -> None:
    layer = layer_of("deepseek-v3", "0.self_attn")
    assert (layer.attn_mqa.qk_head_dim, layer.attn_mqa.v_head_dim) == (576, 512)
    assert (registry.spec_for(layer).qk_head_dim, registry.spec_for(layer).v_head_dim) == (192, 128)
    absorbed, expanded = registry.spec_for(layer.attn_mqa), registry.spec_for(layer.attn_mha)
    # Its spec is of another type, whose widths are documented as the kernel's.
    assert not isinstance(absorbed, MLASpec)
    assert (absorbed.head_dim, absorbed.v_head_dim, absorbed.num_local_kv_heads) == (576, 512, 1)
    assert (expanded.head_dim, expanded.v_head_dim, expanded.num_local_kv_heads) == (192, 128, 16)


def test_trap_19_a_rotary_embedding_of_none_takes_no_rope_width_away() -> None:
    layer = layer_of("kimi-linear", "3.self_attn")
    assert layer.rotary_emb is None
    assert (registry.spec_for(layer).qk_rope_head_dim, registry.spec_for(layer).rope) == (64, NO_ROPE)


def test_trap_28_a_decoder_layer_that_is_its_own_attention_reads_as_both() -> None:
    model = build_model("qwen3-next", tp=8, rank=5)
    layer = model.get_submodule("model.layers.3")

    paths = [path for path, _ in registry.specs_in(model) if f"{path}.".startswith("model.layers.3.")]
    assert paths == ["model.layers.3", "model.layers.3", "model.layers.3.mlp.shared_expert"]
    assert isinstance(registry.spec_for(layer), GQASpec)
    assert isinstance(registry.spec_for(layer, ResidualSpec), ResidualSpec)
    # Two KV heads over eight ranks: each rank holds a replica of one.
    assert (registry.spec_for(layer).num_kv_heads, registry.spec_for(layer).num_local_kv_heads) == (2, 1)


def test_trap_29_local_heads_that_are_rewritten_during_a_forward_are_read_anew() -> None:
    layer = layer_of("deepseek-v3", "0.self_attn")
    assert registry.spec_for(layer).num_local_heads == 16

    layer.num_local_heads = 32  # as decode attention with a tensor-parallel size of its own does

    assert registry.spec_for(layer).num_local_heads == 32
    assert registry.spec_for(layer).parallel.size == 4


def test_trap_29_delta_attention_may_be_sharded_by_another_degree_than_mla() -> None:
    layer = layer_of("kimi-linear", "0.self_attn")
    layer.attn_tp_size = 1  # data-parallel attention: the delta layers still follow the global group
    assert registry.spec_for(layer).parallel.size == 8
    layer.shard_tp_size, layer.local_num_heads = 1, 32  # shard_on_attn_tp
    assert registry.spec_for(layer).parallel.size == 1
    del layer.shard_tp_size  # an older release, where the heads follow attn_tp_size
    assert registry.spec_for(layer).parallel.size == 1


@pytest.mark.parametrize(
    ("name", "degrees"), in_turn([name for name in MODELS if name not in WITHOUT_STAGES], [(1, 4), (2, 2)])
)
def test_the_stages_of_a_pipeline_together_are_the_whole_model(name: str, degrees: tuple[int, int]) -> None:
    (tp, stages), rank = degrees, degrees[0] - 1
    models = [build_model(name, tp=tp, rank=stage * tp + rank, pp=stages) for stage in range(stages)]
    check_stages(build_model(name, tp=tp, rank=rank), models)


def test_linears_in_nvfp4_say_how_they_take_what_they_read() -> None:
    """As ModelOpt writes it: SGLang quantises in front of the product, with scales in tiles."""
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

    config = {**published_config("deepseek-v3"), "num_hidden_layers": 2, "first_k_dense_replace": 100}
    for awq, quant in ((False, ActivationQuant(fixed="nvfp4", swizzled=True)), (True, None)):
        said = ModelOptFp4Config(True, group_size=16, exclude_modules=["lm_head"], is_awq=awq)
        model, _ = build_of(config, rank=0, tp=1, pp=1, patch={}, quantised=said)
        decoder = model.get_submodule("model.layers.1")
        attention, stream = registry.spec_for(decoder.self_attn), registry.spec_for(decoder)
        assert (attention.q_norm.quant, stream.post_attention_norm.quant) == (quant, quant)
        (linear,) = attention.q_norm.consumers
        assert linear.weight == WeightSpec(dtype="float4_e2m1fn", scheme="group", block=(1, 16))


@pytest.mark.parametrize("said", [None, {"quant_method": "fp8"}])
def test_modelopts_own_file_counts_as_layerfuse_reads_it(said: dict[str, Any] | None, tmp_path: Path) -> None:
    """Where the config has no `quantization_config`; by the name that SGLang gives the file."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8Config

    (name,) = ModelOptFp8Config.get_config_filenames()
    own = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {"quant_algo": "FP8"}}
    config = object.__new__(ModelConfig)
    config.hf_config = SimpleNamespace(**({} if said is None else {"quantization_config": dict(said)}))
    config.model_path = str(tmp_path)
    assert read_modelopt(tmp_path) is None and config._parse_quant_hf_config() == said
    (tmp_path / name).write_text(json.dumps(own))
    assert read_modelopt(tmp_path) == own
    assert config._parse_quant_hf_config() == (said or {"quant_method": "modelopt_fp8", "quant_algo": "FP8"})


def test_what_plans_say_of_published_checkpoints_is_what_sglangs_configs_do(tmp_path: Path) -> None:
    """`engines.sglang.facts` and `registry.hf_quant`: ModelOpt's per channel and token, and fp8 linears beside packed experts."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8Config

    own = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    with pytest.raises(ValueError, match="only supports regular FP8"):
        ModelOptFp8Config.from_config({"quant_method": "modelopt", **own})
    config = object.__new__(ModelConfig)
    assert config._parse_modelopt_quant_config({"quantization": own}) is None

    packed = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": packed}},
        "ignore": ["lm_head"],
        "linear_fp8_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    values = {**published_config("deepseek-v3"), "num_hidden_layers": 1, "first_k_dense_replace": 100}
    model, _ = build_of(values, rank=0, tp=1, pp=1, patch={}, quantised=CompressedTensorsConfig.from_config(said))
    linear = model.get_submodule("model.layers.0.mlp.down_proj")
    assert type(linear.quant_method) is Fp8LinearMethod and linear.quant_method.block_quant
    found = inspect({**values, "quantization_config": said}, registry=registry.default).entry.quant
    assert {name: (kind.method, kind.weight) for name, kind in found.items()} == {
        "fp8": ("fp8", "float8_e4m3fn"),
        "int4": ("compressed-tensors", "int4"),
    }
