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

_BLOCK = "Attention Block Model"
_H = ("h", "ln_f")
_LAYERNORM = ("layers", "final_layernorm")

_MODELS: tuple[tuple[Any, ...], ...] = (
    ("afmoe", "Afmoe", _GQA, stream(("input_layernorm", "pre_mlp_layernorm"), **_NOT_AS_GIVEN)),
    ("apertus", "Apertus", _GQA, stream(("attention_layernorm", "feedforward_layernorm"), up=["up_proj"])),
    ("arcee", "Arcee", _GQA, stream(up=["up_proj"])),
    ("bailing_moe", "BailingMoE", _BAILING_GQA, _BAILING, _BLOCK),
    ("chatglm", "GLM", attention("dense", "query_key_value"), _GLM, "Attention Block Transformer", _LAYERNORM),
    ("cohere2_moe", "Cohere2Moe", _GQA, stream([_COHERE], **_AT_ONCE)),
    ("commandr", "Cohere", _GQA, stream([_COHERE], **_AT_ONCE)),
    ("deepseek", "Deepseek", _GQA, _USUAL),
    ("ernie4", "Ernie4", None, _USUAL),
    ("exaone", "Exaone", attention("out_proj"), _EXAONE, streams.USUAL_ENDS, _H),
    ("exaone4", "Exaone4", _GQA, stream((), **_NOT_AS_GIVEN)),
    ("exaone_moe", "ExaoneMoE", _GQA, _USUAL),
    # The weights of its norms are loaded with the 1 added.
    ("gemma", "Gemma", _GQA, _USUAL),
    ("gemma2", "Gemma2", _GQA, stream(_SANDWICH, like=_ZERO_CENTRED, **_NOT_AS_GIVEN)),
    ("gemma3_causal", "Gemma3", _GQA, _GEMMA3, "Attention DecoderLayer TextModel"),
    ("glm4", "Glm4", _GQA, _SCALED),
    ("glm4_moe", "Glm4Moe", _GQA, _USUAL),
    ("glm4_moe_lite", "Glm4MoeLite", None, _MLA),
    ("gpt2", "GPT2", attention("c_proj", "c_attn"), _GPT2, _BLOCK, _H),
    ("gpt_bigcode", "GPTBigCode", attention("c_proj", "c_attn"), _GPT2, _BLOCK, _H),
    ("gpt_j", "GPTJ", attention("out_proj"), _GPTJ, _BLOCK, _H),
    ("granite", "Granite", _GQA, _SCALED),
    (
        "granitemoe",
        "GraniteMoe",
        _GQA,
        stream(mlp="block_sparse_moe", also=["shared_mlp.input_linear"], **_NOT_AS_GIVEN),
    ),
    ("grok", "Grok1", _GQA, _GROK),
    ("hunyuan", "HunYuan", _GQA, _USUAL),
    ("hunyuan_v3", "HYV3", _GQA, _USUAL),
    ("internlm2", "InternLM", attention("wo", "wqkv"), _INTERN, "2Attention DecoderLayer 2Model"),
    ("laguna", "Laguna", _GQA, _USUAL),
    ("llada2", "LLaDA2Moe", _BAILING_GQA, _BAILING, _BLOCK),
    ("llama", "Llama", _GQA, _USUAL),
    ("mellum", "Mellum", _GQA, _USUAL),
    ("mimo_v2", "MiMoV2", _GQA.but(has_sinks={"path": "attention_sink_bias", "as": "present"}), _USUAL),
    ("minicpm", "MiniCPM", _GQA, _SCALED),
    ("minicpm3", "MiniCPM3", words.SGLANG_MLA, _MINICPM3, "AttentionMLA DecoderLayer Model"),
    ("minimax_m2", "MiniMaxM2", _GQA, _SPARSE),
    ("mixtral", "Mixtral", _GQA, _SPARSE),
    ("mixtral_quant", "Mixtral", _GQA, _SPARSE),
    ("olmo", "Olmo", _GQA, stream(_WEIGHTLESS)),
    ("olmo2", "Olmo2", _GQA, stream((), **_NOT_AS_GIVEN)),
    ("olmoe", "Olmoe", _GQA, _USUAL),
    ("opt", "OPT", attention("out_proj"), _OPT, "Attention DecoderLayer Decoder", ("layers", "final_layer_norm")),
    ("orion", "Orion", _GQA, stream(like=_TORCHS)),
    ("persimmon", "Persimmon", attention("dense", "query_key_value"), _PERSIMMON, streams.USUAL_ENDS, _LAYERNORM),
    ("phi", "Phi", attention("dense"), _PHI, "Attention Layer Model", _LAYERNORM),
    ("phimoe", "PhiMoE", _GQA, stream(like=_TORCHS, mlp="block_sparse_moe")),
    ("qwen", "QWen", attention("c_proj", "c_attn"), _QWEN, _BLOCK, _H),
    ("qwen2", "Qwen2", _GQA, _USUAL),
    ("qwen2_moe", "Qwen2Moe", _GQA, _USUAL),
    ("qwen3", "Qwen3", _QK_NORMS, _USUAL),
    ("qwen3_moe", "Qwen3Moe", _QK_NORMS, _USUAL),
    ("sarvam_moe", "Sarvam", words.SGLANG_MLA, _MLA, "MoEMLAAttention MoEMLADecoderLayer MLAModel"),
    ("sdar", "SDAR", _GQA, _USUAL, _BLOCK),
    ("sdar_moe", "SDARMoe", _GQA, _USUAL, _BLOCK),
    ("solar", "Solar", _GQA, _USUAL),
    ("stablelm", "", _GQA, stream(like=_TORCHS), "StablelmAttention StablelmDecoderLayer StableLMEpochModel"),
    ("starcoder2", "Starcoder2", _GQA, stream(like=_TORCHS, up=["c_fc"], down="c_proj")),
    ("xverse", "Xverse", _GQA, _USUAL),
    ("xverse_moe", "Xverse", _GQA, _USUAL),
)
"""As `vocabulary_streams.classes_of` takes them."""

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
_MLPS: dict[str, Facts | tuple[Facts, ...]] = {
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
    "opt:OPTDecoderLayer": (_OPT, mlp(plain_mlp("fc1", "fc2", "activation_fn"), "fc2")),
    "phi:PhiMLP": mlp(plain_mlp("fc1", "fc2", "act"), "fc2"),
    "qwen:QWenMLP": mlp(SGLANG_MLP, "c_proj"),
    "starcoder2:Starcoder2MLP": _C_FC,
}

SGLANG_DECODERS = Adapter(
    "sglang_decoders",
    layers={f"{FILES}.{place}": facts for place, facts in {**streams.classes(_MODELS), **_MLPS}.items()},
    # Drafts: what comes to these layers is more than the stream, and their bases' norms stand elsewhere in them.
    ignored=(
        f"{FILES}.llama_eagle:LlamaDecoderLayer",
        f"{FILES}.llama_eagle3:LlamaDecoderLayer",
        f"{FILES}.qwen2_eagle:Qwen2DecoderLayer",
    ),
)
