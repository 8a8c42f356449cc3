"""Gated MLPs: widths that engines double and divide, whose sharding is the linear's own, and what is none."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import standins_atom
import torch
import vllm_standins as vllm
from helpers import fresh_model, real_model
from specs_at_hand import gated_mlp
from standins import Rank, module
from torch import nn

from layerfuse import registry
from layerfuse.adapters import (
    WHOLE,
    ActivationQuant,
    Facts,
    GatedMLPSpec,
    MissingAttributeError,
    Parallel,
    ParallelConflictError,
    ParallelUnknownError,
    SpecError,
    const,
)
from layerfuse.adapters.conversions import mlp_activation
from layerfuse.adapters.reader import LayerReader

PATH = "model.layers.3.mlp"


def mlps(model: Any) -> dict[str, GatedMLPSpec]:
    return dict(registry.specs_in(model, of=GatedMLPSpec))


# ---- the spec


def test_the_share_of_a_rank_follows_from_the_total() -> None:
    spec = gated_mlp().shard(8, rank=5)
    assert (spec.intermediate_size, spec.local_intermediate_size) == (18432, 2304)
    with pytest.raises(
        SpecError, match=r"^GatedMLPSpec at tensor-parallel size 5: 18432 columns cannot be shared equally"
    ):
        gated_mlp().shard(5)


def test_a_clamp_and_an_index_may_be_none() -> None:
    assert (gated_mlp(swiglu_limit=7).swiglu_limit, gated_mlp(swiglu_limit=None).swiglu_limit) == (7.0, None)
    assert gated_mlp(layer_index=None).shard(2).layer_index is None


def test_the_quantisation_is_no_part_of_what_an_mlp_is() -> None:
    plain, group = gated_mlp(), ActivationQuant(group_size=128)
    fed = gated_mlp(quant=group)
    assert fed == plain and hash(fed) == hash(plain) and repr(fed) == repr(plain)
    assert pickle.loads(pickle.dumps(fed)).quant == fed.shard(8).quant == group


# ---- transformers


def test_dense_layers_and_shared_experts_are_the_same_class_with_different_widths() -> None:
    found = mlps(real_model("deepseek-v2-lite"))
    assert {type(real_model("deepseek-v2-lite").get_submodule(path)).__name__ for path in found} == {"DeepseekV2MLP"}
    dense, shared = found["model.layers.0.mlp"], found["model.layers.1.mlp.shared_experts"]
    assert (dense.intermediate_size, shared.intermediate_size) == (10944, 2 * 1408)
    assert len(found) == 27  # and not one of the routed experts


def test_an_mlp_has_its_index_from_its_name() -> None:
    layer = real_model("deepseek-v3").get_submodule(PATH)
    assert registry.spec_for(layer.shared_experts).layer_index is None
    assert registry.spec_for(layer.shared_experts, path=f"{PATH}.shared_experts").layer_index == 3
    decoder = real_model("deepseek-v3").get_submodule("model.layers.3")
    assert [(path, spec.layer_index) for path, spec in mlps(decoder).items()] == [("mlp.shared_experts", None)]


def test_longcat_counts_its_mlps_on() -> None:
    found = mlps(real_model("longcat-flash"))
    assert list(found)[6:8] == ["model.layers.3.mlps.0", "model.layers.3.mlps.1"]
    assert [spec.layer_index for spec in found.values()] == list(range(56))


def test_a_clamp_of_the_layer_itself_is_read() -> None:
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    import torch

    config = modeling.Glm5NextTextConfig(num_hidden_layers=4)
    with torch.device("meta"):
        layer = modeling.Glm5NextTextMLP(config)
    assert registry.spec_for(layer).swiglu_limit == config.swiglu_limit > 0
    layer.swiglu_limit = 0
    with pytest.raises(SpecError, match=r"swiglu_limit: expected more than 0, got 0\.0"):
        registry.spec_for(layer)


def test_what_down_proj_quantises_is_read_now() -> None:
    layer = fresh_model("deepseek-v3").get_submodule(f"{PATH}.shared_experts")
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers import FineGrainedFP8Config

    holder = finegrained.replace_with_fp8_linear(
        nn.ModuleList([layer]), ["gate_proj", "up_proj"], FineGrainedFP8Config(), True
    )
    assert registry.spec_for(holder[0]).quant == ActivationQuant(group_size=128)
    holder[0].down_proj = nn.Linear(2048, 7168, bias=False, device="meta")
    assert registry.spec_for(holder[0]).quant is None


def test_a_layer_without_its_activation_is_refused_by_name() -> None:
    layer = fresh_model("deepseek-v3").get_submodule(f"{PATH}.shared_experts")
    layer.act_fn = nn.Tanh()
    with pytest.raises(SpecError, match=r"activation: expected one of silu, .*, got 'Tanh'"):
        registry.spec_for(layer)
    del layer.act_fn
    with pytest.raises(MissingAttributeError, match="does not say its activation"):
        registry.spec_for(layer)


def test_shared_experts_of_no_columns_are_none() -> None:
    """transformers builds them of a config with none, as an MLP that gives zeros."""
    mixture = fresh_model("deepseek-v3").get_submodule(PATH)
    mixture.shared_experts = empty = type(mixture.shared_experts)(mixture.config, intermediate_size=0).to("meta")
    decoder = nn.ModuleDict(
        {"mixture": mixture, "dense": real_model("deepseek-v3").get_submodule("model.layers.0.mlp")}
    )
    assert list(mlps(decoder)) == ["dense"] and not registry.unknown_in(decoder)
    with pytest.raises(SpecError, match="intermediate_size: expected at least 1, got 0"):
        registry.spec_for(empty)


def test_routed_experts_that_checkpoints_build_of_the_same_class_are_passed_over() -> None:
    """The Python files of DeepSeek's checkpoints hold each of them as one more DeepseekV3MLP."""
    like = fresh_model("deepseek-v3").get_submodule("model.layers.3.mlp.shared_experts")
    like.__class__ = type(
        "DeepseekV3MLP", (type(like),), {"__module__": "transformers_modules.DeepSeek-V3.modeling_deepseek"}
    )
    with torch.device("meta"):
        shared = like.__class__(like.config)
    block = module("some:MoE", experts=nn.ModuleList([like, like]), shared_experts=shared)
    model = module("some:Model", mlp=block)
    assert list(mlps(model)) == ["mlp.shared_experts"]


