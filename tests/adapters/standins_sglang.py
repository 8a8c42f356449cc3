"""SGLang 0.5.23: what its attention and decoder layers hold (srt/models, srt/layers).

Its linear modules hold no tensor-parallel size; their group knows the rank. `num_heads` is the total in MLA and delta attention, and this
rank's share in GPT-OSS and Qwen.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from standins import Models, Rank, layer_class, module, multimodal, rotary, text_model, weight, yarn_mscale
from torch import nn

from layerfuse.registry import ModelEntry

_MODELS = "sglang.srt.models"
_NORM = "sglang.srt.layers.layernorm"
_FLA = "sglang.kernels.ops.attention.fla"
_LINEAR = "sglang.srt.layers.linear"
_ROTARY = "sglang.srt.layers.rotary_embedding:RotaryEmbedding"
_DEEPSEEK_MLP = "deepseek_v2:DeepseekV2MLP"
_QWEN_MLP = "qwen2_moe:Qwen2MoeMLP"


def _rms(width: int, eps: float, name: str = "RMSNorm") -> Any:
    return module(f"{_NORM}:{name}", weight=weight(width), variance_epsilon=eps)


def _linear(kind: str, total_in: int, total_out: int, rank: Rank) -> Any:
    """Totals, this rank's sizes, and the group it is sharded over: no size of a group and no rank of its own."""
    group = SimpleNamespace(rank_in_group=rank.rank, world_size=rank.size)
    held: dict[str, Any] = {"parallel_group": "replicated" if kind == "ReplicatedLinear" else "attn_tp"}
    if kind == "RowParallelLinear":
        held["input_size_per_partition"] = total_in // rank.size
    elif kind.endswith("ColumnParallelLinear"):
        sizes = [total_out // 2] * 2 if kind.startswith("Merged") else [total_out]
        held |= {"output_sizes": sizes} if kind.startswith("Merged") else {}
        held["output_partition_sizes"] = [size // rank.size for size in sizes]
        held["output_size_per_partition"] = total_out // rank.size
    return module(f"{_LINEAR}:{kind}", input_size=total_in, output_size=total_out, tp_group=group, **held)


def _radix(
    heads: int, kv_heads: int, head_dim: int, v_head_dim: int, scaling: float, index: int, window: int = -1
) -> Any:
    return module(
        "sglang.srt.layers.radix_attention:RadixAttention",
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        tp_v_head_num=kv_heads,
        head_dim=head_dim,
        qk_head_dim=head_dim,
        v_head_dim=v_head_dim,
        scaling=scaling,
        layer_id=index,
        sliding_window_size=window,
    )


def _radix_linear(k_heads: int, v_heads: int, k_dim: int, v_dim: int, index: int) -> Any:
    return module(
        "sglang.srt.layers.radix_linear_attention:RadixLinearAttention",
        layer_id=index,
        num_q_heads=k_heads,
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        head_q_dim=k_dim,
        head_k_dim=k_dim,
        head_v_dim=v_dim,
    )


def mla(entry: ModelEntry, kind: Any, index: int, rank: Rank, key: str = "deepseek_v2:DeepseekV2AttentionMLA") -> Any:
    q_lora = None if kind.q_lora_rank == "none" else kind.q_lora_rank
    heads, nope, rope, v = kind.num_heads, kind.qk_nope_head_dim, kind.qk_rope_head_dim, kind.v_head_dim
    local, eps = rank.share(heads), entry.rms_norm_eps
    scaling = (nope + rope) ** -0.5 * yarn_mscale(kind) * yarn_mscale(kind)
    base = layer_class(f"{_MODELS}.deepseek_v2:DeepseekV2AttentionMLA")
    made = module(
        f"{_MODELS}.{key}",
        *(() if key.startswith("deepseek_v2:") else (base,)),
        layer_id=index,
        hidden_size=entry.hidden_size,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        qk_head_dim=nope + rope,
        v_head_dim=v,
        q_lora_rank=q_lora,
        kv_lora_rank=kind.kv_lora_rank,
        num_heads=heads,
        num_local_heads=local,
        scaling=scaling,
        # None with skip_rope, as Kimi's layers are built.
        rotary_emb=None if kind.rope == "none" else rotary(_ROTARY, kind, "cos_sin_cache"),
        indexer=None,
        kv_a_layernorm=_rms(kind.kv_lora_rank, eps),
        kv_b_proj=_linear("ColumnParallelLinear", kind.kv_lora_rank, heads * (nope + v), rank),
        o_proj=_linear("RowParallelLinear", heads * v, entry.hidden_size, rank),
        attn_mqa=_radix(local, 1, kind.kv_lora_rank + rope, kind.kv_lora_rank, scaling, index),
        attn_mha=_radix(local, local, nope + rope, v, scaling, index),
    )
    if q_lora is None:
        made.q_proj = _linear("ColumnParallelLinear", entry.hidden_size, heads * (nope + rope), rank)
        made.kv_a_proj_with_mqa = _linear("ReplicatedLinear", entry.hidden_size, kind.kv_lora_rank + rope, rank)
    else:
        made.fused_qkv_a_proj_with_mqa = _linear(
            "ReplicatedLinear", entry.hidden_size, q_lora + kind.kv_lora_rank + rope, rank
        )
        made.q_a_layernorm = _rms(q_lora, eps)
        made.q_b_proj = _linear("ColumnParallelLinear", q_lora, heads * (nope + rope), rank)
    return made


def kda(entry: ModelEntry, kind: Any, index: int, rank: Rank, key: str = "kimi_linear:KimiDeltaAttention") -> Any:
    heads, dim = kind.num_v_heads, kind.head_v_dim
    local = rank.share(heads)
    sizes = {
        "kimi_linear:KimiDeltaAttention": {"tp_size": rank.size, "attn_tp_size": rank.size, "shard_tp_size": rank.size},
        "kimi_k3:KimiK3DeltaAttention": {"tp_size": rank.size, "attn_tp_size": rank.size, "attn_tp_rank": rank.rank},
        "glm5_next:Glm5NextLinearAttention": {},
    }[key]
    return module(
        f"{_MODELS}.{key}",
        hidden_size=entry.hidden_size,
        config=object(),
        head_dim=dim,
        num_heads=heads,
        num_k_heads=heads,
        num_v_heads=heads,
        head_k_dim=dim,
        head_v_dim=dim,
        layer_idx=index,
        local_num_heads=local,
        conv_size=kind.conv_kernel_size,
        activation="silu",
        # The constructor's default, whatever the config says.
        o_norm=module(
            f"{_FLA}.fused_norm_gate:FusedRMSNormGated",
            hidden_size=dim,
            weight=weight(dim),
            eps=1e-5,
            activation="sigmoid",
        ),
        o_proj=_linear("RowParallelLinear", heads * dim, entry.hidden_size, rank),
        attn=_radix_linear(local, local, dim, dim, index),
        **sizes,
    )


def gdn(entry: ModelEntry, kind: Any, index: int, rank: Rank, key: str) -> Any:
    k_heads, v_heads, dim = kind.num_k_heads, kind.num_v_heads, kind.head_v_dim
    fused = {"hidden_size": dim, "weight": weight(dim), "eps": entry.rms_norm_eps, "activation": "swish"}
    if key.startswith("qwen3_5"):
        norm = module(
            f"{_FLA}.layernorm_gated:RMSNorm",
            **{**fused, "activation": "silu"},
            norm_before_gate=True,
            group_size=None,
        )
    else:
        norm = module(f"{_FLA}.fused_norm_gate:FusedRMSNormGated", **fused)
    return module(
        f"{_MODELS}.{key}",
        config=object(),
        attn_tp_rank=rank.rank,
        attn_tp_size=rank.size,
        hidden_size=entry.hidden_size,
        num_v_heads=v_heads,
        num_k_heads=k_heads,
        head_k_dim=kind.head_k_dim,
        head_v_dim=dim,
        key_dim=k_heads * kind.head_k_dim,
        value_dim=v_heads * dim,
        conv_kernel_size=kind.conv_kernel_size,
        layer_id=index,
        activation="silu",
        output_gate_type=None,
        layer_norm_epsilon=entry.rms_norm_eps,
        norm=norm,
        out_proj=_linear("RowParallelLinear", v_heads * dim, entry.hidden_size, rank),
        attn=_radix_linear(rank.share(k_heads), rank.share(v_heads), kind.head_k_dim, dim, index),
    )


def _gqa(entry: ModelEntry, kind: Any, index: int, rank: Rank, window: int) -> dict[str, Any]:
    local, kv = rank.share(kind.num_heads), rank.kv_share(kind.num_kv_heads)
    return {
        "hidden_size": entry.hidden_size,
        "total_num_heads": kind.num_heads,
        "num_heads": local,
        "total_num_kv_heads": kind.num_kv_heads,
        "num_kv_heads": kv,
        "head_dim": kind.head_dim,
        "scaling": kind.head_dim**-0.5,
        "layer_id": index,
        "o_proj": _linear("RowParallelLinear", kind.num_heads * kind.head_dim, entry.hidden_size, rank),
        "attn": _radix(local, kv, kind.head_dim, kind.head_dim, kind.head_dim**-0.5, index, window),
    }


# ---- MLPs


def mlp(entry: ModelEntry, kind: Any, rank: Rank, key: str) -> Any:
    """Gate and up are one linear, whose output is twice as wide."""
    hidden, width = entry.hidden_size, kind.intermediate_size
    gate_up = _linear("MergedColumnParallelLinear", hidden, 2 * width, rank)
    gate_up.output_size_per_partition = 2 * rank.share(width)
    down = _linear("RowParallelLinear", width, hidden, rank)
    down.input_size_per_partition = rank.share(width)
    activation = {"silu": "SiluAndMul", "situ": "SituAndMul"}[kind.activation]
    clamp = {"swiglu_limit": kind.swiglu_limit} if key.startswith("deepseek_v2:") else {}
    return module(
        f"{_MODELS}.{key}",
        gate_up_proj=gate_up,
        down_proj=down,
        act_fn=module(f"sglang.srt.layers.activation:{activation}"),
        **clamp,
    )


# ---- decoder layers


def _deepseek(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str, decoder_key: str) -> Any:
    return _decoder(entry, decoder_key, layer_id=index, self_attn=mla(entry, kind, index, rank))


def _decoder(entry: ModelEntry, key: str, norm: str = "RMSNorm", **held: Any) -> Any:
    hidden, eps = entry.hidden_size, entry.rms_norm_eps
    if "hidden_size" in held:
        held = {name: value for name, value in held.items() if value is not None}
    else:
        held = {"hidden_size": hidden, **held}
    return module(
        f"{_MODELS}.{key}",
        input_layernorm=_rms(hidden, eps, norm),
        post_attention_layernorm=_rms(hidden, eps, norm),
        **held,
    )


def _kimi(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    """No index on the decoder layer, and one spelling of it on each kind of attention."""
    attention = (mla if kind.family == "mla" else kda)(entry, kind, index, rank)
    return _decoder(entry, "kimi_linear:KimiDecoderLayer", self_attn=attention, is_moe=True)


def _kimi_k3(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    if kind.family == "mla":
        attention = mla(entry, kind, index, rank, "kimi_k3:KimiK3MLAAttention")
    else:
        attention = kda(entry, kind, index, rank, "kimi_k3:KimiK3DeltaAttention")
    return _decoder(entry, "kimi_k3:KimiK3DecoderLayer", layer_idx=index, self_attn=attention)


def _gpt_oss(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    window = -1 if kind.sliding_window == "off" else kind.sliding_window - 1
    attention = module(
        f"{_MODELS}.gpt_oss:GptOssAttention",
        **_gqa(entry, kind, index, rank, window),
        # The same on every layer: only the kernel layer knows whether it slides.
        sliding_window_size=127,
        sinks=weight(rank.share(kind.num_heads)),
    )
    return _decoder(entry, "gpt_oss:GptOssDecoderLayer", layer_id=index, self_attn=attention)


def _qwen(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str, release: str) -> Any:
    classes = {
        "qwen3_next": ("Qwen3GatedDeltaNet", "Qwen3HybridLinearDecoderLayer", "Qwen3HybridAttentionDecoderLayer"),
        "qwen3_5": ("Qwen3_5GatedDeltaNet", "Qwen3_5LinearDecoderLayer", "Qwen3_5AttentionDecoderLayer"),
    }[release]
    if kind.family == "gated_delta_net":
        net = gdn(entry, kind, index, rank, f"{release}:{classes[0]}")
        return _decoder(
            entry, f"{release}:{classes[1]}", "GemmaRMSNorm", hidden_size=None, layer_id=index, linear_attn=net
        )
    return _decoder(
        entry,
        f"{release}:{classes[2]}",
        "GemmaRMSNorm",
        attn_tp_rank=rank.rank,
        attn_tp_size=rank.size,
        q_norm=_rms(kind.head_dim, entry.rms_norm_eps, "GemmaRMSNorm"),
        k_norm=_rms(kind.head_dim, entry.rms_norm_eps, "GemmaRMSNorm"),
        rotary_emb=rotary(_ROTARY, kind, "cos_sin_cache"),
        **_gqa(entry, kind, index, rank, -1),
    )


def _longcat(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    hidden, eps = entry.hidden_size, entry.rms_norm_eps
    return module(
        f"{_MODELS}.longcat_flash:LongcatFlashDecoderLayer",
        hidden_size=hidden,
        layer_id=index,
        self_attn=nn.ModuleList([mla(entry, kind, 2 * index + i, rank) for i in range(2)]),
        input_layernorm=nn.ModuleList([_rms(hidden, eps) for _ in range(2)]),
        post_attention_layernorm=nn.ModuleList([_rms(hidden, eps) for _ in range(2)]),
    )


def _text(decoder: Any, key: str, norm: str = "RMSNorm", mlp_key: str = _DEEPSEEK_MLP, **words: str) -> Any:
    built, norms = functools.partial(decoder, **words), functools.partial(_rms, name=norm)
    mlps = functools.partial(mlp, key=mlp_key)
    return lambda entry, rank: text_model(entry, rank, built, f"{_MODELS}.{key}", norms, mlps)


_DEEPSEEK = _text(_deepseek, "deepseek_v2:DeepseekV2Model", decoder_key="deepseek_v2:DeepseekV2DecoderLayer")
MODELS: Models = {
    "deepseek-v2-lite": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3.2": _DEEPSEEK,
    "kimi-k2-instruct": _DEEPSEEK,
    "kimi-k2.5": lambda entry, rank: multimodal(
        _DEEPSEEK(entry, rank), "sglang.srt.layers.attention.vision:VisionAttention"
    ),
    "kimi-linear-48b-a3b": _text(_kimi, "kimi_linear:KimiLinearModel", mlp_key="llama:LlamaMLP"),
    "kimi-k3": _text(_kimi_k3, "kimi_k3:KimiK3LinearModel", mlp_key="kimi_k3:KimiK3MLP"),
    "gpt-oss-20b": _text(_gpt_oss, "gpt_oss:GptOssModel"),
    "qwen3-next-80b-a3b": _text(_qwen, "qwen3_next:Qwen3NextModel", "GemmaRMSNorm", _QWEN_MLP, release="qwen3_next"),
    "qwen3.5-27b": _text(_qwen, "qwen3_5:Qwen3_5ForCausalLM", "GemmaRMSNorm", _QWEN_MLP, release="qwen3_5"),
    "glm-4.7-flash": _text(
        _deepseek,
        "glm4_moe_lite:Glm4MoeLiteModel",
        mlp_key="glm4_moe_lite:Glm4MoeLiteMLP",
        decoder_key="glm4_moe_lite:Glm4MoeLiteDecoderLayer",
    ),
    "longcat-flash": _text(_longcat, "longcat_flash:LongcatFlashModel", mlp_key="longcat_flash:LongcatFlashMLP"),
}
