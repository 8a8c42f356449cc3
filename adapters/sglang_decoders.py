"""SGLang's decoders, by the file, because drafts have classes of the same names.

Whatever an attention calls its numbers, its `RadixAttention` says this rank's, and its last linear by which group they were cut: under
data-parallel attention that is not the model's. What each `forward` does was read in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import vllm_decoders as vllm
from . import vocabulary as words
from . import vocabulary_streams as streams
from .base import Adapter, Facts
from .layer_norm_parts import plain_mlp
from .sources import const, layer_norm
from .vocabulary_mlps import SGLANG_MLP

FILES = "sglang.srt.models"
_RANK = "tp_group.rank_in_group"
_NOT_AS_GIVEN: dict[str, Any] = {"added_as_given": const(False)}
_AT_ONCE: dict[str, Any] = {"parallel_residual": const(True)}
_TORCHS: dict[str, Any] = {"epsilon": "eps"}
"""Of torch's own LayerNorm, and of Gemma-3's norm."""
_ZERO_CENTRED: dict[str, Any] = {"weight_offset": const(1.0)}


def attention(out: str = "o_proj", first: str = "qkv_proj", attn: str = "attn") -> Facts:
    """Grouped-query attention by the names of its last linear, its first and its kernel layer."""
    return words.SGLANG_GQA.but(
        # The first linear may hold a gate for each head, too.
        num_heads=f"{out}.input_size / {attn}.v_head_dim",
        num_local_heads=f"{attn}.tp_q_head_num",
        num_kv_heads=f"{first}.total_num_kv_heads",
        num_local_kv_heads=f"{attn}.tp_k_head_num",
        head_dim=f"{attn}.head_dim",
        v_head_dim=f"{attn}.v_head_dim",
        softmax_scale=f"{attn}.scaling",
        sliding_window={"path": f"{attn}.sliding_window_size", "as": "window_before"},
        has_sinks=[{"path": "sinks", "as": "present"}, const(False)],
        hidden_size=f"{out}.output_size",
        layer_index=f"{attn}.layer_id",
        tp_rank=f"{out}.{_RANK}",
    )


def stream(
    norms: Sequence[Any] = vllm.NAMES, *, attention: str = "self_attn", out: str = "o_proj", **more: Any
) -> Facts:
    """A decoder layer by the names of its parts, as `vllm_decoders.stream` takes them."""
    last = f"{attention}.{out}"
    return vllm.stream(norms, attention=attention, out=out, **more).but(
        layer_index=f"{attention}.attn.layer_id",
        tp_size=f"{last}.input_size / {last}.input_size_per_partition",
        tp_rank=f"{last}.{_RANK}",
    )


def mlp(facts: Facts = SGLANG_MLP, down: str = "down_proj") -> Facts:
    """An MLP by its last linear, which says how it was cut."""
    return vllm.mlp_of(facts, down).but(tp_size=None, tp_rank=f"{down}.{_RANK}")


_GQA = attention()
_QK_NORMS = _GQA.but(**words.qk_norms("variance_epsilon"), rope=words.QK_ROPE_MODULE)
_USUAL = stream()
_SCALED = stream(**_NOT_AS_GIVEN)
_SPARSE = stream(mlp="block_sparse_moe")
_COHERE = layer_norm("input_layernorm", epsilon="variance_epsilon")
_WEIGHTLESS = [
    layer_norm(each, width="normalized_shape.0", epsilon="eps", has_weight=const(False)) for each in vllm.NAMES
]
_SANDWICH = ("input_layernorm", "pre_feedforward_layernorm")

_MODELS: dict[str, tuple[str, Facts, Facts]] = {
    "afmoe": ("Afmoe", _GQA, stream(("input_layernorm", "pre_mlp_layernorm"), **_NOT_AS_GIVEN)),
    "apertus": ("Apertus", _GQA, stream(("attention_layernorm", "feedforward_layernorm"), up=["up_proj"])),
    "arcee": ("Arcee", _GQA, stream(up=["up_proj"])),
    "cohere2_moe": ("Cohere2Moe", _GQA, stream([_COHERE], **_AT_ONCE)),
    "commandr": ("Cohere", _GQA, stream([_COHERE], **_AT_ONCE)),
    "deepseek": ("Deepseek", _GQA, _USUAL),
    "exaone_moe": ("ExaoneMoE", _GQA, _USUAL),
    "exaone4": ("Exaone4", _GQA, stream((), **_NOT_AS_GIVEN)),
    # The weights of its norms are loaded with the 1 added.
    "gemma": ("Gemma", _GQA, _USUAL),
    "gemma2": ("Gemma2", _GQA, stream(_SANDWICH, like=_ZERO_CENTRED, **_NOT_AS_GIVEN)),
    "glm4": ("Glm4", _GQA, _SCALED),
    "glm4_moe": ("Glm4Moe", _GQA, _USUAL),
    "granite": ("Granite", _GQA, _SCALED),
    "granitemoe": (
        "GraniteMoe",
        _GQA,
        stream(mlp="block_sparse_moe", also=["shared_mlp.input_linear"], **_NOT_AS_GIVEN),
    ),
    "hunyuan": ("HunYuan", _GQA, _USUAL),
    "hunyuan_v3": ("HYV3", _GQA, _USUAL),
    "laguna": ("Laguna", _GQA, _USUAL),
    "llama": ("Llama", _GQA, _USUAL),
    "mellum": ("Mellum", _GQA, _USUAL),
    "minicpm": ("MiniCPM", _GQA, _SCALED),
    "minimax_m2": ("MiniMaxM2", _GQA, _SPARSE),
    "mixtral": ("Mixtral", _GQA, _SPARSE),
    "mixtral_quant": ("Mixtral", _GQA, _SPARSE),
    "olmo": ("Olmo", _GQA, stream(_WEIGHTLESS)),
    "olmo2": ("Olmo2", _GQA, stream((), **_NOT_AS_GIVEN)),
    "olmoe": ("Olmoe", _GQA, _USUAL),
    "orion": ("Orion", _GQA, stream(like=_TORCHS)),
    "phimoe": ("PhiMoE", _GQA, stream(like=_TORCHS, mlp="block_sparse_moe")),
    "qwen2": ("Qwen2", _GQA, _USUAL),
    "qwen2_moe": ("Qwen2Moe", _GQA, _USUAL),
    "qwen3": ("Qwen3", _QK_NORMS, _USUAL),
    "qwen3_moe": ("Qwen3Moe", _QK_NORMS, _USUAL),
    "solar": ("Solar", _GQA, _USUAL),
    "xverse": ("Xverse", _GQA, _USUAL),
    "xverse_moe": ("Xverse", _GQA, _USUAL),
}
"""File -> what its classes begin with, and the facts of its attention and its decoder layer."""


def _final(layer: Facts) -> Facts:
    """What holds these layers. Where their norms stand behind the blocks, the last one is the usual one still."""
    return streams.final_norm(layer if layer.words["input_norms"] else _USUAL)


_FINALS = {id(layer): _final(layer) for layer in {id(each): each for _, _, each in _MODELS.values()}.values()}

_BAILING = stream(attention="attention", out="dense", first="query_key_value")
_BAILING_GQA = attention("dense", "query_key_value")
_DENSE_4H: dict[str, Any] = {"up": ["dense_h_to_4h"], "down": "dense_4h_to_h"}
_EXAONE = stream(("ln_1", "ln_2"), out="out_proj", down="c_proj")
_GEMMA3 = stream(_SANDWICH, like={**_TORCHS, **_ZERO_CENTRED}, **_NOT_AS_GIVEN)
_GLM = stream(
    attention="self_attention",
    out="dense",
    first="query_key_value",
    unless="apply_residual_connection_post_layernorm",
    **_DENSE_4H,
)
_GROK = stream(("pre_attn_norm", "pre_moe_norm"), mlp="block_sparse_moe", unless="residual_moe", **_NOT_AS_GIVEN)
_GPT2 = stream(
    ["ln_1", "ln_2"], like=_TORCHS, attention="attn", out="c_proj", first="c_attn", up=["c_fc"], down="c_proj"
)
_GPTJ = stream(["ln_1"], like=_TORCHS, attention="attn", out="out_proj", up=["fc_in"], down="fc_out", **_AT_ONCE)
_INTERN = stream(
    ("attention_norm", "ffn_norm"), attention="attention", out="wo", first="wqkv", mlp="feed_forward", down="w2"
)
_MLA = streams.SGLANG_RESIDUAL
_MINICPM3 = _MLA.but(layer_index="self_attn.layer_id", **_NOT_AS_GIVEN)
_OPT = stream(
    ["self_attn_layer_norm", "final_layer_norm"],
    like=_TORCHS,
    out="out_proj",
    up=[],
    also=["fc1"],
    unless={"path": "do_layer_norm_before", "as": "not"},
).but(last_linear="fc2", mixture=None)
_PERSIMMON = stream(like=_TORCHS, out="dense", first="query_key_value", **_DENSE_4H)
_PHI = stream(["input_layernorm"], like=_TORCHS, out="dense", up=["fc1"], down="fc2", **_AT_ONCE)
_QWEN = stream(("ln_1", "ln_2"), attention="attn", out="c_proj", first="c_attn", down="c_proj")
_STABLELM = stream(like=_TORCHS)
_STARCODER = stream(like=_TORCHS, up=["c_fc"], down="c_proj")

_OTHERS: dict[str, Facts | tuple[Facts, ...]] = {
    "bailing_moe:BailingMoEAttention": _BAILING_GQA,
    "bailing_moe:BailingMoEBlock": _BAILING,
    "bailing_moe:BailingMoEModel": streams.final_norm(_BAILING),
    "chatglm:GLMAttention": attention("dense", "query_key_value"),
    "chatglm:GLMBlock": _GLM,
    "chatglm:GLMTransformer": streams.final_norm(_GLM, "layers", "final_layernorm"),
    "ernie4:Ernie4DecoderLayer": _USUAL,
    "ernie4:Ernie4Model": streams.final_norm(_USUAL),
    "exaone:ExaoneAttention": attention("out_proj"),
    "exaone:ExaoneDecoderLayer": _EXAONE,
    "exaone:ExaoneModel": streams.final_norm(_EXAONE, "h", "ln_f"),
    "gemma3_causal:Gemma3Attention": _GQA,
    "gemma3_causal:Gemma3DecoderLayer": _GEMMA3,
    "gemma3_causal:Gemma3TextModel": streams.final_norm(_GEMMA3),
    "glm4_moe_lite:Glm4MoeLiteDecoderLayer": _MLA,
    "glm4_moe_lite:Glm4MoeLiteModel": streams.final_norm(_MLA),
    "gpt2:GPT2Attention": attention("c_proj", "c_attn"),
    "gpt2:GPT2Block": _GPT2,
    "gpt2:GPT2Model": streams.final_norm(_GPT2, "h", "ln_f"),
    "gpt_bigcode:GPTBigCodeAttention": attention("c_proj", "c_attn"),
    "gpt_bigcode:GPTBigCodeBlock": _GPT2,
    "gpt_bigcode:GPTBigCodeModel": streams.final_norm(_GPT2, "h", "ln_f"),
    "gpt_j:GPTJAttention": attention("out_proj"),
    "gpt_j:GPTJBlock": _GPTJ,
    "gpt_j:GPTJModel": streams.final_norm(_GPTJ, "h", "ln_f"),
    "grok:Grok1Attention": _GQA,
    "grok:Grok1DecoderLayer": _GROK,
    "grok:Grok1Model": streams.final_norm(_GROK),
    "internlm2:InternLM2Attention": attention("wo", "wqkv"),
    "internlm2:InternLMDecoderLayer": _INTERN,
    "internlm2:InternLM2Model": streams.final_norm(_INTERN),
    "llada2:LLaDA2MoeAttention": _BAILING_GQA,
    "llada2:LLaDA2MoeBlock": _BAILING,
    "llada2:LLaDA2MoeModel": streams.final_norm(_BAILING),
    "mimo_v2:MiMoV2Attention": _GQA.but(has_sinks={"path": "attention_sink_bias", "as": "present"}),
    "mimo_v2:MiMoV2DecoderLayer": _USUAL,
    "mimo_v2:MiMoV2Model": streams.final_norm(_USUAL),
    "minicpm3:MiniCPM3AttentionMLA": words.SGLANG_MLA,
    "minicpm3:MiniCPM3DecoderLayer": _MINICPM3,
    "minicpm3:MiniCPM3Model": streams.final_norm(_MINICPM3),
    "opt:OPTAttention": attention("out_proj"),
    "opt:OPTDecoderLayer": (_OPT, mlp(plain_mlp("fc1", "fc2", "activation_fn"), "fc2")),
    "opt:OPTDecoder": streams.final_norm(_OPT, "layers", "final_layer_norm"),
    "persimmon:PersimmonAttention": attention("dense", "query_key_value"),
    "persimmon:PersimmonDecoderLayer": _PERSIMMON,
    "persimmon:PersimmonModel": streams.final_norm(_PERSIMMON, "layers", "final_layernorm"),
    "phi:PhiAttention": attention("dense"),
    "phi:PhiLayer": _PHI,
    "phi:PhiModel": streams.final_norm(_PHI, "layers", "final_layernorm"),
    "qwen:QWenAttention": attention("c_proj", "c_attn"),
    "qwen:QWenBlock": _QWEN,
    "qwen:QWenModel": streams.final_norm(_QWEN, "h", "ln_f"),
    "sarvam_moe:SarvamMoEMLAAttention": words.SGLANG_MLA,
    "sarvam_moe:SarvamMoEMLADecoderLayer": _MLA,
    "sarvam_moe:SarvamMLAModel": streams.final_norm(_MLA),
    **{
        f"{file}:{name}{end}": facts
        for file, name in (("sdar", "SDAR"), ("sdar_moe", "SDARMoe"))
        for end, facts in (("Attention", _GQA), ("Block", _USUAL), ("Model", streams.final_norm(_USUAL)))
    },
    "stablelm:StablelmAttention": _GQA,
    "stablelm:StablelmDecoderLayer": _STABLELM,
    "stablelm:StableLMEpochModel": streams.final_norm(_STABLELM),
    "starcoder2:Starcoder2Attention": _GQA,
    "starcoder2:Starcoder2DecoderLayer": _STARCODER,
    "starcoder2:Starcoder2Model": streams.final_norm(_STARCODER),
}

_GATED = (
    "afmoe:AfmoeMLP bailing_moe:BailingMoEMLP commandr:CohereMLP cohere2_moe:Cohere2MoeMLP deepseek:DeepseekMLP exaone4:Exaone4GatedMLP"
    " exaone_moe:ExaoneMoEMLP gemma:GemmaMLP gemma2:Gemma2MLP gemma3_causal:Gemma3MLP glm4:Glm4MLP glm4_moe:Glm4MoeMLP"
    " glm4_moe_lite:Glm4MoeLiteMLP granite:GraniteMLP hunyuan:HunYuanMLP hunyuan_v3:HYV3FeedForward laguna:LagunaMLP llada2:LLaDA2MoeMLP"
    " mimo_v2:MiMoV2MLP minicpm:MiniCPMMLP minicpm3:MiniCPM3MLP olmo:OlmoMLP olmo2:Olmo2MLP orion:OrionMLP qwen2:Qwen2MLP sarvam_moe:SarvamMoEMLP"
    " sdar:SDARMLP solar:SolarMLP stablelm:StablelmMLP xverse:XverseMLP"
    " xverse_moe:XverseMLP"
)
_PLAIN = mlp(plain_mlp("up_proj", "down_proj", "act_fn"))
_C_FC = mlp(plain_mlp("c_fc", "c_proj", "act"), "c_proj")
_MLPS: dict[str, Facts] = {
    **dict.fromkeys(_GATED.split(), SGLANG_MLP),
    "apertus:ApertusMLP": _PLAIN,
    "arcee:ArceeMLP": _PLAIN,
    "chatglm:GLMMLP": mlp(SGLANG_MLP, "dense_4h_to_h").but(activation="activation_func"),
    "exaone:ExaoneGatedMLP": mlp(SGLANG_MLP, "c_proj"),
    "gpt2:GPT2MLP": _C_FC,
    "gpt_bigcode:GPTBigMLP": _C_FC,
    "gpt_j:GPTJMLP": mlp(plain_mlp("fc_in", "fc_out", "act"), "fc_out"),
    "granitemoe:GraniteMoeSharedMLP": mlp(SGLANG_MLP, "output_linear"),
    "internlm2:InternLM2MLP": mlp(SGLANG_MLP, "w2"),
    "persimmon:PersimmonMLP": mlp(plain_mlp("dense_h_to_4h", "dense_4h_to_h", "act"), "dense_4h_to_h"),
    "phi:PhiMLP": mlp(plain_mlp("fc1", "fc2", "act"), "fc2"),
    "qwen:QWenMLP": mlp(SGLANG_MLP, "c_proj"),
    "starcoder2:Starcoder2MLP": _C_FC,
}

SGLANG_DECODERS = Adapter(
    "sglang_decoders",
    layers={
        **{
            f"{FILES}.{file}:{name}{end}": facts
            for file, (name, attention, layer) in _MODELS.items()
            for end, facts in (("Attention", attention), ("DecoderLayer", layer), ("Model", _FINALS[id(layer)]))
        },
        **{f"{FILES}.{place}": facts for place, facts in {**_OTHERS, **_MLPS}.items()},
    },
    # Drafts: what comes to these layers is more than the stream, and their bases' norms stand elsewhere in them.
    ignored=(
        f"{FILES}.llama_eagle:LlamaDecoderLayer",
        f"{FILES}.llama_eagle3:LlamaDecoderLayer",
        f"{FILES}.qwen2_eagle:Qwen2DecoderLayer",
    ),
)