# ---- the engines


def test_in_vllm_the_merged_width_is_twice_the_gates_and_a_ranks_share() -> None:
    layer = vllm.mlp(tp=8, rank=5)
    assert (layer.gate_up_proj.output_size, layer.gate_up_proj.output_size_per_partition) == (2 * 18432, 2 * 2304)
    spec = registry.spec_for(layer, path=PATH)
    assert (spec.intermediate_size, spec.local_intermediate_size) == (18432, 2304)
    assert (spec.hidden_size, spec.layer_index, spec.parallel) == (7168, 3, Parallel(size=8, rank=5))
    with pytest.raises(ParallelConflictError):
        registry.spec_for(layer, parallel=Parallel(size=4, rank=0))


def test_shared_experts_under_sequence_parallelism_are_whole_whatever_the_rank_around_them() -> None:
    """`disable_tp` leaves the linears with a size of 1, in an engine of 8 ranks."""
    spec = registry.spec_for(vllm.mlp(tp=1, rank=0, width=2048))
    assert (spec.local_intermediate_size, spec.parallel) == (2048, WHOLE)


def test_in_atom_a_linears_own_width_is_this_ranks() -> None:
    entry = registry.model("deepseek-v3")
    layer = standins_atom.mlp(entry, entry.mlps["dense"], Rank(8, 5), "deepseek_v2:DeepseekV2MLP")
    assert layer.down_proj.input_size == 2304
    declared = dict(entry.specs(8, 5))["layers.2.dense"]
    assert registry.spec_for(layer, path="model.layers.2.mlp") == declared
    del layer.down_proj.tp_size
    with pytest.raises(ParallelUnknownError):
        registry.spec_for(layer)


def activation(name: str, **held: Any) -> Any:
    return module(f"vllm.model_executor.layers.activation:{name}", **held)


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("swish", "silu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (activation("GeluAndMul", approximate="tanh"), "gelu_tanh"),
        (activation("SiluAndMul"), "silu"),
        (activation("SituAndMul", beta=4.0), "situ"),
        (activation("SiluAndMulWithClamp", swiglu_limit=7.0, alpha=1.0, beta=0.0), "silu"),
        # gpt-oss's: x * sigmoid(1.702 * x) * (up + 1).
        (activation("SiluAndMulWithClamp", swiglu_limit=7.0, alpha=1.702, beta=1.0), "swiglu_oai"),
        (
            activation("SiluAndMulWithClamp", swiglu_limit=7.0, alpha=1.702, beta=0.0),
            "SiluAndMulWithClamp of 1.702, 0.0",
        ),
        (activation("SwigluOAIAndMul"), "SwigluOAIAndMul"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_an_activation_is_known_by_its_name_or_its_class(said: Any, word: str) -> None:
    assert mlp_activation(said) == word


def test_transformers_activations_are_known_by_what_they_compute() -> None:
    activations = pytest.importorskip("transformers.activations").ACT2FN
    names = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2")
    assert {name: mlp_activation(activations[name]) for name in names} == {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "relu2": "relu2",
    }


def test_vllms_clamp_is_the_activations() -> None:
    layer = vllm.mlp()
    layer.act_fn = activation("SiluAndMulWithClamp", swiglu_limit=10.0, alpha=1.0, beta=0.0)
    assert (registry.spec_for(layer).activation, registry.spec_for(layer).swiglu_limit) == ("silu", 10.0)


def test_the_linear_that_reads_the_product_has_the_path_that_it_was_found_at() -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w2 = nn.Linear(64, 16)

    words = {
        "hidden_size": "w2.out_features",
        "layer_index": const(None),
        "intermediate_size": "w2.in_features",
        "activation": const("silu"),
        "swiglu_limit": const(None),
        "quant": ["down_proj", "w2"],
        "tp_weight": "w2.in_features",
    }
    layer = MLP()
    (found,) = LayerReader("mylib:MLP", "mine", Facts(GatedMLPSpec, words)).read(layer).consumers
    assert (found.path, found.in_features) == ("w2", 64)
    assert layer.get_submodule(found.path) is layer.w2
