"""Whole real vLLM 0.33.0 models, built without a GPU, against what models.toml declares of them.

Every decoder, attention and kernel layer is read at tensor-parallel sizes 1, 2 and 8, on ranks above 0. Run by
`make test-engines` in an environment of its own.
"""

from __future__ import annotations

import collections

import pytest
from layerfuse import registry
from layerfuse.adapters import (
    GQAKernelSpec,
    GQASpec,
    InnerLayerError,
    KernelSpec,
    MLAKernelSpec,
    MLASpec,
    ParallelConflictError,
    ResidualSpec,
    SpecError,
)
from layerfuse.adapters.specs import Parallel

vllm_layers = pytest.importorskip("vllm_layers")
build_layer, build_model, MODELS = vllm_layers.build_layer, vllm_layers.build_model, vllm_layers.MODELS

ENTRIES = {
    "deepseek-v3-mla-off": "deepseek-v3",
    "deepseek-v3.2-rocm": "deepseek-v3.2",
    "kimi-k2": "kimi-k2-instruct",
    "kimi-linear": "kimi-linear-48b-a3b",
    "kimi-linear-rocm": "kimi-linear-48b-a3b",
    "kimi-k3-rocm": "kimi-k3",
    "qwen3-next": "qwen3-next-80b-a3b",
    "qwen3.5-35b": "qwen3.5-35b-a3b",
}
"""The models.toml entry of each model whose name here differs: another platform's classes, or a shorter name."""

CASES = [
    pytest.param(name, tp, rank, id=f"{name}-tp{tp}-rank{rank}")
    for name, model in MODELS.items()
    for tp, rank in ((1, 0), (2, 1), (8, 5))
    if tp in model.tp_sizes
]


@pytest.mark.parametrize(("name", "tp", "rank"), CASES)
def test_every_layer_reads_as_declared(name: str, tp: int, rank: int) -> None:
    entry = registry.model(ENTRIES.get(name, name))
    model = build_model(name, tp=tp, rank=rank)

    read = registry.specs_in(model)

    assert [spec for _, spec in read] == [spec for _, spec in entry.specs(tp, rank, engine="vllm")]
    assert {spec.parallel for _, spec in read} == {Parallel(size=tp, rank=rank)}
    assert registry.unknown_in(model) == []
    for path, spec in read:
        assert registry.spec_for(model.get_submodule(path), type(spec)) == spec


@pytest.mark.parametrize(("name", "tp", "rank"), CASES)
def test_kernel_layers_hold_what_their_outer_layer_holds_on_this_rank(name: str, tp: int, rank: int) -> None:
    model = build_model(name, tp=tp, rank=rank)
    outer = {path: spec for path, spec in registry.specs_in(model) if not isinstance(spec, ResidualSpec)}

    for path, kernel in registry.specs_in(model, of=KernelSpec):
        around = next(spec for outer_path, spec in outer.items() if path.startswith(f"{outer_path}."))
        assert kernel.layer_index == around.layer_index
        assert kernel.num_local_heads == around.num_local_heads
        assert kernel.softmax_scale == pytest.approx(around.softmax_scale)
        if isinstance(kernel, MLAKernelSpec):
            assert (kernel.latent_width, kernel.q_lora_rank) == (around.latent_width, around.q_lora_rank)
        elif isinstance(around, GQASpec):
            assert kernel.num_local_kv_heads == around.num_local_kv_heads
            assert kernel.sliding_window == around.sliding_window
        else:  # DeepSeek's expanded attention: values are padded to the query width
            assert isinstance(kernel, GQAKernelSpec)
            assert isinstance(around, MLASpec)
            assert (kernel.num_local_kv_heads, kernel.head_dim) == (around.num_local_heads, around.qk_head_dim)
        with pytest.raises(InnerLayerError, match=kernel.outer.removeprefix("the layer ")):
            _ = kernel.hidden_size


def test_the_wrapper_inside_an_mla_layer_reads_the_same_though_its_num_heads_is_the_ranks() -> None:
    layer = build_layer("deepseek-v3/mla", tp=8, rank=5)

    assert layer.num_heads == 128
    assert layer.mla_attn.num_heads == 16
    assert registry.spec_for(layer.mla_attn) == registry.spec_for(layer)


def test_a_kimi_linear_model_holds_both_kinds_where_the_checkpoint_puts_them() -> None:
    specs = registry.specs_in(build_model("kimi-linear", tp=8, rank=5))

    kinds = collections.Counter(type(spec).__name__ for _, spec in specs)
    assert kinds == {"ResidualSpec": 27, "GatedDeltaNetSpec": 20, "MLASpec": 7}
    assert [spec.layer_index for _, spec in specs if isinstance(spec, MLASpec)] == [3, 7, 11, 15, 19, 23, 26]


def test_more_ranks_than_kv_heads_is_refused_by_name_in_vllms_gpt_oss() -> None:
    """Its local count is a plain floor division: 8 KV heads over 16 ranks are 0, which no kernel can run."""
    layer = build_layer("gpt-oss-20b/sliding", tp=8, rank=5)
    layer.num_local_key_value_heads = 8 // 16

    with pytest.raises(SpecError, match="num_local_kv_heads: expected at least 1, got 0"):
        registry.spec_for(layer)


def test_a_layer_that_contradicts_the_caller_is_an_error() -> None:
    layer = build_layer("deepseek-v3/mla", tp=8, rank=5)

    with pytest.raises(ParallelConflictError, match="says 8, the parallel argument says 4"):
        registry.spec_for(layer, parallel=Parallel(size=4, rank=0))
