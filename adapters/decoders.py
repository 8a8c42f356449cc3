"""The decoder that most models are made of: grouped-query attention, a gated MLP or experts, two norms on the stream.

Models build it under names of their own, so the classes are listed here, by how they differ: in the window, the norms, the adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from . import vocabulary as words
from . import vocabulary_mlps as mlps
from . import vocabulary_streams as streams
from .base import Adapter, Facts
from .sources import const

# ---- transformers: the classes of a model begin with the same word

_FULL = words.TRANSFORMERS_GQA
_OF_THE_LAYER = _FULL.but(sliding_window="sliding_window")
_NO_WINDOW = {"path": "config", "as": "none"}
"""Where nobody has set one, there is none."""
_OF_THE_CONFIG = _FULL.but(sliding_window=["config.sliding_window", _NO_WINDOW])
_WITH_SINKS = _OF_THE_LAYER.but(has_sinks={"path": "sinks", "as": "present"})

_ATTENTIONS: tuple[tuple[Facts, str], ...] = (
    (
        _FULL,
        "Apertus Arcee AriaText Emu3 Ernie4_5 Ernie4_5_Moe FlexOlmo Gemma Glm Glm4 Glm4Moe Granite GraniteMoe GraniteMoeShared"
        " HYV3 HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX MiniMaxM2 Olmo2 SeedOss SolarOpen",
    ),
    (_OF_THE_LAYER, "Afmoe Beam Cwm Dots1 Gemma2 Mellum Ministral Olmo3 Qwen2 SmolLM3 VaultGemma"),
    (_OF_THE_LAYER.but(**words.qk_norms("variance_epsilon"), rope=words.TRANSFORMERS_QK_ROPE), "Qwen3Moe"),
    (_OF_THE_CONFIG, "Ministral3 Mistral Mixtral Olmoe"),
    # Kept by the layers that do not slide, too.
    (_FULL.but(sliding_window={"path": "sliding_window", "where": "is_sliding"}), "Exaone4 ExaoneMoe Kolibri1"),
    # Heads that differ between layers.
    (_OF_THE_LAYER.but(num_heads="num_heads"), "Laguna"),
    (
        _WITH_SINKS.but(num_kv_heads="config.num_attention_heads / num_key_value_groups", v_head_dim="v_head_dim"),
        "MiMoV2Flash",
    ),
    # Heads that differ between layers, and layers that read the keys and values of others.
    (
        _OF_THE_LAYER.but(
            num_kv_heads="config.num_attention_heads / num_key_value_groups",
            shares_kv="is_kv_shared_layer",
            values_are_keys="use_alternative_attention",
        ),
        "Gemma4Text Gemma4UnifiedText",
    ),
    # Set on the layers that slide alone.
    (_FULL.but(sliding_window=["sliding_window", _NO_WINDOW]), "Qwen2Moe"),
    (_WITH_SINKS, "Flint GraniteMoeSWA GraniteSWA"),
    # One linear for queries, keys and values. Its output is gathered, so that every rank has all heads.
    (_OF_THE_CONFIG.but(tp_weight="qkv_proj.in_features"), "Phi3 Phi4Multimodal"),
)

_NORMS = streams.TRANSFORMERS_RESIDUAL
_ZERO_CENTRED = streams.zero_centred(_NORMS, "eps")
_NOT_AS_GIVEN = {"added_as_given": const(False)}


def _named(facts: Facts, post_attention: str, before: str = "input_layernorm") -> Facts:
    """The same with norms of other names on the stream."""
    return facts.but(
        **{
            name: [{**each, "module": module} for each in facts.words[name]]
            for name, module in (("input_norms", before), ("post_attention_norms", post_attention))
        }
    )


_STREAMS: tuple[tuple[Facts, str], ...] = (
    (
        _NORMS,
        "AXK1 Arcee AriaText BailingHybrid Cwm Dots1 Ernie4_5 Ernie4_5_Moe ExaoneMoe Flint Glm Glm4Moe HYV3 HunYuanDenseV1"
        " HunYuanMoEV1 Laguna Mellum MiMoV2Flash MiniMaxM2 Ministral Ministral3 Mistral Mixtral Olmoe Phi3 Phi4Multimodal Qwen2 Qwen2Moe Qwen3Moe SeedOss SmolLM3 SolarOpen",
    ),
    (_named(_NORMS, "feedforward_layernorm", "attention_layernorm"), "Apertus"),
    # What the blocks give is scaled, normed or dropped before it is added.
    (
        _NORMS.but(**_NOT_AS_GIVEN),
        "Emu3 Glm4 Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA HyperCLOVAX Kolibri1",
    ),
    (_named(_NORMS, "pre_mlp_layernorm").but(**_NOT_AS_GIVEN), "Afmoe"),
    (_named(_NORMS, "pre_feedforward_layernorm").but(**_NOT_AS_GIVEN), "Beam"),
    (_ZERO_CENTRED, "Gemma"),
    (_named(_ZERO_CENTRED, "pre_feedforward_layernorm"), "VaultGemma"),
    (_named(_ZERO_CENTRED, "pre_feedforward_layernorm").but(**_NOT_AS_GIVEN), "Gemma2"),
    # The norms stand on what the blocks give.
    (_NORMS.but(input_norms=[], post_attention_norms=[], **_NOT_AS_GIVEN), "Exaone4 FlexOlmo Olmo2 Olmo3"),
)

_FINAL_NORMS: tuple[tuple[Facts, str], ...] = (
    (_ZERO_CENTRED, "Gemma Gemma2 VaultGemma"),
    (
        _NORMS,
        "AXK1 Afmoe Apertus Arcee AriaText BailingHybrid Beam Cwm Dots1 Emu3Text Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe FlexOlmo Flint"
        " Glm Glm4 Glm4Moe Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HunYuanDenseV1 HunYuanMoEV1"
        " HyperCLOVAX Kolibri1 Laguna Mellum MiMoV2Flash MiniMaxM2 Ministral Ministral3 Mistral Mixtral Olmo2 Olmo3 Olmoe Phi3"
        " Phi4Multimodal Qwen2 Qwen2Moe Qwen3Moe SeedOss SmolLM3 SolarOpen",
    ),
)

_MERGED_MLP = mlps.TRANSFORMERS_MLP.but(
    hidden_size="down_proj.out_features",
    intermediate_size="down_proj.in_features",
    activation=["act_fn", "activation_fn"],
    tp_weight="gate_up_proj.in_features",
)
_MLPS: tuple[tuple[Facts, str], ...] = (
    (
        mlps.TRANSFORMERS_MLP,
        "AXK1 Afmoe AriaSharedExperts BailingHybrid Beam Cwm Dots1 Emu3 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Flint Gemma Gemma2"
        " Gemma4Text Gemma4UnifiedText Glm4Moe Granite GraniteSWA HYV3 HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Kolibri1 Laguna MiMoV2Flash Ministral Ministral3 Mistral Olmo2 Olmo3 Qwen2 Qwen2Moe Qwen3Moe SeedOss SmolLM3"
        " SolarOpen VaultGemma",
    ),
    (_MERGED_MLP, "Glm Glm4 Phi3 Phi4Multimodal"),
)


def _classes(ends: str, groups: Iterable[tuple[Facts, str]]) -> dict[str, Facts]:
    return {f"transformers:{name}{ends}": facts for facts, names in groups for name in names.split()}


_TRANSFORMERS = {
    **_classes("Attention", _ATTENTIONS),
    **_classes("DecoderLayer", _STREAMS),
    **_classes("MLP", _MLPS),
    "transformers:AXK1Attention": words.TRANSFORMERS_MLA,
    "transformers:BailingHybridAttention": words.TRANSFORMERS_MLA.but(
        q_lora_rank=const(None), rope={**words.TRANSFORMERS_MLA.words["rope"], "interleaved": const(True)}
    ),
    "transformers:BailingHybridDeltaAttention": words.TRANSFORMERS_KDA,
    **_classes("Model", ((streams.final_norm(facts), names) for facts, names in _FINAL_NORMS)),
}

# ---- vLLM: by the file, because a draft model has classes of the same names

_VLLM = streams.VLLM_RESIDUAL.but(layer_index={"path": "self_attn.attn.layer_name", "as": "name_index"})
_VLLM_ZERO_CENTRED = streams.zero_centred(_VLLM, "variance_epsilon")
_VLLM_SANDWICH = _named(_VLLM_ZERO_CENTRED, "pre_feedforward_layernorm").but(**_NOT_AS_GIVEN)

_VLLM_MODELS: tuple[tuple[Facts, str], ...] = (
    (
        _VLLM,
        "ernie45_moe:Ernie4_5_Moe glm4_moe:Glm4Moe llama:Llama minimax_m2:MiniMaxM2 mistral:Mistral mixtral:Mixtral olmoe:Olmoe qwen2:Qwen2"
        " qwen2_moe:Qwen2Moe qwen3:Qwen3 qwen3_moe:Qwen3Moe",
    ),
    (_VLLM.but(**_NOT_AS_GIVEN), "glm4:Glm4 granite:Granite hyperclovax:HyperCLOVAX"),
    (_VLLM_ZERO_CENTRED, "gemma:Gemma"),
    (_VLLM_SANDWICH, "gemma2:Gemma2 gemma3:Gemma3"),
)
_VLLM_MLPS = (
    "ernie45_moe:Ernie4_5_MoeMLP gemma:GemmaMLP gemma2:Gemma2MLP gemma3:Gemma3MLP glm4_moe:Glm4MoeMLP granite:GraniteMLP"
    " hyperclovax:HyperCLOVAXMLP llama:LlamaMLP qwen2:Qwen2MLP qwen3_moe:Qwen3MoeMLP"
)
_FILES = "vllm.model_executor.models"


_WITH_QK_NORMS = words.VLLM_GQA.but(**words.qk_norms("variance_epsilon"), rope=words.QK_ROPE_MODULE)


def _vllm(facts: Facts, places: str) -> Iterator[tuple[str, Facts]]:
    for place in places.split():
        file, _, name = place.partition(":")
        attention = _WITH_QK_NORMS if name in ("Qwen3", "Qwen3Moe") else words.VLLM_GQA
        yield from streams.classes_of(f"{_FILES}.{file}", name, attention, facts).items()


DECODERS = Adapter(
    "decoders",
    layers={
        **_TRANSFORMERS,
        **dict(part for each in _VLLM_MODELS for part in _vllm(*each)),
        **{f"{_FILES}.{place}": mlps.VLLM_MLP for place in _VLLM_MLPS.split()},
    },
    ignored=(
        # Of pictures and sound.
        "transformers:GitVisionAttention",
        "transformers:GotOcr2VisionAttention",
        "transformers:MossTranscribeDiarizeAudioAttention",
        "transformers:Phi4MultimodalAudioAttention",
        "transformers:Phi4MultimodalVisionAttention",
        "transformers:Phi4MultimodalVisionMultiheadAttentionPoolingHead",
        "transformers:SiglipAttention",
        "transformers:SiglipMultiheadAttentionPoolingHead",
        # Drafts: what comes to these layers is more than the stream, and their bases' norms stand elsewhere in them.
        f"{_FILES}.llama_eagle:LlamaDecoderLayer",
        f"{_FILES}.llama_eagle3:LlamaDecoderLayer",
        f"{_FILES}.mistral_eagle:EagleMistralDecoderLayer",
        f"{_FILES}.qwen3_eagle3:Qwen3Eagle3DecoderLayer",
    ),
)
