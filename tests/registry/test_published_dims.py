"""Every declared dimension against the published configs, field by field, and the heads of every rank."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from helpers import ROOT

from layerfuse import registry
from layerfuse.adapters import GatedDeltaNetSpec, GatedMLPSpec, GQASpec, MLASpec, ResidualSpec, SpecError
from layerfuse.registry.inspect import inspect
from layerfuse.testing.models import published_model

PUBLISHED = json.loads((ROOT / "tests" / "data" / "published_dims.json").read_text())
MODELS: dict[str, Any] = PUBLISHED["models"]


def published(name: str) -> dict[str, Any]:
    """The config, with the kinds of its layers as the lists of this data say them."""
    config = {key: said["value"] for key, said in MODELS[name]["config"].items()}
    layers: dict[str, list[int]] = {
        word.removesuffix("_layers_0based"): at for word, at in MODELS[name]["layers"].items()
    }
    if "linear_attn_config" in config:
        of_kind = {"full_attn_layers": layers["full_attention"], "kda_layers": layers["kda"]}
        config["linear_attn_config"] |= {key: [layer + 1 for layer in at] for key, at in of_kind.items()}
    elif layers:
        kinds = {layer: kind.replace("sliding", "sliding_attention") for kind, at in layers.items() for layer in at}
        config["layer_types"] = [kinds[layer] for layer in sorted(kinds)]
    if name == "mistral-small-4-119b":
        config["rope_scaling"] = {"mscale": 1.0, **config["rope_scaling"]}  # which was not noted of it
    return config


def test_every_declared_model_has_its_published_dimensions_here() -> None:
    configs = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())  # test_entries_anew.py
    assert {*MODELS, *configs} == set(registry.models())
    for name, model in MODELS.items():
        assert all(said["source"] for said in model["config"].values()), name


@pytest.mark.parametrize("name", MODELS)
def test_the_entry_is_what_the_published_config_says(name: str) -> None:
    entry, found = registry.model(name), inspect(published(name), registry=registry.default).entry
    assert (entry.hf_id or "").startswith(MODELS[name]["hf_id"])
    assert [spec for _, spec in found.specs()] == [spec for _, spec in entry.specs()]
    for words in ("architectures", "model_type", "experts", "mlps"):
        assert getattr(found, words) == getattr(entry, words), words
    for tp in (1, 2):
        streams = [spec for _, spec in entry.specs(tp) if isinstance(spec, ResidualSpec)]
        assert [spec.experts is not None for spec in streams] == entry.mixture_at() == found.mixture_at()
        assert not any(spec.undeclared for spec in streams)
        for mixture in (spec.experts for spec in streams if spec.experts is not None):
            # Whether ranks share whole experts or cut each, an engine decides.
            assert mixture.num_local_experts == (mixture.num_experts if tp == 1 else None)
            assert (mixture.shared is not None) == ("shared_experts" in entry.mlps)
            assert mixture.beside_mlp == (name == "longcat-flash")


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_real_layers_have_the_declared_experts(name: str) -> None:
    pytest.importorskip("transformers")
    entry = registry.model(name)
    config = {**published(name), "num_hidden_layers": 4, "max_position_embeddings": 4096}
    specs = registry.specs_in(
        published_model(entry, {k: v for k, v in config.items() if v is not None and k != "layer_types"})
    )
    real = [spec.experts for _, spec in specs if isinstance(spec, ResidualSpec)]
    declared = [spec.experts for _, spec in entry.specs() if isinstance(spec, ResidualSpec)][:4]
    sizes = ("num_experts", "num_local_experts", "experts_per_token", "intermediate_size", "local_intermediate_size")
    for found, said in zip(real, declared, strict=True):
        assert (found is None) == (said is None)
        if found is not None and said is not None:
            assert [getattr(found, size) for size in sizes] == [getattr(said, size) for size in sizes]
            assert found.shared is None or said.shared is not None
            assert said.shared is None or found.shared == attrs.evolve(
                said.shared, layer_index=found.shared.layer_index
            )


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_holds_the_heads_that_were_worked_out_by_hand(name: str) -> None:
    entry = registry.model(name)
    for size, heads in MODELS[name]["heads_per_rank"].items():
        counts = [heads[key] for key in ("q_heads", "kv_heads", "kda_heads", "gdn_key_heads") if key in heads]
        if None in counts:
            with pytest.raises(SpecError, match=f"cannot be shared equally by {size} ranks"):
                entry.specs(int(size))
            continue
        specs = [spec for _, spec in entry.specs(int(size), int(size) - 1)]
        assert {spec.parallel.rank for spec in specs} == {int(size) - 1}
        for spec in specs:
            if isinstance(spec, MLASpec):
                assert spec.num_local_heads == heads["q_heads"]
            elif isinstance(spec, GQASpec):
                assert (spec.num_local_heads, spec.num_local_kv_heads) == (heads["q_heads"], heads["kv_heads"])
            elif isinstance(spec, GatedDeltaNetSpec) and "kda_heads" in heads:
                assert (spec.num_local_k_heads, spec.num_local_v_heads) == (heads["kda_heads"],) * 2
            elif isinstance(spec, GatedDeltaNetSpec):
                assert (spec.num_local_k_heads, spec.num_local_v_heads, spec.conv_dim) == (
                    heads["gdn_key_heads"],
                    heads["gdn_value_heads"],
                    heads["gdn_conv_channels"],
                )


@pytest.mark.parametrize("size", range(1, 17))
def test_at_every_size_an_entry_is_sharded_or_refused_with_the_reason(size: int) -> None:
    for name, entry in registry.models().items():
        try:
            specs = entry.specs(size)
        except SpecError as refused:
            assert all(f"{size} ranks" in problem for problem in refused.problems), name
            continue
        assert all(spec.parallel.size == size for _, spec in specs)
        streams = [spec for _, spec in specs if isinstance(spec, ResidualSpec)]
        assert len(streams) == entry.num_hidden_layers


def test_an_engines_own_epsilons_replace_the_published_and_only_those() -> None:
    entry = registry.model("kimi-linear-48b-a3b")
    published_specs, transformers = dict(entry.specs()), dict(entry.specs(engine="transformers"))
    latent = "layers.3.mla"
    assert (published_specs[latent].kv_norm.epsilon, transformers[latent].kv_norm.epsilon) == (1e-5, 1e-6)
    assert {path: spec for path, spec in published_specs.items() if not path.endswith("mla")} == {
        path: spec for path, spec in transformers.items() if not path.endswith("mla")
    }
    assert dict(entry.specs(engine="vllm")) == published_specs


def test_longcat_numbers_its_attentions_on() -> None:
    specs = registry.model("longcat-flash").specs()
    assert [path for path, _ in specs[:3]] == ["layers.0", "layers.0.mla.0", "layers.0.mla.1"]
    assert [path for path, _ in specs[3:6]] == ["layers.0.dense.0", "layers.0.dense.1", "layers.1"]
    for kind in (MLASpec, GatedMLPSpec):
        assert [spec.layer_index for _, spec in specs if isinstance(spec, kind)] == list(range(56))


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_an_engine_that_does_not_replicate_kv_heads_is_refused_where_ranks_outnumber_them(name: str) -> None:
    entry = registry.model(name)
    assert len(entry.specs(8, engine="vllm")) == len(entry.specs())
    with pytest.raises(SpecError) as caught:
        entry.specs(16, engine="vllm")
    assert str(caught.value) == (
        f"{name} at tensor-parallel size 16: vllm shares out the 8 KV heads of this model without replicating them, so that "
        "each of 16 ranks would hold 8 // 16 = 0 of them, and it cannot be built"
    )
    for engine in (None, "transformers", "sglang"):
        attention = entry.specs(16, engine=engine)[1][1]
        assert isinstance(attention, GQASpec) and attention.num_local_kv_heads == 1
