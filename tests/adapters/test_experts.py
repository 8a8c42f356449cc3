"""Mixtures of experts, read from transformers' own classes on the meta device, and from the recorded vocabularies of SGLang and ATOM.

tests/engines reads vLLM's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from helpers import fresh_model, real_model
from standins import module, weight
from torch import nn

from layerfuse import registry
from layerfuse.adapters import ActivationQuant, ExpertsSpec, SpecError, WeightSpec
from layerfuse.fusion import FusionConfig, Target, plan
from layerfuse.fusion.sites import sites_of

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
}
DEEPSEEK: dict[str, Any] = {
    **SMALL,
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
}
MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
QWEN: dict[str, Any] = {**SMALL, "num_experts": 8, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
MIXTRAL: dict[str, Any] = {**SMALL, "num_local_experts": 8, "intermediate_size": 48}
# Published classes, whatever their config calls the numbers: 8 experts of 48 columns, 3 of them per token.
MODELS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "deepseek_v3": ("DeepseekV3", DEEPSEEK | MLA | {"n_shared_experts": 2}, 2 * 48),
    "glm4_moe": ("Glm4Moe", DEEPSEEK | {"n_shared_experts": 1}, 48),
    "dots1": ("Dots1", DEEPSEEK | {"n_shared_experts": 1}, 48),
    "qwen2_moe": ("Qwen2Moe", QWEN | {"shared_expert_intermediate_size": 80}, 80),
    "qwen3_moe": ("Qwen3Moe", QWEN, None),
    "qwen3_next": (
        "Qwen3Next",
        QWEN | {"shared_expert_intermediate_size": 80, "layer_types": ["full_attention"]},
        80,
    ),
    "gpt_oss": ("GptOss", MIXTRAL, None),
    "mixtral": ("Mixtral", MIXTRAL, None),
    "minimax_m2": ("MiniMaxM2", MIXTRAL | {"rotary_dim": 16}, None),
    "granitemoe": ("GraniteMoe", MIXTRAL, None),
    "olmoe": ("Olmoe", SMALL | {"num_experts": 8, "intermediate_size": 48}, None),
}


def decoder_of(name: str) -> Any:
    kind, config, _ = MODELS[name]
    with torch.device("meta"):
        return getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**config)).layers[0]


def experts_in(decoder: Any, **known: Any) -> ExpertsSpec:
    found = registry.spec_for(decoder, path="model.layers.0", **known).experts
    assert found is not None
    return found


@pytest.mark.parametrize("name", MODELS)
def test_transformers_own_mixtures(name: str) -> None:
    found = experts_in(decoder_of(name))
    assert (found.num_experts, found.num_local_experts, found.experts_per_token) == (8, 8, 3)
    assert (found.intermediate_size, found.local_intermediate_size) == (48, 48)
    plain = WeightSpec(dtype="float32", scheme="plain", block=None)
    assert (found.weight, found.activation) == (plain, None)
    assert found.router is not None and (found.router.in_features, found.router.out_features) == (64, 8)
    assert (found.router.weight, found.router.style) == (plain, "replicated")
    assert (found.shared.intermediate_size if found.shared else None) == MODELS[name][2]


def test_kimi_linears_dense_layer_has_none_and_its_others_have() -> None:
    model = real_model("kimi-linear-48b-a3b")
    assert registry.spec_for(model.model.layers[0]).experts is None
    found = experts_in(model.model.layers[1])
    assert found.shared is not None and found.shared.intermediate_size == found.intermediate_size == 1024


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_what_a_rank_holds_is_the_shape_of_its_tensors(name: str) -> None:
    """transformers counts a rank's experts as `num_experts`, and keeps the whole width; gpt-oss lies the other way round."""
    decoder = decoder_of(name)
    experts = decoder.mlp.experts
    experts.num_experts = 2
    whole = experts.down_proj.shape
    experts.down_proj = weight(2, *whole[1:])
    found = experts_in(decoder)
    assert (found.num_experts, found.num_local_experts, found.local_intermediate_size) == (8, 2, 48)
    experts.down_proj = weight(8, *[12 if side == 48 else side for side in whole[1:]])
    found = experts_in(decoder)
    assert (found.num_local_experts, found.intermediate_size, found.local_intermediate_size) == (8, 48, 12)


def test_experts_of_distributed_tensors() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    from layerfuse.testing.meshes import rank_of_two

    for dim, expected in ((0, (4, 48)), (2, (8, 24))):
        decoder = decoder_of("deepseek_v3")
        with rank_of_two(1) as mesh:
            held = distribute_tensor(torch.empty(8, 64, 48, device="meta"), mesh, [Shard(dim)])
            decoder.mlp.experts.down_proj = nn.Parameter(held, requires_grad=False)
            found = experts_in(decoder)
        assert (found.num_local_experts, found.local_intermediate_size) == expected
        assert (found.num_experts, found.intermediate_size) == (8, 48)


