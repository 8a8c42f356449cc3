"""Every declared dimension against the published configs, field by field, and the heads of every rank."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from helpers import ROOT

from layerfuse import registry
from layerfuse.adapters import GatedDeltaNetSpec, GatedMLPSpec, GQASpec, MLASpec, ResidualSpec, SpecError
from layerfuse.adapters.conversions import mlp_activation
from layerfuse.testing.models import published_model

PUBLISHED = json.loads((ROOT / "tests" / "data" / "published_dims.json").read_text())
MODELS: dict[str, Any] = PUBLISHED["models"]
MLA_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GDN_FIELDS = {
    "num_k_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "head_k_dim": "linear_key_head_dim",
    "head_v_dim": "linear_value_head_dim",
    "conv_kernel_size": "linear_conv_kernel_dim",
}


def published(name: str) -> dict[str, Any]:
    return {key: said["value"] for key, said in MODELS[name]["config"].items()}


def test_every_declared_model_has_its_published_dimensions_here() -> None:
    configs = json.loads((ROOT / "tests" / "data" / "published_configs.json").read_text())  # test_entries_anew.py
    assert {*MODELS, *configs} == set(registry.models())
    for name, model in MODELS.items():
        assert all(said["source"] for said in model["config"].values()), name


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_as_published(name: str) -> None:
    entry, config = registry.model(name), published(name)
    assert (entry.hf_id or "").startswith(MODELS[name]["hf_id"])
    assert entry.num_hidden_layers == config.get("num_hidden_layers", config.get("num_layers"))
    assert (entry.hidden_size, entry.rms_norm_eps) == (config["hidden_size"], config["rms_norm_eps"])
    assert (entry.architectures, entry.model_type) == (config["architectures"], config["model_type"])


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_is_as_published(name: str) -> None:
    entry, config = registry.model(name), published(name)
    for kind in entry.layers.values():
        if kind.family == "mla":
            assert {field: getattr(kind, field) for field in MLA_FIELDS} == {
                field: config[field] for field in MLA_FIELDS
            }
            assert kind.num_heads == config["num_attention_heads"]
            assert (None if kind.q_lora_rank == "none" else kind.q_lora_rank) == config["q_lora_rank"]
            scaling = config.get("rope_scaling")
            scaling = None if scaling == {"type": "longrope"} else scaling
            said = None if kind.yarn is None else (kind.yarn.factor, kind.yarn.mscale_all_dim)
            assert said == (None if not scaling else (scaling["factor"], scaling["mscale_all_dim"]))
        elif kind.family == "gqa":
            assert kind.num_heads == config["num_attention_heads"]
            assert (kind.num_kv_heads, kind.head_dim) == (config["num_key_value_heads"], config["head_dim"])
            assert kind.sliding_window in ("off", config.get("sliding_window"))
        elif "linear_attn_config" in config:
            linear = config["linear_attn_config"]
            assert (kind.num_k_heads, kind.num_v_heads) == (linear["num_heads"],) * 2
            assert (kind.head_k_dim, kind.head_v_dim) == (linear["head_dim"],) * 2
            assert kind.conv_kernel_size == linear["short_conv_kernel_size"]
        else:
            assert {ours: getattr(kind, ours) for ours in GDN_FIELDS} == {
                ours: config[theirs] for ours, theirs in GDN_FIELDS.items()
            }


@pytest.mark.parametrize("name", MODELS)
def test_every_gated_mlp_is_as_published(name: str) -> None:
    """Some have routed experts and nothing else; LongCat's configs leave the activation to the code."""
    entry, config = registry.model(name), published(name)
    dense = config.get("ffn_hidden_size", config.get("intermediate_size"))
    shared = config.get("shared_expert_intermediate_size")
    if shared is None and "moe_intermediate_size" in config:
        shared = config["moe_intermediate_size"] * config.get("num_shared_experts", config.get("n_shared_experts", 0))
    expected = {"dense": dense, "shared_experts": shared}
    assert {kind: mlp.intermediate_size for kind, mlp in entry.mlps.items()} == {
        kind: expected[kind] for kind in entry.mlps
    }
    assert {mlp.activation for mlp in entry.mlps.values()} <= {mlp_activation(config["hidden_act"] or "silu")}
    first = config.get("first_k_dense_replace")
    if first is not None:
        rest = entry.num_hidden_layers - first
        assert entry.mlp_at() == ["dense"] * first + ["shared_experts"] * rest
    else:
        assert len(set(entry.mlp_at())) == 1
    assert (entry.mlps == {}) == (entry.model_type in ("gpt_oss", "minimax_m2", "mixtral", "qwen3_moe"))


EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


@pytest.mark.parametrize("name", MODELS)
def test_the_routed_experts_are_as_published(name: str) -> None:
    entry, config = registry.model(name), published(name)
    expected = [next((config[key] for key in keys if key in config), None) for keys in (EXPERTS, PER_TOKEN, WIDTHS)]
    if expected[0] is None:
        assert entry.experts is None
        return
    assert entry.experts is not None
    assert [entry.experts.num_experts, entry.experts.experts_per_token, entry.experts.intermediate_size] == expected
    for tp in (1, 2):
        streams = [spec for _, spec in entry.specs(tp) if isinstance(spec, ResidualSpec)]
        mixtures = [spec.experts for spec in streams if spec.experts is not None]
        assert [spec.experts is not None for spec in streams] == entry.mixture_at()
        assert not any(spec.undeclared for spec in streams)
        assert {mixture.num_experts for mixture in mixtures} == {entry.experts.num_experts}
        # Whether ranks share whole experts or cut each, an engine decides.
        assert {mixture.num_local_experts for mixture in mixtures} == {entry.experts.num_experts if tp == 1 else None}
        shared = {mixture.shared is not None for mixture in mixtures}
        assert shared == {"shared_experts" in entry.mlps}
        assert {mixture.beside_mlp for mixture in mixtures} == {name == "longcat-flash"}


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_real_layers_have_the_declared_experts(name: str) -> None:
    pytest.importorskip("transformers")
    entry = registry.model(name)
    config = {**published(name), "num_hidden_layers": 4, "max_position_embeddings": 4096}
    specs = registry.specs_in(published_model(entry, {k: v for k, v in config.items() if v is not None}))
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


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model["layers"]])
def test_the_layer_pattern_is_the_published_one_counted_from_0(name: str) -> None:
    kinds = registry.model(name).kind_at()
    words = {
        "full_attention_layers_0based": ("mla", "full"),
        "kda_layers_0based": ("kda",),
        "linear_attention_layers_0based": ("gdn",),
        "sliding_layers_0based": ("sliding",),
    }
    for word, layers in MODELS[name]["layers"].items():
        assert [index for index, kind in enumerate(kinds) if kind in words[word]] == layers


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
