"""ROCm/ATOM at ffdf3bb5: what its attention and decoder layers hold (atom/models, atom/model_ops).

Plain RMSNorm says `eps`, everything Gemma-like says `variance_epsilon`; linear modules hold this rank's widths, and their
tensor-parallel size and rank. The native MLA kernel is the `impl` of an ordinary `Attention`.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from standins import Models, Rank, layer_class, module, multimodal, rotary, text_model, weight, yarn_mscale

from layerfuse.registry import ModelEntry

_MODELS = "atom.models"
_OPS = "atom.model_ops"


def _rms(width: int, eps: float) -> Any:
    return module(f"{_OPS}.layernorm:RMSNorm", dim=width, eps=eps, weight=weight(width))


def _gemma(width: int, eps: float) -> Any:
    return module(f"{_OPS}.layernorm:GemmaRMSNorm", weight=weight(width), variance_epsilon=eps)


def _linear(kind: str, width_in: int, width_out: int, rank: Rank) -> Any:
    """`input_size` and `output_size` are this rank's: the total is nowhere on the module."""
    return module(
        f"{_OPS}.linear:{kind}", input_size=width_in, output_size=width_out, tp_size=rank.size, tp_rank=rank.rank
    )


def _mla_kernel(kind: Any, index: int, local: int, scale: float, q_lora: int | None, name: str) -> Any:
    impl = module(
        f"{_OPS}.attention_mla:MLAAttention",
        num_heads=local,
        head_dim=kind.kv_lora_rank + kind.qk_rope_head_dim,
        scale=scale,
        num_kv_heads=1,
        q_lora_rank=q_lora,
        kv_lora_rank=kind.kv_lora_rank,
        qk_nope_head_dim=kind.qk_nope_head_dim,
        qk_rope_head_dim=kind.qk_rope_head_dim,
        qk_head_dim=kind.qk_nope_head_dim + kind.qk_rope_head_dim,
        v_head_dim=kind.v_head_dim,
        layer_num=index,
    )
    return module(
        f"{_OPS}.paged_attention:Attention",
        use_mla=True,
        num_heads=local,
        head_dim=kind.kv_lora_rank + kind.qk_rope_head_dim,
        scale=scale,
        num_kv_heads=1,
        layer_num=index,
        layer_name=name,
        sinks=None,
        impl=impl,
    )


def _attention(local: int, kv: int, dim: int, index: int, window: int | None, sinks: Any, name: str) -> Any:
    return module(
        f"{_OPS}.paged_attention:Attention",
        use_mla=False,
        num_heads=local,
        head_dim=dim,
        scale=dim**-0.5,
        num_kv_heads=kv,
        layer_num=index,
        layer_name=name,
        sinks=sinks,
        impl=SimpleNamespace(sliding_window=-1 if window is None else window, num_heads=local, scale=dim**-0.5),
    )


def _mla(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str, eps: float) -> dict[str, Any]:
    q_lora = None if kind.q_lora_rank == "none" else kind.q_lora_rank
    heads, nope, rope, v = kind.num_heads, kind.qk_nope_head_dim, kind.qk_rope_head_dim, kind.v_head_dim
    local = rank.share(heads)
    scaling = (nope + rope) ** -0.5 * yarn_mscale(kind) * yarn_mscale(kind)
    return {
        "hidden_size": entry.hidden_size,
        "num_heads": heads,
        "num_local_heads": local,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v,
        "q_lora_rank": q_lora,
        "kv_lora_rank": kind.kv_lora_rank,
        "scaling": scaling,
        "layer_num": index,
        "fused_qkv_a_proj": _linear(
            "MergedReplicatedLinear", entry.hidden_size, (q_lora or 0) + kind.kv_lora_rank + rope, Rank(1, 0)
        ),
        "q_a_layernorm": _rms(q_lora or 1, eps),
        "kv_a_layernorm": _rms(kind.kv_lora_rank, eps),
        "kv_b_proj": _linear("ColumnParallelLinear", kind.kv_lora_rank, local * (nope + v), rank),
        "o_proj": _linear("RowParallelLinear", local * v, entry.hidden_size, rank),
        "kernel": _mla_kernel(kind, index, local, scaling, q_lora, name),
        "rotary_emb": _rotary(kind),
    }


def _rotary(kind: Any) -> Any:
    """Kimi-K3's is a module that turns nothing, of the same width."""
    if kind.rope == "none":
        return module(f"{_MODELS}.kimi_k3:_NoPositionalRotaryEmbedding", rotary_dim=kind.qk_rope_head_dim)
    return rotary("aiter.rotary_embedding:RotaryEmbedding", kind, "cos_cache", "sin_cache")