def test_quantised_experts_quantise_inside_their_kernel() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    decoder = decoder_of("deepseek_v3")
    config = SimpleNamespace(
        hidden_size=64, num_local_experts=8, moe_intermediate_size=48, hidden_act="silu", num_experts=8
    )
    with torch.device("meta"):
        decoder.mlp.experts = finegrained.FP8Experts(config, block_size=(16, 16))
    found = experts_in(decoder)
    assert found.weight == WeightSpec(dtype="float8_e4m3fn", scheme="block", block=(16, 16))
    assert found.activation == "FP8Experts quantises activations inside its matrix product"
    assert (found.num_local_experts, found.local_intermediate_size) == (8, 48)


def test_experts_of_four_bits_are_packed_two_to_a_byte() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    decoder = decoder_of("gpt_oss")
    with torch.device("meta"):
        decoder.mlp.experts = mxfp4.Mxfp4GptOssExperts(transformers.GptOssConfig(**MIXTRAL))
    found = experts_in(decoder)
    assert found.weight == WeightSpec(dtype="float4_e2m1fn", scheme="mx", block=(1, 32))
    assert (found.activation, found.local_intermediate_size) == (None, 48)


# ---- SGLang and ATOM, by the names that their sources use

_SGLANG, _ATOM = "sglang.srt", "atom"


def sglang_experts(rank: int = 5, **held: Any) -> Any:
    """`FusedMoE` of DeepSeek-V3 on eight ranks, two groups of experts of four cuts each, 32 copies of experts."""
    method = module(f"{_SGLANG}.layers.quantization.unquant:UnquantizedFusedMoEMethod")
    said = {"_num_global_routed": 288, "_num_local_routed": 144, "num_local_experts": 144, "num_experts": 288}
    sizes = {"top_k": 8, "num_fused_shared_experts": 0, "intermediate_size_per_partition": 512, "moe_tp_size": 4}
    flags = {"use_flashinfer_trtllm_moe": False, "quant_method": method, "w13_weight": weight(144, 1024, 7168)}
    return module(f"{_SGLANG}.layers.moe.fused_moe_triton.layer:FusedMoE", **{**said, **sizes, **flags, **held})


def mixture_of(experts: Any, **children: Any) -> Any:
    gate = module(f"{_SGLANG}.models.deepseek_v2:MoEGate", weight=weight(256, 7168))
    return module("engine.models:MoE", experts=experts, **{"gate": gate, **children})


def read(mixture: Any) -> ExpertsSpec:
    from layerfuse.adapters.experts import experts_of

    found = experts_of("mlp", mixture, lambda *_: pytest.fail("it has no shared experts"))
    assert found is not None
    return found


def test_sglangs_experts_count_neither_copies_nor_shared_ones() -> None:
    found = read(mixture_of(sglang_experts()))
    assert (found.num_experts, found.num_local_experts, found.experts_per_token) == (256, 144, 8)
    assert (found.intermediate_size, found.local_intermediate_size) == (2048, 512)
    assert found.weight == WeightSpec(dtype="float32", scheme="plain", block=None) and found.activation is None
    # Shared experts that are run as routed ones: one more expert for every token, on every rank.
    found = read(mixture_of(sglang_experts(top_k=9, num_fused_shared_experts=1, num_local_experts=145)))
    assert (found.num_experts, found.num_local_experts, found.experts_per_token) == (256, 144, 8)
    # This kernel takes widths that are multiples of 128, and what it was rounded up from is not kept.
    assert read(mixture_of(sglang_experts(use_flashinfer_trtllm_moe=True))).intermediate_size is None


def test_sglangs_quantised_experts() -> None:
    method = module(
        f"{_SGLANG}.layers.quantization.fp8:Fp8MoEMethod",
        weight_block_size=[128, 128],
        use_mxfp8=False,
        block_quant=True,
    )
    held = nn.Parameter(torch.empty(144, 1024, 7168, dtype=torch.float8_e4m3fn, device="meta"), requires_grad=False)
    found = read(mixture_of(sglang_experts(quant_method=method, w13_weight=held)))
    assert found.weight == WeightSpec(dtype="float8_e4m3fn", scheme="block", block=(128, 128))
    assert found.activation == "FusedMoE quantises activations inside its matrix product"


@pytest.mark.parametrize(
    ("fused", "routed", "local"), [(0, False, 32), (1, False, 32), (1, True, None)], ids=["none", "fused", "routed"]
)
def test_atoms_experts_may_hold_shared_ones_among_them(fused: int, routed: bool, local: int | None) -> None:
    method = module(
        f"{_ATOM}.model_ops.moe:Fp8MoEMethod",
        quant_type=SimpleNamespace(name="per_Token"),
        quant_dtype=torch.float8_e4m3fnuz,
    )
    experts = module(
        f"{_ATOM}.model_ops.moe:FusedMoE",
        expert_layout=SimpleNamespace(num_routed=256, num_fused_shared_experts=fused, shared_is_routed=routed),
        moe_parallel_config=SimpleNamespace(tp_size=1, ep_size=8),
        local_num_experts=32 + fused,
        intermediate_size_per_partition=2048,
        top_k=8,
        quant_method=method,
    )
    found = read(mixture_of(experts))
    assert (found.num_experts, found.num_local_experts, found.experts_per_token) == (256, local, 8)
    assert (found.intermediate_size, found.local_intermediate_size) == (2048, 2048)
    assert found.weight == WeightSpec(dtype="float8_e4m3fnuz", scheme="channel", block=None)


