"""DTensor weights on device meshes, and transformers' own tensor parallelism, seen from one rank of a fake group."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from fake_ranks import cut, ranks, with_plan  # noqa: E402
from helpers import fresh_layer, fresh_model  # noqa: E402

from layerfuse import registry  # noqa: E402
from layerfuse.adapters import (  # noqa: E402
    WHOLE,
    FinalNormSpec,
    GatedDeltaNetSpec,
    GQASpec,
    MLASpec,
    Parallel,
    ParallelConflictError,
    ParallelUnknownError,
    ResidualSpec,
)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_mesh_called_tp_says_size_and_rank(rank: int) -> None:
    layer = fresh_layer("deepseek-v3")
    with ranks((8,), ("tp",), rank) as mesh:
        cut(layer.kv_b_proj, mesh, 0)
        spec = registry.spec_for(layer)
        assert (spec.num_local_heads, spec.parallel) == (16, Parallel(size=8, rank=rank))
        with pytest.raises(ParallelConflictError):
            registry.spec_for(layer, parallel=Parallel(size=4, rank=0))


def test_a_resharded_weight_is_in_the_next_reading() -> None:
    layer = fresh_layer("deepseek-v3")
    assert registry.spec_for(layer).parallel == WHOLE
    with ranks((4,), ("tp",), 1) as mesh:
        cut(layer.kv_b_proj, mesh, 0)
        assert registry.spec_for(layer).parallel == Parallel(size=4, rank=1)
    with ranks((2,), ("tp",), 1) as mesh:
        layer = fresh_layer("deepseek-v3")
        cut(layer.kv_b_proj, mesh, 0)
        assert registry.spec_for(layer).parallel == Parallel(size=2, rank=1)


@pytest.mark.parametrize(("shape", "names"), [((2, 4), ("dp", "tp")), ((4, 2), ("tp", "dp"))])
def test_only_the_tensor_parallel_dimension_of_a_mesh_counts(shape: tuple[int, int], names: tuple[str, str]) -> None:
    layer = fresh_layer("deepseek-v3")
    with ranks(shape, names, rank=6) as mesh:
        cut(layer.kv_b_proj, mesh, *(0 if name == "tp" else None for name in names))
        # Rank 6 is (1, 2) of (2, 4), and (3, 0) of (4, 2).
        assert registry.spec_for(layer).parallel == Parallel(size=4, rank=2 if names[1] == "tp" else 3)


def test_fsdp_beside_tensor_parallelism_cuts_no_heads() -> None:
    layer = fresh_layer("deepseek-v3")
    with ranks((2, 4), ("fsdp", "tp"), rank=5) as mesh:
        cut(layer.kv_b_proj, mesh, 0, 0)
        assert registry.spec_for(layer).parallel == Parallel(size=4, rank=1)


def test_a_mesh_of_another_kind_is_refused_and_not_taken_for_tensor_parallelism() -> None:
    layer = fresh_layer("deepseek-v3")
    with ranks((8,), ("fsdp",)) as mesh:
        cut(layer.kv_b_proj, mesh, 0)
        with pytest.raises(ParallelUnknownError) as caught:
            registry.spec_for(layer)
        assert caught.value.tried == (
            "the weight of kv_b_proj: its weight lies on a mesh with the dimensions ('fsdp',), none of them tensor-parallel",
        )
        assert registry.spec_for(layer, parallel=WHOLE).num_local_heads == 128


def test_a_mesh_without_names_may_be_fsdps_and_is_refused() -> None:
    layer = fresh_layer("deepseek-v3")
    with ranks((8,), None) as mesh:
        cut(layer.kv_b_proj, mesh, 0)
        with pytest.raises(
            ParallelUnknownError, match="a mesh without dimension names, as FSDP does too; call one 'tp'"
        ):
            registry.spec_for(layer)
        assert registry.spec_for(layer, parallel=Parallel(size=8, rank=0)).num_local_heads == 16


def test_what_fully_shard_does_is_never_read_as_tensor_parallelism() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fresh_model("gpt-oss-20b")
    layer = model.get_submodule("model.layers.0.self_attn")
    with ranks((4,), None) as mesh:
        fully_shard(layer, mesh=mesh)
        # FSDP puts a class of its own in front of the layer's: it is still found by its bases.
        assert type(layer).__name__ != "GptOssAttention"
        with pytest.raises(ParallelUnknownError):
            registry.spec_for(layer)
        assert registry.spec_for(layer, parallel=WHOLE).num_local_heads == 64


def test_a_replicated_weight_is_whole() -> None:
    layer = fresh_layer("deepseek-v3")
    with ranks((8,), ("tp",), 3) as mesh:
        cut(layer.kv_b_proj, mesh, None)
        assert registry.spec_for(layer).parallel == WHOLE


@pytest.mark.parametrize("name", ["o_proj", "kv_b_proj"])
def test_a_weight_cut_across_its_heads_leaves_every_rank_all_of_them(name: str) -> None:
    model, path, across = {
        "kv_b_proj": ("deepseek-v3", "model.layers.3.self_attn", 1),
        "o_proj": ("gpt-oss-20b", "model.layers.0.self_attn", 0),
    }[name]
    layer = fresh_layer(model, path)
    with ranks((4,), ("tp",), 1) as mesh:
        cut(layer.get_submodule(name), mesh, across)
        assert registry.spec_for(layer).parallel == WHOLE


# ---- transformers' own plans

SHARDED = Parallel(size=2, rank=1)
PLANS: dict[str, dict[type[Any], Parallel]] = {
    # DeepSeek-V3's and Kimi-Linear's plans shard the feed-forward only; GPT-OSS has none.
    "deepseek-v3": {MLASpec: WHOLE},
    "kimi-linear-48b-a3b": {MLASpec: WHOLE, GatedDeltaNetSpec: WHOLE},
    "gpt-oss-20b": {GQASpec: WHOLE},
    "deepseek-v2-lite": {MLASpec: SHARDED},
    "deepseek-v3.2": {MLASpec: SHARDED},
    "glm-4.7-flash": {MLASpec: SHARDED},
    "longcat-flash": {MLASpec: SHARDED},
    # The delta net's projections are cut by columns and gathered again: every rank runs all heads.
    "qwen3-next-80b-a3b": {GQASpec: SHARDED, GatedDeltaNetSpec: WHOLE},
    "qwen3.5-27b": {GQASpec: SHARDED, GatedDeltaNetSpec: WHOLE},
}


@pytest.mark.parametrize("name", PLANS)
def test_transformers_own_tensor_parallelism_is_read_layer_by_layer(name: str) -> None:
    model = fresh_model(name)
    whole = dict(registry.specs_in(model))
    with ranks((2,), ("tp",), rank=1) as mesh:
        with_plan(model, mesh)
        sharded = dict(registry.specs_in(model))
        assert list(sharded) == list(whole)
        expected = PLANS[name]
        for path, spec in sharded.items():
            if isinstance(spec, (ResidualSpec, FinalNormSpec)):
                continue
            parallel = expected[type(spec)]
            assert spec == whole[path].shard(parallel.size, parallel.rank), path
    assert {type(spec) for spec in sharded.values()} == {*expected, ResidualSpec, FinalNormSpec}


def test_one_model_may_hold_layers_of_different_degrees() -> None:
    model = fresh_model("qwen3-next-80b-a3b")
    with ranks((2,), ("tp",), rank=1) as mesh:
        with_plan(model, mesh)
        streams = {spec.parallel for _, spec in registry.specs_in(model) if isinstance(spec, ResidualSpec)}
    # A stream's degree is that of its attention block: an all-reduce follows one kind and not the other.
    assert streams == {WHOLE, SHARDED}
