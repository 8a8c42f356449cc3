"""The few vLLM 0.33 layers that a trap is about, as stand-ins; tests/engines reads the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from standins import layer_class, module, weight

_V = "vllm.model_executor"
KERNEL = f"{_V}.layers.attention.mla_attention:MLAAttention"
SPLIT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_head_dim": 192}


def rms(width: int, eps: float = 1e-6) -> Any:
    return module(f"{_V}.layers.layernorm:RMSNorm", weight=weight(width), variance_epsilon=eps, hidden_size=width)


def linear(tp: int, rank: int, **sizes: int) -> Any:
    return module(f"{_V}.layers.linear:RowParallelLinear", tp_size=tp, tp_rank=rank, **sizes)


def rotary(**changes: Any) -> Any:
    """`RotaryEmbedding`, without a factor of its own."""
    held = {"head_size": 64, "rotary_dim": 64, "is_neox_style": False, "cos_sin_cache": weight(4096, 64), **changes}
    return module(f"{_V}.layers.rotary_embedding.base:RotaryEmbedding", **held)


def mla(*, tp: int = 8, rank: int = 5, total: int = 128, q_lora: int | None = 1536, index: int = 3) -> Any:
    """`DeepseekV2MLAAttention`, its wrapper, and the kernel layer inside that."""
    local, name = total // tp, f"model.layers.{index}.self_attn"
    shared: dict[str, Any] = {"kv_a_layernorm": rms(512), "kv_b_proj": linear(tp, rank), "o_proj": linear(tp, rank)}
    query = {} if q_lora is None else {"q_a_layernorm": rms(q_lora), "q_b_proj": linear(tp, rank)}
    kernel = module(
        KERNEL, num_heads=local, q_lora_rank=q_lora, scale=0.1, layer_name=f"{name}.attn", num_kv_heads=1, **SPLIT
    )
    wrapper = module(
        f"{_V}.layers.mla:MultiHeadLatentAttentionWrapper",
        num_heads=local,
        hidden_size=7168,
        q_lora_rank=q_lora,
        prefix=name,
        mla_attn=kernel,
        rotary_emb=rotary(),
        dcp_q_replicate=False,
        # The same modules once more; those that do not exist are None here, and absent on the layer outside.
        **{"q_a_layernorm": None, "q_b_proj": None, "q_proj": None, **query},
        **shared,
        **SPLIT,
    )
    return module(
        f"{_V}.models.deepseek_v2:DeepseekV2MLAAttention",
        num_heads=total,
        num_local_heads=local,
        hidden_size=7168,
        q_lora_rank=q_lora,
        scaling=0.1,
        rotary_emb=wrapper.rotary_emb,
        mla_attn=wrapper,
        **query,
        **shared,
        **SPLIT,
    )


def sparse_mla(*, tp: int = 8, rank: int = 5, total: int = 128) -> Any:
    """`DeepseekV32Attention`: a kernel layer by its base, where both counts are this rank's."""
    local = total // tp
    return module(
        "vllm.models.deepseek_v32.attention:DeepseekV32Attention",
        layer_class(KERNEL),
        num_heads=local,
        num_local_heads=local,
        q_lora_rank=1536,
        scale=0.1,
        layer_name="model.layers.3.self_attn.attn",
        q_a_layernorm=rms(1536),
        kv_a_layernorm=rms(512),
        o_proj=linear(tp, rank, output_size=7168, input_size=total * 128),
        indexer=None,
        rotary_emb=rotary(),
        **SPLIT,
    )


def kda(*, tp: int = 8, rank: int = 5, total: int = 32) -> Any:
    return module(
        f"{_V}.layers.mamba.gdn.kimi_gdn_linear_attn:KimiGatedDeltaNetAttention",
        num_heads=total,
        local_num_heads=total // tp,
        head_dim=128,
        conv_size=4,
        hidden_size=2304,
        layer_idx=0,
        tp_size=tp,
        tp_rank=rank,
        layer_norm_epsilon=1e-6,
        activation="silu",
        model_config=SimpleNamespace(dtype="bfloat16"),
        o_norm=module(
            "vllm.third_party.flash_linear_attention.ops.kda:FusedRMSNormGated",
            weight=weight(128),
            eps=1e-5,
            activation="sigmoid",
        ),
    )


def attention(
    *, local: int = 8, kv: int = 1, dim: int = 64, window: Any = None, name: str = "model.layers.0.attn.attn"
) -> Any:
    """The kernel layer of GQA. Its scale is only on the object that runs it."""
    return module(
        f"{_V}.layers.attention.attention:Attention",
        num_heads=local,
        num_kv_heads=kv,
        head_size=dim,
        head_size_v=dim,
        sliding_window=window,
        layer_name=name,
        has_sink=True,
        impl=SimpleNamespace(scale=dim**-0.5, sliding_window=(-1, -1) if window is None else (window - 1, 0)),
    )


def gpt_oss(*, tp: int = 8, rank: int = 5, window: int | None = 128) -> Any:
    return module(
        f"{_V}.models.gpt_oss:OAIAttention",
        layer_idx=0,
        head_dim=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        num_local_attention_heads=64 // tp,
        num_local_key_value_heads=8 // tp,
        hidden_size=2880,
        scaling=0.125,
        sinks=weight(64 // tp),
        o_proj=linear(tp, rank),
        attn=attention(local=64 // tp, kv=8 // tp, window=window),
    )


def mlp(*, tp: int = 8, rank: int = 5, width: int = 18432, hidden: int = 7168) -> Any:
    """`DeepseekV2MLP`: gate and up are one linear, so its widths are twice the MLP's."""
    return module(
        f"{_V}.models.deepseek_v2:DeepseekV2MLP",
        gate_up_proj=linear(
            tp, rank, input_size=hidden, output_size=2 * width, output_size_per_partition=2 * width // tp
        ),
        down_proj=linear(tp, rank, input_size=width, output_size=hidden, input_size_per_partition=width // tp),
        act_fn=module(f"{_V}.layers.activation:SiluAndMul"),
    )
