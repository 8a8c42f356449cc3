"""Every layer class that was found in the four engines for these architectures is known, by its full name alone.

The list is that of the sources: transformers 5.23, vLLM 0.33, SGLang 0.5.23, ROCm/ATOM at ffdf3bb5. A class that is found
through a base is listed with it.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from standins import layer_class

from layerfuse import registry
from layerfuse.adapters import GatedDeltaNetSpec, GQASpec, MLAKernelSpec, MLASpec, ResidualSpec
from layerfuse.adapters.specs import FAMILY_OF

_HF = "transformers.models"
_V = "vllm.model_executor"
_SG = "sglang.srt.models"
_A = "atom.models"
_DSV2 = f"{_V}.models.deepseek_v2:DeepseekV2MLAAttention"
_V32 = "vllm.models.deepseek_v32.attention:DeepseekV32Attention"
_KERNEL = f"{_V}.layers.attention.mla_attention:MLAAttention"
_SG_MLA = f"{_SG}.deepseek_v2:DeepseekV2AttentionMLA"

MLA_MODELS = (("minicpm3", "MiniCPM3"), ("youtu", "Youtu"), ("mistral4", "Mistral4"))
GQA_MODELS = (("llama", "Llama"), ("qwen3", "Qwen3"), ("gemma3", "Gemma3"))
"""Of transformers alone, whose classes are named alike."""
OLMO = (("olmo_hybrid", "OlmoHybrid"),)


def of_models(models: tuple[tuple[str, str], ...], part: str) -> tuple[str, ...]:
    return tuple(f"{_HF}.{module}.modeling_{module}:{name}{part}" for module, name in models)


MLA = (
    *of_models(MLA_MODELS, "Attention"),
    f"{_HF}.deepseek_v2.modeling_deepseek_v2:DeepseekV2Attention",
    f"{_HF}.deepseek_v3.modeling_deepseek_v3:DeepseekV3Attention",
    f"{_HF}.deepseek_v32.modeling_deepseek_v32:DeepseekV32Attention",
    f"{_HF}.glm_moe_dsa.modeling_glm_moe_dsa:GlmMoeDsaAttention",
    f"{_HF}.glm4_moe_lite.modeling_glm4_moe_lite:Glm4MoeLiteAttention",
    f"{_HF}.kimi_linear.modeling_kimi_linear:KimiLinearAttention",
    f"{_HF}.longcat_flash.modeling_longcat_flash:LongcatFlashMLA",
    f"{_HF}.glm5_next.modeling_glm5_next:Glm5NextTextAttention",
    "transformers_modules.deepseek-ai.DeepSeek-V3.1d044fd8.modeling_deepseek:DeepseekV3Attention",
    "transformers_modules.Kimi-K2-Instruct.modeling_deepseek:DeepseekV3Attention",
    "transformers_modules.DeepSeek-V2-Lite.modeling_deepseek:DeepseekV2Attention",
    "transformers_modules.Kimi-Linear-48B-A3B-Instruct.modeling_kimi:KimiMLAAttention",
    _DSV2,
    f"{_V}.models.deepseek_v2:DeepseekV2Attention",
    (_V32, _KERNEL),
    ("vllm.models.deepseek_v32.amd.rocm:DeepseekV32MLAAttention", _V32, _KERNEL),
    "vllm.models.kimi_k3.nvidia.mla:MultiHeadLatentAttention",
    "vllm.models.kimi_k3.amd.linear:KimiMLAAttention",
    (f"{_V}.models.glm4_moe_lite:Glm4MoeLiteMLAAttention", _DSV2),
    (f"{_V}.models.glm4_moe_lite:Glm4MoeLiteAttention", f"{_V}.models.deepseek_v2:DeepseekV2Attention"),
    "vllm.models.glm5next.common.attention:Glm5NextMLAAttention",
    f"{_V}.layers.mla:MultiHeadLatentAttentionWrapper",
    (
        "vllm.models.kimi_k3.amd.mla:KimiK3MultiHeadLatentAttentionWrapper",
        f"{_V}.layers.mla:MultiHeadLatentAttentionWrapper",
    ),
    _SG_MLA,
    (f"{_SG}.kimi_k3:KimiK3MLAAttention", _SG_MLA),
    f"{_A}.deepseek_v2:DeepseekV2MLAAttention",
    f"{_A}.kimi_k3:KimiFullAttention",
)
DELTA = (
    *of_models(OLMO, "GatedDeltaNet"),
    f"{_HF}.kimi_linear.modeling_kimi_linear:KimiLinearDeltaAttention",
    f"{_HF}.glm5_next.modeling_glm5_next:Glm5NextTextLinearAttention",
    f"{_HF}.qwen3_next.modeling_qwen3_next:Qwen3NextGatedDeltaNet",
    f"{_HF}.qwen3_5.modeling_qwen3_5:Qwen3_5GatedDeltaNet",
    f"{_HF}.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeGatedDeltaNet",
    "transformers_modules.Kimi-Linear-48B-A3B-Instruct.modeling_kimi:KimiDeltaAttention",
    f"{_V}.layers.mamba.gdn.kimi_gdn_linear_attn:KimiGatedDeltaNetAttention",
    "vllm.models.kimi_k3.nvidia.kda:KimiK3DeltaAttention",
    "vllm.models.kimi_k3.amd.kda:KimiK3DeltaAttention",
    f"{_V}.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention",
    "vllm.models.glm5next.common.kda:Glm5NextLinearAttention",
    f"{_SG}.kimi_linear:KimiDeltaAttention",
    f"{_SG}.kimi_k3:KimiK3DeltaAttention",
    f"{_SG}.glm5_next:Glm5NextLinearAttention",
    f"{_SG}.qwen3_next:Qwen3GatedDeltaNet",
    f"{_SG}.qwen3_5:Qwen3_5GatedDeltaNet",
    f"{_A}.kimi_k3:KimiKDAAttention",
    ("atom.plugin.vllm.models.kimi_k3:KimiKDAAttentionVllm", f"{_A}.kimi_k3:KimiKDAAttention"),
    f"{_A}.qwen3_next:Qwen3NextGatedDeltaNet",
    (f"{_A}.qwen3_5:Qwen3_5GatedDeltaNet", f"{_A}.qwen3_next:Qwen3NextGatedDeltaNet"),
)
GQA = (
    *of_models((*GQA_MODELS, *OLMO), "Attention"),
    f"{_HF}.gpt_oss.modeling_gpt_oss:GptOssAttention",
    f"{_HF}.qwen3_next.modeling_qwen3_next:Qwen3NextAttention",
    f"{_HF}.qwen3_5.modeling_qwen3_5:Qwen3_5Attention",
    f"{_HF}.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeAttention",
    f"{_V}.models.gpt_oss:OAIAttention",
    f"{_V}.models.qwen3_next:Qwen3NextAttention",
    f"{_SG}.gpt_oss:GptOssAttention",
    f"{_SG}.qwen3_next:Qwen3HybridAttentionDecoderLayer",
    f"{_SG}.qwen3_5:Qwen3_5AttentionDecoderLayer",
    f"{_A}.gpt_oss:OAIAttention",
    f"{_A}.qwen3_next:Qwen3NextAttention",
)
MLP = (
    *of_models((*MLA_MODELS, *GQA_MODELS, *OLMO), "MLP"),
    f"{_HF}.deepseek_v2.modeling_deepseek_v2:DeepseekV2MLP",
    f"{_HF}.deepseek_v3.modeling_deepseek_v3:DeepseekV3MLP",
    f"{_HF}.deepseek_v32.modeling_deepseek_v32:DeepseekV32MLP",
    f"{_HF}.glm_moe_dsa.modeling_glm_moe_dsa:GlmMoeDsaMLP",
    f"{_HF}.glm4_moe_lite.modeling_glm4_moe_lite:Glm4MoeLiteMLP",
    f"{_HF}.glm5_next.modeling_glm5_next:Glm5NextTextMLP",
    f"{_HF}.kimi_linear.modeling_kimi_linear:KimiLinearMLP",
    f"{_HF}.longcat_flash.modeling_longcat_flash:LongcatFlashMLP",
    f"{_HF}.qwen3_next.modeling_qwen3_next:Qwen3NextMLP",
    f"{_HF}.qwen3_5.modeling_qwen3_5:Qwen3_5MLP",
    f"{_HF}.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeMLP",
    "transformers_modules.DeepSeek-V3.modeling_deepseek:DeepseekV3MLP",
    "transformers_modules.DeepSeek-V2-Lite.modeling_deepseek:DeepseekV2MLP",
    "transformers_modules.Kimi-Linear-48B-A3B-Instruct.modeling_kimi:KimiMLP",
    f"{_V}.models.deepseek_v2:DeepseekV2MLP",
    f"{_V}.models.qwen2_moe:Qwen2MoeMLP",
    f"{_V}.models.glm4_moe:Glm4MoeMLP",
    (f"{_V}.models.glm4_moe_lite:Glm4MoeLiteMLP", f"{_V}.models.glm4_moe:Glm4MoeMLP"),
    f"{_V}.models.longcat_flash:FlashMLP",
    "vllm.models.kimi_k3.nvidia.model:KimiMLP",
    "vllm.models.kimi_k3.amd.linear:KimiMLP",
    "vllm.models.glm5next.common.model:Glm5NextMLP",
    f"{_SG}.deepseek_v2:DeepseekV2MLP",
    f"{_SG}.llama:LlamaMLP",
    f"{_SG}.kimi_k3:KimiK3MLP",
    f"{_SG}.qwen2_moe:Qwen2MoeMLP",
    f"{_SG}.glm4_moe_lite:Glm4MoeLiteMLP",
    f"{_SG}.longcat_flash:LongcatFlashMLP",
    f"{_A}.deepseek_v2:DeepseekV2MLP",
    f"{_A}.kimi_k3:KimiMLP",
    f"{_A}.qwen3_next:Qwen3NextMLP",
)
KERNELS = (
    _KERNEL,
    f"{_V}.layers.attention.attention:Attention",
    "sglang.srt.layers.radix_attention:RadixAttention",
    "sglang.srt.layers.radix_linear_attention:RadixLinearAttention",
    "atom.model_ops.attention_mla:MLAAttention",
    ("atom.plugin.vllm.attention.layer_mla:AttentionForVllmMLA", "atom.model_ops.attention_mla:MLAAttention"),
    "atom.model_ops.paged_attention:Attention",
    "atom.model_ops.base_attention:LinearAttention",
)
MODEL = (
    *(
        f"{_HF}.{name}.modeling_{name}:{cls}Model"
        for name, cls in (
            ("deepseek_v2", "DeepseekV2"),
            ("deepseek_v3", "DeepseekV3"),
            ("deepseek_v32", "DeepseekV32"),
            ("glm_moe_dsa", "GlmMoeDsa"),
            ("glm4_moe_lite", "Glm4MoeLite"),
            ("kimi_linear", "KimiLinear"),
            ("longcat_flash", "LongcatFlash"),
            ("gpt_oss", "GptOss"),
            ("qwen3_next", "Qwen3Next"),
            ("qwen3_5", "Qwen3_5Text"),
            ("qwen3_5_moe", "Qwen3_5MoeText"),
            *MLA_MODELS,
            *GQA_MODELS[:2],
            *OLMO,
            ("gemma3", "Gemma3Text"),
        )
    ),
    "transformers_modules.DeepSeek-V3.modeling_deepseek:DeepseekV3Model",
    "transformers_modules.DeepSeek-V2-Lite.modeling_deepseek:DeepseekV2Model",
    "transformers_modules.Kimi-Linear-48B-A3B-Instruct.modeling_kimi:KimiLinearModel",
    f"{_V}.models.deepseek_v2:DeepseekV2Model",
    "vllm.models.deepseek_v32.nvidia.model:DeepseekV32Model",
    "vllm.models.deepseek_v32.amd.model:DeepseekV32Model",
    "vllm.models.kimi_k3.nvidia.model:KimiLinearModel",
    "vllm.models.kimi_k3.amd.linear:KimiLinearModel",
    f"{_V}.models.glm4_moe_lite:Glm4MoeLiteModel",
    f"{_V}.models.longcat_flash:FlashModel",
    f"{_V}.models.gpt_oss:GptOssModel",
    f"{_V}.models.qwen3_next:Qwen3NextModel",
    # The draft models of multi-token prediction, and an EAGLE's.
    f"{_V}.models.qwen3_next_mtp:Qwen3NextMultiTokenPredictor",
    f"{_V}.models.qwen3_5_mtp:Qwen3_5MultiTokenPredictor",
    f"{_V}.models.deepseek_mtp:DeepSeekMultiTokenPredictorLayer",
    f"{_V}.models.glm4_moe_lite_mtp:Glm4MoeLiteMultiTokenPredictorLayer",
    "vllm.models.kimi_k3.nvidia.mtp:KimiK3MultiTokenPredictorLayer",
    "vllm.models.kimi_k3.amd.mtp:KimiK3MultiTokenPredictorLayer",
    f"{_V}.models.longcat_flash_mtp:LongCatMultiTokenPredictorLayer",
    f"{_V}.models.deepseek_eagle:DeepseekV2Model",
    (f"{_V}.models.qwen3_5:Qwen3_5Model", f"{_V}.models.qwen3_next:Qwen3NextModel"),
    f"{_SG}.deepseek_v2:DeepseekV2Model",
    f"{_SG}.kimi_linear:KimiLinearModel",
    f"{_SG}.kimi_k3:KimiK3LinearModel",
    f"{_SG}.glm4_moe_lite:Glm4MoeLiteModel",
    f"{_SG}.longcat_flash:LongcatFlashModel",
    f"{_SG}.gpt_oss:GptOssModel",
    f"{_SG}.qwen3_next:Qwen3NextModel",
    f"{_SG}.qwen3_5:Qwen3_5ForCausalLM",
    f"{_A}.deepseek_v2:DeepseekV2Model",
    f"{_A}.kimi_k3:KimiLinearModel",
    f"{_A}.gpt_oss:GptOssModel",
    f"{_A}.qwen3_next:Qwen3NextModel",
    (f"{_A}.qwen3_5:Qwen3_5Model", f"{_A}.qwen3_next:Qwen3NextModel"),
)
DECODER = (
    *of_models((*MLA_MODELS, *GQA_MODELS), "DecoderLayer"),
    *of_models(OLMO, "AttentionDecoderLayer"),
    *of_models(OLMO, "LinearAttentionDecoderLayer"),
    f"{_HF}.deepseek_v2.modeling_deepseek_v2:DeepseekV2DecoderLayer",
    f"{_HF}.deepseek_v3.modeling_deepseek_v3:DeepseekV3DecoderLayer",
    f"{_HF}.deepseek_v32.modeling_deepseek_v32:DeepseekV32DecoderLayer",
    f"{_HF}.glm_moe_dsa.modeling_glm_moe_dsa:GlmMoeDsaDecoderLayer",
    f"{_HF}.glm4_moe_lite.modeling_glm4_moe_lite:Glm4MoeLiteDecoderLayer",
    f"{_HF}.kimi_linear.modeling_kimi_linear:KimiLinearDecoderLayer",
    f"{_HF}.longcat_flash.modeling_longcat_flash:LongcatFlashDecoderLayer",
    f"{_HF}.gpt_oss.modeling_gpt_oss:GptOssDecoderLayer",
    f"{_HF}.qwen3_next.modeling_qwen3_next:Qwen3NextDecoderLayer",
    f"{_HF}.qwen3_5.modeling_qwen3_5:Qwen3_5DecoderLayer",
    f"{_HF}.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeDecoderLayer",
    "transformers_modules.DeepSeek-V3.modeling_deepseek:DeepseekV3DecoderLayer",
    "transformers_modules.DeepSeek-V2-Lite.modeling_deepseek:DeepseekV2DecoderLayer",
    "transformers_modules.Kimi-Linear-48B-A3B-Instruct.modeling_kimi:KimiDecoderLayer",
    f"{_V}.models.deepseek_v2:DeepseekV2DecoderLayer",
    "vllm.models.deepseek_v32.nvidia.model:DeepseekV32DecoderLayer",
    "vllm.models.deepseek_v32.amd.model:DeepseekV32DecoderLayer",
    "vllm.models.kimi_k3.nvidia.model:KimiDecoderLayer",
    "vllm.models.kimi_k3.amd.linear:KimiDecoderLayer",
    f"{_V}.models.glm4_moe_lite:Glm4MoeLiteDecoderLayer",
    f"{_V}.models.longcat_flash:FlashDecoderLayer",
    f"{_V}.models.gpt_oss:TransformerBlock",
    f"{_V}.models.qwen3_next:Qwen3NextDecoderLayer",
    (f"{_V}.models.qwen3_5:Qwen3_5DecoderLayer", f"{_V}.models.qwen3_next:Qwen3NextDecoderLayer"),
    f"{_SG}.deepseek_v2:DeepseekV2DecoderLayer",
    f"{_SG}.kimi_linear:KimiDecoderLayer",
    f"{_SG}.kimi_k3:KimiK3DecoderLayer",
    f"{_SG}.glm4_moe_lite:Glm4MoeLiteDecoderLayer",
    f"{_SG}.longcat_flash:LongcatFlashDecoderLayer",
    f"{_SG}.longcat_flash_nextn:LongcatFlashDenseDecoderLayer",
    f"{_SG}.gpt_oss:GptOssDecoderLayer",
    f"{_SG}.qwen3_next:Qwen3HybridLinearDecoderLayer",
    f"{_SG}.qwen3_5:Qwen3_5LinearDecoderLayer",
    f"{_A}.deepseek_v2:DeepseekV2DecoderLayer",
    f"{_A}.kimi_k3:KimiDecoderLayer",
    f"{_A}.gpt_oss:TransformerBlock",
    f"{_A}.qwen3_next:Qwen3NextDecoderLayer",
    (f"{_A}.qwen3_5:Qwen3_5DecoderLayer", f"{_A}.qwen3_next:Qwen3NextDecoderLayer"),
)
KINDS = {
    "mla": MLA,
    "gated_delta_net": DELTA,
    "gqa": GQA,
    "gated_mlp": MLP,
    "residual": DECODER,
    "final": MODEL,
    "kernel": KERNELS,
}
CASES = [(kind, (names,) if isinstance(names, str) else names) for kind, listed in KINDS.items() for names in listed]


def with_bases(names: tuple[str, ...]) -> type:
    cls: type | None = None
    for name in reversed(names):
        cls = layer_class(name) if cls is None else layer_class(name, cls)
    assert cls is not None
    return cls


def test_every_class_is_known_by_its_name_or_its_bases() -> None:
    known = {names: registry.default.readers_for(with_bases(names)) for _, names in CASES}
    assert [names[0] for _, names in CASES if not known[names]] == []
    families = {names: FAMILY_OF[readers[0].facts.spec] for names, readers in known.items()}
    wrong = [
        (names[0], families[names])
        for kind, names in CASES
        if not (families[names].endswith("_kernel") if kind == "kernel" else families[names] == kind)
    ]
    assert wrong == []


def test_transformers_has_every_class_under_its_name() -> None:
    pytest.importorskip("transformers")
    classes = [name.partition(":")[::2] for _, (name, *_) in CASES if _HF in name]
    missing = [(module, name) for module, name in classes if not hasattr(importlib.import_module(module), name)]
    assert missing == []
    assert len(classes) > 60


def test_what_a_class_inherits_does_not_shadow_what_it_is() -> None:
    # vLLM's sparse MLA is a kernel layer by its base, and a whole attention layer by its own name.
    sparse = registry.default.readers_for(with_bases((_V32, _KERNEL)))
    assert [reader.facts.spec for reader in sparse] == [MLASpec]
    assert [reader.facts.spec for reader in registry.default.readers_for(layer_class(_KERNEL))] == [MLAKernelSpec]


def test_sglangs_attention_decoder_layers_are_two_kinds() -> None:
    for name in ("qwen3_next:Qwen3HybridAttentionDecoderLayer", "qwen3_5:Qwen3_5AttentionDecoderLayer"):
        readers = registry.default.readers_for(layer_class(f"{_SG}.{name}"))
        assert [reader.facts.spec for reader in readers] == [GQASpec, ResidualSpec]


def test_every_declared_class_is_one_that_was_found_in_an_engine() -> None:
    """The other way round: a misspelt or stale declaration would never be noticed."""
    found = {
        name for kind in KINDS.values() for names in kind for name in ((names,) if isinstance(names, str) else names)
    }
    older = {"vllm:Qwen3NextGatedDeltaNet"}  # of earlier vLLM releases
    stale = [
        key
        for key, owner in registry.layer_classes().items()
        if key not in older
        and owner
        not in ("decoders", "layer_norm_decoders", "vllm_decoders")  # many, and held to the engines themselves
        and not any(
            name.partition(":")[2] == key.partition(":")[2] and name.startswith(key.partition(":")[0]) for name in found
        )
    ]
    assert stale == []


def test_every_common_decoder_of_transformers_is_a_class_of_it() -> None:
    transformers = pytest.importorskip("transformers")
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    defined = {name for file in files for name in re.findall(r"^class (\w+)\(", file.read_text(encoding="utf-8"), re.M)}
    declared = {
        key.partition(":")[2]
        for name in ("decoders", "layer_norm_decoders")
        for key in registry.adapters()[name].layers
        if key.startswith("transformers")
    }
    assert declared - defined == set()


def test_vision_towers_are_known_to_be_none_of_ours() -> None:
    for name in (
        f"{_HF}.kimi_k25.modeling_kimi_k25:Kimi_K25VisionAttention",
        f"{_V}.layers.attention.mm_encoder_attention:MMEncoderAttention",
        "sglang.srt.layers.attention.vision:VisionAttention",
    ):
        cls = layer_class(name)
        assert registry.default.readers_for(cls) == ()
        assert registry.unknown_in(cls()) == []


def test_glm5_next_layers_of_transformers_read_although_no_entry_declares_their_dimensions() -> None:
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    import torch

    config = modeling.Glm5NextTextConfig(num_hidden_layers=4)
    with torch.device("meta"):
        kinds = {kind: i for i, kind in enumerate(config.layer_types)}
        delta = modeling.Glm5NextTextLinearAttention(config, kinds["linear_attention"])
        index = next(i for kind, i in kinds.items() if kind != "linear_attention")
        attention = modeling.Glm5NextTextAttention(config, index)
    spec = registry.spec_for(attention)
    assert (spec.qk_rope_head_dim, spec.latent_width, spec.layer_index) == (0, config.kv_lora_rank, index)
    # Unlike every other transformers MLA, its latent norms follow the config.
    assert spec.kv_norm.epsilon == config.rms_norm_eps
    assert isinstance(registry.spec_for(delta), GatedDeltaNetSpec)
    assert registry.spec_for(delta).output_norm.activation == "sigmoid"