def _decoder(key: str, norm: Any, entry: ModelEntry, **held: Any) -> Any:
    hidden, eps = entry.hidden_size, entry.rms_norm_eps
    return module(
        f"{_MODELS}.{key}", input_layernorm=norm(hidden, eps), post_attention_layernorm=norm(hidden, eps), **held
    )


def _deepseek(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    held = _mla(entry, kind, index, rank, f"{name}.self_attn", entry.rms_norm_eps)
    attention = module(
        f"{_MODELS}.deepseek_v2:DeepseekV2MLAAttention",
        qk_head_dim=kind.qk_nope_head_dim + kind.qk_rope_head_dim,
        indexer=None,
        mla_attn=held.pop("kernel"),
        **held,
    )
    return _decoder(
        "deepseek_v2:DeepseekV2DecoderLayer",
        _rms,
        entry,
        hidden_size=entry.hidden_size,
        layer_idx=index,
        self_attn=attention,
    )


def _kimi_k3(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    if kind.family == "mla":
        # The latent norms' epsilon is written in the code; the query head's width is called q_head_dim here.
        held = _mla(entry, kind, index, rank, f"{name}.self_attn", 1e-6)
        attention = module(
            f"{_MODELS}.kimi_k3:KimiFullAttention",
            config=object(),
            q_head_dim=kind.qk_nope_head_dim + kind.qk_rope_head_dim,
            tp_size=rank.size,
            attn=held.pop("kernel"),
            **held,
        )
    else:
        attention = _kda(entry, kind, index, rank, f"{name}.self_attn")
    return _decoder(
        "kimi_k3:KimiDecoderLayer", _rms, entry, hidden_size=entry.hidden_size, layer_idx=index, self_attn=attention
    )


def _kda(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    heads, dim = kind.num_v_heads, kind.head_v_dim
    local = rank.share(heads)
    return module(
        f"{_MODELS}.kimi_k3:KimiKDAAttention",
        config=object(),
        hidden_size=entry.hidden_size,
        num_heads=heads,
        head_dim=dim,
        tp_size=rank.size,
        tp_rank=rank.rank,
        num_local_heads=local,
        proj_size=heads * dim,
        local_proj_size=local * dim,
        conv_kernel_size=kind.conv_kernel_size,
        layer_num=index,
        layer_name=name,
        activation="silu",
        # Gated by a sigmoid that no attribute names.
        o_norm=module(f"{_MODELS}.kimi_k3:KimiRMSNormGated", weight=weight(dim), variance_epsilon=entry.rms_norm_eps),
        o_proj=_linear("RowParallelLinear", local * dim, entry.hidden_size, rank),
    )


def _gpt_oss(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    local, dim = rank.share(kind.num_heads), kind.head_dim
    # A plain floor division, also where there are more ranks than KV heads.
    kv = kind.num_kv_heads // rank.size
    sinks = weight(local)
    window = None if kind.sliding_window == "off" else kind.sliding_window
    attention = module(
        f"{_MODELS}.gpt_oss:OAIAttention",
        layer_idx=index,
        head_dim=dim,
        num_attention_heads=kind.num_heads,
        num_key_value_heads=kind.num_kv_heads,
        hidden_size=entry.hidden_size,
        sinks=sinks,
        scaling=dim**-0.5,
        num_local_attention_heads=local,
        num_local_key_value_heads=kv,
        o_proj=_linear("RowParallelLinear", local * dim, entry.hidden_size, rank),
        attn=_attention(local, kv, dim, index, window, sinks, f"{name}.self_attn.attn"),
    )
    return _decoder(
        "gpt_oss:TransformerBlock",
        lambda width, _: _rms(width, 1e-5),
        entry,
        hidden_size=entry.hidden_size,
        layer_idx=index,
        tp_size=rank.size,
        self_attn=attention,
    )


def _qwen(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str, release: str) -> Any:
    base = layer_class(f"{_MODELS}.qwen3_next:Qwen3NextDecoderLayer")
    bases = () if release == "qwen3_next" else (base,)
    key = "qwen3_next:Qwen3NextDecoderLayer" if release == "qwen3_next" else "qwen3_5:Qwen3_5DecoderLayer"
    held: dict[str, Any] = {"layer_idx": index}
    if release == "qwen3_next":  # Qwen3.5's does not call its parent's constructor, and has no hidden_size
        held["hidden_size"] = entry.hidden_size
    if kind.family == "gated_delta_net":
        held["linear_attn"] = _gdn(entry, kind, index, rank, f"{name}.linear_attn", release)
    else:
        held["self_attn"] = _full(entry, kind, index, rank, f"{name}.self_attn")
    norm = {"input_layernorm": _gemma(entry.hidden_size, entry.rms_norm_eps)}
    norm["post_attention_layernorm"] = _gemma(entry.hidden_size, entry.rms_norm_eps)
    return module(f"{_MODELS}.{key}", *bases, **norm, **held)


def _gdn(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str, release: str) -> Any:
    base = layer_class(f"{_MODELS}.qwen3_next:Qwen3NextGatedDeltaNet")
    counts = {"num_v_heads": kind.num_v_heads, "num_k_heads": kind.num_k_heads}
    widths = {"head_k_dim": kind.head_k_dim, "head_v_dim": kind.head_v_dim}
    return module(
        f"{_MODELS}.qwen3_next:Qwen3NextGatedDeltaNet"
        if release == "qwen3_next"
        else f"{_MODELS}.qwen3_5:Qwen3_5GatedDeltaNet",
        *(() if release == "qwen3_next" else (base,)),
        tp_size=rank.size,
        tp_rank=rank.rank,
        hidden_size=entry.hidden_size,
        conv_kernel_size=kind.conv_kernel_size,
        layer_idx=index,
        activation="silu",
        norm=module(
            f"{_OPS}.layernorm:RMSNormGated",
            weight=weight(kind.head_v_dim),
            eps=entry.rms_norm_eps,
            group_size=None,
            norm_before_gate=True,
        ),
        # The whole model's counts once more, one level down.
        attn=module(
            f"{_OPS}.base_attention:LinearAttention",
            hidden_size=entry.hidden_size,
            layer_num=index,
            impl=SimpleNamespace(tp_size=rank.size, **counts),
            **counts,
            **widths,
        ),
        **counts,
        **widths,
    )


def _full(entry: ModelEntry, kind: Any, index: int, rank: Rank, name: str) -> Any:
    local, kv, dim = rank.share(kind.num_heads), rank.kv_share(kind.num_kv_heads), kind.head_dim
    return module(
        f"{_MODELS}.qwen3_next:Qwen3NextAttention",
        config=object(),
        hidden_size=entry.hidden_size,
        total_num_heads=kind.num_heads,
        num_heads=local,
        total_num_kv_heads=kind.num_kv_heads,
        num_kv_heads=kv,
        head_dim=dim,
        scaling=dim**-0.5,
        q_norm=_gemma(dim, entry.rms_norm_eps),
        k_norm=_gemma(dim, entry.rms_norm_eps),
        rotary_emb=_rotary(kind),
        o_proj=_linear("RowParallelLinear", local * dim, entry.hidden_size, rank),
        attn=_attention(local, kv, dim, index, None, None, name),
    )


def mlp(entry: ModelEntry, kind: Any, rank: Rank, key: str) -> Any:
    hidden, local = entry.hidden_size, rank.share(kind.intermediate_size)
    activation = {"silu": f"{_OPS}.activation:SiluAndMul", "situ": f"{_MODELS}.kimi_k3:SituAndMul"}[kind.activation]
    return module(
        f"{_MODELS}.{key}",
        gate_up_proj=_linear("MergedColumnParallelLinear", hidden, 2 * local, rank),
        down_proj=_linear("RowParallelLinear", local, hidden, rank),
        act_fn=module(activation),
    )


def _text(decoder: Any, key: str, norm: Any = _rms, mlp_key: str = "deepseek_v2:DeepseekV2MLP", **words: str) -> Any:
    built, mlps = functools.partial(decoder, **words), functools.partial(mlp, key=mlp_key)
    return lambda entry, rank: text_model(entry, rank, built, f"{_MODELS}.{key}", norm, mlps)


_DEEPSEEK = _text(_deepseek, "deepseek_v2:DeepseekV2Model")
MODELS: Models = {
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3.2": _DEEPSEEK,
    "kimi-k2-instruct": _DEEPSEEK,
    "kimi-k2.5": lambda entry, rank: multimodal(_DEEPSEEK(entry, rank), "atom.models.kimi_k25:VisionAttention"),
    "glm-5": _DEEPSEEK,
    "kimi-k3": _text(_kimi_k3, "kimi_k3:KimiLinearModel", mlp_key="kimi_k3:KimiMLP"),
    "gpt-oss-20b": _text(_gpt_oss, "gpt_oss:GptOssModel", lambda width, _: _rms(width, 1e-5)),
    "qwen3-next-80b-a3b": _text(
        _qwen, "qwen3_next:Qwen3NextModel", _gemma, "qwen3_next:Qwen3NextMLP", release="qwen3_next"
    ),
    # Its own class derives from this one.
    "qwen3.5-27b": _text(_qwen, "qwen3_next:Qwen3NextModel", _gemma, "qwen3_next:Qwen3NextMLP", release="qwen3_5"),
}