def test_what_a_mixture_does_not_say_is_none_and_the_layer_is_read_all_the_same() -> None:
    decoder = decoder_of("deepseek_v3")
    del decoder.mlp.gate.weight
    found = experts_in(decoder)
    assert (found.router, found.num_experts, found.local_intermediate_size) == (None, None, None)
    assert found.weight is not None and found.shared is not None
    decoder = decoder_of("deepseek_v3")
    del decoder.mlp.shared_experts.intermediate_size
    assert (experts_in(decoder).shared, experts_in(decoder).num_experts) == (None, 8)
    decoder.mlp.gate.top_k = 9  # more than there are
    assert (experts_in(decoder).num_experts, experts_in(decoder).experts_per_token) == (None, None)
    decoder.mlp.experts = nn.ModuleList()  # nobody's
    assert registry.spec_for(decoder).experts is None


def test_a_mixture_that_is_exchanged_shows_in_the_next_reading() -> None:
    """Layers whose specs are equal all the same: what reads a norm is no part of what the layer is."""
    decoder = decoder_of("deepseek_v3")
    before = registry.spec_for(decoder)
    decoder.mlp.gate.top_k = 2
    after = registry.spec_for(decoder)
    assert before == after and (before.experts.experts_per_token, after.experts.experts_per_token) == (3, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"experts_per_token": 9}, "experts_per_token: expected at most num_experts 8, got 9"),
        ({"local_intermediate_size": 36}, "local_intermediate_size: 36 is no even share of intermediate_size 48"),
        ({"num_experts": 16}, "num_experts: expected at most the 8 that the router scores, got 16"),
        ({"num_experts": 0}, "num_experts: expected at least 1, got 0"),
        ({"shared": 2}, "shared: expected GatedMLPSpec, got 2"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    found = experts_in(decoder_of("deepseek_v3"))
    with pytest.raises(SpecError, match=says):
        attrs.evolve(found, **changes)


def test_a_token_may_take_every_expert() -> None:
    found = experts_in(decoder_of("deepseek_v3"))
    assert attrs.evolve(found, experts_per_token=found.num_experts).experts_per_token == 8


# ---- sites and plans


def test_the_site_before_a_mixture_knows_all_that_read_it_and_how_many_quantise() -> None:
    model = fresh_model("deepseek-v3")
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = transformers.FineGrainedFP8Config(weight_block_size=(128, 128))
    finegrained.replace_with_fp8_linear(model, ["lm_head"], config, True)
    decoder = model.model.layers[3]
    _, behind = sites_of("model.layers.3", registry.spec_for(decoder))
    assert [reader.path for reader in behind.consumers] == [
        "mlp.gate",
        "mlp",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ]
    assert behind.quantising == "3 of 4 quantise it" and behind.quant == ActivationQuant(group_size=128)
    made = plan([("model.layers.3", registry.spec_for(decoder))], Target.named("gfx950"), FusionConfig(level=2))
    (decision,) = [each for each in made.at(behind.name) if each.fusion == "add_rms_norm_group_quant"]
    assert decision.reason.endswith("in e4m3fn with one scale per 128 columns (3 of 4 quantise it)")
    entry = sites_of("model.layers.0", registry.spec_for(model.model.layers[0]))[1]
    assert entry.experts is None and entry.quantising is None


def test_the_mixture_is_known_to_a_plan_of_layers_as_to_one_of_an_entry() -> None:
    """The same sites stand in front of experts and inside of shared ones, whether they were read or declared."""
    config = FusionConfig(quant=ActivationQuant(group_size=128), level=2)
    read_off = plan(registry.specs_in(real_model("deepseek-v3")), Target.named("sm90"), config, "vllm")
    declared = plan(registry.model("deepseek-v3").specs(), Target.named("sm90"), config, "vllm")
    for made in (read_off, declared):
        behind = {site.role for site in made.sites if site.experts is not None and site.spec.layer_index == 3}
        assert behind == {"post_attention", "activation"}
        said = {
            decision.reason
            for decision in made.decisions
            if made.site[decision.site].experts is not None
            and decision.fusion in ("add_rms_norm_group_quant", "silu_mul_group_quant")
        }
        assert said == {"not known: how vllm runs a mixture's experts, and what it gives them"}


def test_a_declared_mixture_is_sharded_with_its_layer() -> None:
    spec = dict(registry.model("deepseek-v3").specs(8, 5))["layers.9"]
    assert spec.experts is not None and spec.experts.shared is not None
    assert spec.experts.shared.local_intermediate_size == 256
    read_off = registry.spec_for(decoder_of("deepseek_v3")).shard(2, 1).experts
    assert (read_off.num_experts, read_off.num_local_experts, read_off.shared.local_intermediate_size) == (8, None, 48)
