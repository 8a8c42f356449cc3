"""ATOM's layers, as stand-ins: every class of theirs, at every tensor-parallel size, as declared."""

from __future__ import annotations

from typing import Any

import pytest
import standins_atom
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

CASES = [
    pytest.param(name, size, rank, id=f"{name}-tp{size}-rank{rank}")
    for name in standins_atom.MODELS
    for size, rank in ((1, 0), (2, 1), (8, 5), (4, 3))
    if all(kind.family != "mla" or kind.num_heads % size == 0 for kind in registry.model(name).layers.values())
]


def declared(name: str, size: int, rank: int) -> list[Any]:
    """The specs of the decoder layers that a stand-in has."""
    entry = registry.model(name)
    places = {str(index) for index in decoder_indices(entry)}
    return [
        spec for path, spec in entry.specs(size, rank, engine="atom") if path == "final" or path.split(".")[1] in places
    ]


@pytest.mark.parametrize(("name", "size", "rank"), CASES)
def test_every_layer_reads_as_declared(name: str, size: int, rank: int) -> None:
    model = standins_atom.MODELS[name](registry.model(name), Rank(size, rank))
    read = registry.specs_in(model)
    assert [spec for _, spec in read] == declared(name, size, rank)
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
