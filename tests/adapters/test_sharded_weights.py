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
    GatedMLPSpec,
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


@pytest.mark.parametrize("name", ["dp", "fsdp", "dp_shard", "data"])
def test_a_mesh_for_data_shares_no_heads(name: str) -> None:
    layer = fresh_layer("deepseek-v3")
    with ranks((8,), (name,), rank=5) as mesh:
        cut(layer.kv_b_proj, mesh, 0)
        assert registry.spec_for(layer).parallel == WHOLE
        with pytest.raises(ParallelConflictError):
            registry.spec_for(layer, parallel=Parallel(size=8, rank=5))


@pytest.mark.parametrize("names", [None, ("model",)], ids=["unnamed", "model"])
def test_a_mesh_that_may_share_heads_or_not_is_refused(names: tuple[str] | None) -> None:
    layer = fresh_layer("deepseek-v3")
    with ranks((8,), names) as mesh:
        cut(layer.kv_b_proj, mesh, 0)
        cut(layer.o_proj, mesh, 1)
        with pytest.raises(ParallelUnknownError) as caught:
            registry.spec_for(layer)
        found = "without dimension names" if names is None else "with the dimensions ('model',)"
        assert caught.value.tried[0] == (
            f"the weight of kv_b_proj: its weight is cut along a mesh {found}: call the tensor-parallel one 'tp'"
        )
        assert "to spec_for, specs_in or fusion.compile, or read it inside" in str(caught.value)
        assert registry.spec_for(layer, parallel=Parallel(size=8, rank=0)).num_local_heads == 16


MODELS = ["deepseek-v3", "kimi-linear-48b-a3b", "gpt-oss-20b", "qwen3-next-80b-a3b"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("shape", "names"), [((4,), None), ((4,), ("dp",)), ((4,), ("workers",)), ((2, 2), ("dp_replicate", "dp_shard"))]
)
def test_fully_sharded_models_are_read_whole(name: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = fresh_model(name)
    whole = registry.specs_in(model)
    layers = model.get_submodule("model.layers")
    with ranks(shape, names, rank=3) as mesh:
        for layer in layers[:4]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # FSDP puts a class of its own in front of the layer's: it is still found by its bases.
        assert type(layers[0]).__name__.startswith("FSDP")
        assert registry.specs_in(model) == whole
        # An attention layer alone has no such class, and its projections are marked all the same.
        attention = next(path for path, spec in whole if isinstance(spec, (MLASpec, GQASpec)))
        assert registry.spec_for(model.get_submodule(attention)).parallel == WHOLE


def test_fsdp_over_tensor_parallelism_leaves_its_degree() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fresh_model("deepseek-v2-lite")
    with ranks((2, 2), ("dp", "tp"), rank=3) as mesh:
        with_plan(model, mesh["tp"])
        sharded = registry.specs_in(model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        assert model.model.layers[3].self_attn.o_proj.weight.device_mesh.mesh_dim_names == ("dp", "tp")
        assert registry.specs_in(model) == sharded
    assert {spec.parallel for _, spec in sharded} == {Parallel(size=2, rank=1)}
    assert {type(spec) for _, spec in sharded} == {MLASpec, GatedMLPSpec, ResidualSpec, FinalNormSpec}


# ---- packed weights


def test_where_one_weight_is_packed_another_tells() -> None:
    layer = fresh_layer("deepseek-v3")
    layer.kv_b_proj.weight = packed(layer.kv_b_proj.weight)
    assert registry.spec_for(layer).parallel == WHOLE
    with ranks((4,), ("tp",), rank=2) as mesh:
        cut(layer.o_proj, mesh, 1)
        assert registry.spec_for(layer).parallel == Parallel(size=4, rank=2)


def test_where_all_are_packed_the_caller_must_say() -> None:
    """Two 4-bit weights in a byte halve the input features: that is no tensor parallelism of degree 2."""
    layer = fresh_layer("deepseek-v3")
    layer.kv_b_proj.weight, layer.o_proj.weight = packed(layer.kv_b_proj.weight), packed(layer.o_proj.weight)
    with pytest.raises(ParallelUnknownError) as caught:
        registry.spec_for(layer)
    assert "the weight of o_proj: a packed weight of torch.uint8 and shape (7168, 8192) tells nothing of" in str(
        caught.value
    )
    assert "Pass parallel=Parallel(size=..., rank=...) to spec_for, specs_in or fusion.compile" in str(caught.value)
    assert registry.spec_for(layer, parallel=Parallel(size=2, rank=0)).num_local_heads == 64


def packed(weight: Any) -> Any:
    shape = (weight.shape[0], weight.shape[1] // 2)
    return torch.nn.Parameter(torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False)


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
    "deepseek-v3": {MLASpec: WHOLE, GatedMLPSpec: SHARDED},
    "kimi-linear-48b-a3b": {MLASpec: WHOLE, GatedDeltaNetSpec: WHOLE, GatedMLPSpec: SHARDED},
    "gpt-oss-20b": {GQASpec: WHOLE},
    "deepseek-v2-lite": {MLASpec: SHARDED, GatedMLPSpec: SHARDED},
    "deepseek-v3.2": {MLASpec: SHARDED, GatedMLPSpec: SHARDED},
    "glm-4.7-flash": {MLASpec: SHARDED, GatedMLPSpec: SHARDED},
    "longcat-flash": {MLASpec: SHARDED, GatedMLPSpec: SHARDED},
    # The delta net's projections are cut by columns and gathered again: every rank runs all heads.
    "qwen3-next-80b-a3b": {GQASpec: SHARDED, GatedDeltaNetSpec: WHOLE, GatedMLPSpec: SHARDED},
    "qwen3.5-27b": {GQASpec: SHARDED, GatedDeltaNetSpec: WHOLE, GatedMLPSpec: SHARDED},
}
LEFT_WHOLE = {"glm-4.7-flash": "shared_experts"}
"""What a plan shards elsewhere but forgets here: every rank runs Glm4MoeLite's shared experts whole."""


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
            parallel = WHOLE if path.endswith(LEFT_WHOLE.get(name, "-")) else expected[type(spec)]
            assert spec == whole[path].shard(parallel.size, parallel.rank), path
    assert {type(spec) for spec in sharded.values()} == {*expected, ResidualSpec, FinalNormSpec}


def test_one_model_may_hold_layers_of_different_degrees() -> None:
    model = fresh_model("qwen3-next-80b-a3b")
    with ranks((2,), ("tp",), rank=1) as mesh:
        with_plan(model, mesh)
        streams = {spec.parallel for _, spec in registry.specs_in(model) if isinstance(spec, ResidualSpec)}
    # A stream's degree is that of its attention block: an all-reduce follows one kind and not the other.
    assert streams == {WHOLE, SHARDED}
