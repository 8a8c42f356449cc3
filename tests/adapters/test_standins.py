"""SGLang's and ATOM's layers, as stand-ins: every class of theirs, at every tensor-parallel size, as declared."""

from __future__ import annotations

from typing import Any

import pytest
import standins_atom
import standins_sglang
from standins import Rank, decoder_indices

from layerfuse import registry
from layerfuse.adapters import (
    FinalNormSpec,
    GatedDeltaNetKernelSpec,
    GQAKernelSpec,
    GQASpec,
    InnerLayerError,
    KernelSpec,
    MLAKernelSpec,
    Parallel,
    ResidualSpec,
    SpecError,
)

ENGINES = {"sglang": standins_sglang.MODELS, "atom": standins_atom.MODELS}
CASES = [
    pytest.param(engine, name, size, rank, id=f"{engine}-{name}-tp{size}-rank{rank}")
    for engine, models in ENGINES.items()
    for name in models
    for size, rank in ((1, 0), (2, 1), (8, 5), (4, 3))
    if all(kind.family != "mla" or kind.num_heads % size == 0 for kind in registry.model(name).layers.values())
]


def declared(name: str, engine: str, size: int, rank: int) -> list[Any]:
    """The specs of the decoder layers that a stand-in has."""
    entry = registry.model(name)
    places = {str(index) for index in decoder_indices(entry)}
    return [
        spec for path, spec in entry.specs(size, rank, engine=engine) if path == "final" or path.split(".")[1] in places
    ]


@pytest.mark.parametrize(("engine", "name", "size", "rank"), CASES)
def test_every_layer_reads_as_declared(engine: str, name: str, size: int, rank: int) -> None:
    model = ENGINES[engine][name](registry.model(name), Rank(size, rank))
    read = registry.specs_in(model)
    assert [spec for _, spec in read] == declared(name, engine, size, rank)
    assert registry.unknown_in(model) == []
    assert all("vision_tower" not in path for path, _ in read)
    # Size and rank too are read, without being told; whoever says them as well must agree.
    assert registry.specs_in(model, parallel=Parallel(size=size, rank=rank)) == read
    check_kernels(name, model)


def check_kernels(name: str, model: Any) -> None:
    """Each kernel layer says what it is handed, and sends on for the rest."""
    kernels = registry.specs_in(model, of=KernelSpec)
    outer = {
        path: spec for path, spec in registry.specs_in(model) if not isinstance(spec, (ResidualSpec, FinalNormSpec))
    }
    assert kernels or "kda" in str(registry.model(name).layers)
    for path, kernel in kernels:
        around = next(spec for at, spec in outer.items() if path.startswith(f"{at}."))
        assert kernel.layer_index == around.layer_index
        if isinstance(kernel, GatedDeltaNetKernelSpec):
            assert kernel.num_local_v_heads == around.num_local_v_heads
        else:
            assert kernel.num_local_heads == around.num_local_heads
            assert kernel.softmax_scale == around.softmax_scale
        if isinstance(kernel, GQAKernelSpec) and isinstance(around, GQASpec):
            assert (kernel.num_local_kv_heads, kernel.sliding_window) == (
                around.num_local_kv_heads,
                around.sliding_window,
            )
        with pytest.raises(InnerLayerError, match="which does not know its hidden_size; ask "):
            _ = kernel.hidden_size


def test_sglangs_absorbed_and_expanded_kernels_are_both_described() -> None:
    model = standins_sglang.MODELS["deepseek-v3"](registry.model("deepseek-v3"), Rank(8, 0))
    layer = model.get_submodule("model.layers.0.self_attn")
    absorbed, expanded = registry.spec_for(layer.attn_mqa), registry.spec_for(layer.attn_mha)
    assert (absorbed.head_dim, absorbed.v_head_dim, absorbed.num_local_kv_heads) == (576, 512, 1)
    assert (expanded.head_dim, expanded.v_head_dim, expanded.num_local_kv_heads) == (192, 128, 16)


def test_atoms_mla_kernel_is_the_impl_of_an_ordinary_attention() -> None:
    model = standins_atom.MODELS["deepseek-v3"](registry.model("deepseek-v3"), Rank(8, 3))
    outside = registry.spec_for(model.get_submodule("model.layers.0.self_attn.mla_attn"))
    inside = registry.spec_for(model.get_submodule("model.layers.0.self_attn.mla_attn.impl"))
    assert isinstance(outside, GQAKernelSpec) and isinstance(inside, MLAKernelSpec)
    # In its absorbed form: one KV head, the latent for a value, and no window at all.
    assert (outside.num_local_kv_heads, outside.head_dim, outside.v_head_dim) == (1, 576, 512)
    assert outside.sliding_window is None
    assert (inside.num_local_heads, inside.latent_width, inside.v_head_dim) == (16, 576, 128)


def test_atoms_gpt_oss_refuses_more_ranks_than_kv_heads_by_name() -> None:
    model = standins_atom.MODELS["gpt-oss-20b"](registry.model("gpt-oss-20b"), Rank(16, 0))
    with pytest.raises(SpecError, match="num_local_kv_heads: expected at least 1, got 0"):
        registry.specs_in(model)


def test_sglangs_gpt_oss_replicates_kv_heads() -> None:
    model = standins_sglang.MODELS["gpt-oss-20b"](registry.model("gpt-oss-20b"), Rank(16, 0))
    spec = registry.spec_for(model.get_submodule("model.layers.0.self_attn"))
    assert (spec.num_local_kv_heads, spec.num_kv_head_replicas, spec.sliding_window) == (1, 2, 128)


def test_a_decoder_layer_that_is_attention_itself_is_both() -> None:
    model = standins_sglang.MODELS["qwen3-next-80b-a3b"](registry.model("qwen3-next-80b-a3b"), Rank(2, 1))
    layer = model.get_submodule("model.layers.3")
    assert isinstance(registry.spec_for(layer), GQASpec)
    stream = registry.spec_for(layer, ResidualSpec)
    assert (stream.input_norm.weight_offset, stream.hidden_size) == (1.0, 2048)
    assert [type(spec).__name__ for path, spec in registry.specs_in(model) if path == "model.layers.3"] == [
        "ResidualSpec",
        "GQASpec",
    ]


def test_a_next_token_layer_of_sglang_is_read_like_any_other() -> None:
    entry = registry.model("longcat-flash")
    kind = entry.layers["mla"]
    layer = standins_sglang._deepseek(
        entry, kind, 28, Rank(4, 0), "", "longcat_flash_nextn:LongcatFlashDenseDecoderLayer"
    )
    assert registry.spec_for(layer).layer_index == 28
    assert registry.spec_for(layer.self_attn).num_local_heads == 16
