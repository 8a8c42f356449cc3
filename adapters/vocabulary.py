"""The vocabularies: how each engine names the parts of an MLA layer, a gated delta net, a GQA layer, a decoder layer.

Read from transformers 5.23, vLLM 0.33, SGLang 0.5.23 and ROCm/ATOM at ffdf3bb5 (August 2026). An architecture's
adapter says which of its classes speaks which of these, and with what differences.
"""

from __future__ import annotations

from typing import Any

from .base import Facts
from .rope_source import rope
from .sources import const, gated_norm, norm
from .specs import (
    GatedDeltaNetKernelSpec,
    GatedDeltaNetSpec,
    GQAKernelSpec,
    GQASpec,
    MLAKernelSpec,
    MLASpec,
)


def _read_as(path: str, conversion: str) -> dict[str, Any]:
    return {"path": path, "as": conversion}


def _latent_norms(epsilon: str, *, kv_consumers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of the two, engines put only a prefill's key/value latent through its up-projection, inside their attention."""
    return {
        "q_norm": norm("q_a_layernorm", epsilon=epsilon, consumers=["q_b_proj"]),
        "kv_norm": norm("kv_a_layernorm", epsilon=epsilon, consumers=list(kv_consumers)),
    }


def _same(*names: str) -> dict[str, Any]:
    return {name: name for name in names}


# ---- multi-head latent attention -------------------------------------------------------------------------------------

_MLA_DIMS = _same("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_FROM_THE_MODEL = rope(
    # The model computes cos and sin once and hands them to every layer.
    width="qk_rope_head_dim",
    interleaved="config.rope_interleave",
    interleaved_out=const(False),
    attention_scaling=_read_as("config", "rope_scaling"),
    table=const("values"),
)


def rope_module(module: str, table: str) -> dict[str, Any]:
    """A rotary module of the engine's own. One that does not say what cos and sin are multiplied with does not do it."""
    return rope(
        module,
        width="rotary_dim",
        interleaved=_read_as("is_neox_style", "not"),
        attention_scaling=["mscale", const(1.0)],
        table=const(table),
    )


TRANSFORMERS_MLA = Facts(
    MLASpec,
    _MLA_DIMS
    | _latent_norms("variance_epsilon", kv_consumers=("kv_b_proj",))
    | _same("num_heads", "hidden_size")
    | {
        "rope": _FROM_THE_MODEL,
        "layer_index": "layer_idx",
        "softmax_scale": "scaling",
        # Attributes stay the whole model's under transformers' tensor parallelism; only the weight is a shard.
        # A quantised one may be packed; then the other tells.
        "tp_weight": ["kv_b_proj.out_features", "o_proj.in_features"],
    },
)

VLLM_MLA = Facts(
    MLASpec,
    _MLA_DIMS
    | _latent_norms("variance_epsilon")
    | _same("num_heads", "num_local_heads", "hidden_size")
    | {
        # The wrapper has it in every layer; Kimi's, which have no rope, hold None there and nothing on themselves.
        "rope": rope_module("mla_attn.rotary_emb", "cos_sin"),
        # The module keeps no index; its wrapper keeps the name. LongCat holds two attentions per decoder layer.
        "layer_index": _read_as("mla_attn.prefix", "name_index_of_pairs"),
        "softmax_scale": "scaling",
        "tp_rank": "o_proj.tp_rank",
    },
)
VLLM_MLA_WRAPPER = VLLM_MLA.but(
    # One level down, `num_heads` is this rank's.
    num_heads=None,
    num_local_heads="num_heads",
    layer_index=_read_as("prefix", "name_index_of_pairs"),
    softmax_scale="mla_attn.scale",
    tp_size="o_proj.tp_size",
    rope=rope_module("rotary_emb", "cos_sin"),
)
VLLM_MLA_ITSELF = VLLM_MLA.but(
    layer_index=_read_as("layer_name", "name_index"),
    softmax_scale="scale",
    rope=rope_module("rotary_emb", "cos_sin"),
)
"""vLLM's Kimi MLA on CUDA and CPU, which is its own kernel layer."""

VLLM_MLA_EXPANDED = VLLM_MLA.but(
    layer_index=_read_as("attn.layer_name", "name_index_of_pairs"), rope=rope_module("rotary_emb", "cos_sin")
)
"""vLLM's DeepSeek attention with MLA switched off: the same projections, ordinary attention inside."""

VLLM_MLA_KERNEL = Facts(
    MLAKernelSpec,
    _MLA_DIMS
    | {
        "num_local_heads": "num_heads",
        "softmax_scale": "scale",
        "layer_index": _read_as("layer_name", "name_index_of_pairs"),
        "outer": _read_as("layer_name", "parent_name"),
    },
)

SGLANG_MLA = VLLM_MLA.but(
    # None where the layer was built to skip it.
    rope=rope_module("rotary_emb", "cos_sin"),
    layer_index="layer_id",
    tp_rank="o_proj.tp_group.rank_in_group",
)

ATOM_MLA = VLLM_MLA.but(
    **_latent_norms("eps"),
    rope=rope_module("rotary_emb", "cos_and_sin"),
    layer_index="layer_num",
    # The output projection may be an Identity (Kimi-K3); the latent's up-projection is always there.
    tp_rank="kv_b_proj.tp_rank",
)
ATOM_MLA_KERNEL = VLLM_MLA_KERNEL.but(
    layer_index="layer_num",
    outer=const("the attention layer that holds it (DeepseekV2MLAAttention or KimiFullAttention)"),
)

# ---- query and key ---------------------------------------------------------------------------------------------------


def qk_norms(epsilon: str, **norms: Any) -> dict[str, Any]:
    """The norms of each query and key head; what reads them is the rope."""
    return {name: norm(name, epsilon=epsilon, **norms) for name in ("q_norm", "k_norm")}


TRANSFORMERS_QK_ROPE = rope(
    width=_read_as("config", "rope_width"),
    interleaved=const(False),
    attention_scaling=_read_as("config", "rope_scaling"),
    table=const("values"),
)
"""Of a model that computes cos and sin once, as most of transformers."""
QK_ROPE_MODULE = rope_module("rotary_emb", "cos_sin")
"""Of vLLM and SGLang."""
ATOM_QK_ROPE = rope_module("rotary_emb", "cos_and_sin")

# ---- gated delta nets ------------------------------------------------------------------------------------------------

_KDA_HEADS = {
    "num_k_heads": "num_heads",
    "num_v_heads": "num_heads",
    "head_k_dim": "head_dim",
    "head_v_dim": "head_dim",
}
"""Kimi's delta attention has one head count and one head width for queries, keys and values."""

TRANSFORMERS_KDA = Facts(
    GatedDeltaNetSpec,
    _KDA_HEADS
    | _same("conv_kernel_size", "hidden_size")
    | {
        "layer_index": "layer_idx",
        "output_norm": gated_norm("o_norm", epsilon="variance_epsilon", consumers=["o_proj"]),
        "tp_weight": "o_proj.in_features",
    },
)
VLLM_KDA = TRANSFORMERS_KDA.but(
    num_local_k_heads="local_num_heads",
    num_local_v_heads="local_num_heads",
    conv_kernel_size="conv_size",
    output_norm=gated_norm("o_norm", epsilon="eps", consumers=["o_proj"]),
    tp_weight=None,
    tp_size="tp_size",
    tp_rank="tp_rank",
)
SGLANG_KDA = VLLM_KDA.but(
    # Sharded by a degree of its own under data-parallel attention; older releases had only the second name.
    tp_size=["shard_tp_size", "attn_tp_size"],
    tp_rank="o_proj.tp_group.rank_in_group",
)
ATOM_KDA = VLLM_KDA.but(
    num_local_k_heads="num_local_heads",
    num_local_v_heads="num_local_heads",
    conv_kernel_size="conv_kernel_size",
    layer_index="layer_num",
    output_norm=gated_norm("o_norm", epsilon="variance_epsilon", activation=const("sigmoid"), consumers=["o_proj"]),
)

TRANSFORMERS_GDN = Facts(
    GatedDeltaNetSpec,
    _same("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "hidden_size")
    | {
        "layer_index": "layer_idx",
        # transformers 4 with flash-linear-attention installed puts that library's norm here, which says `eps`.
        "output_norm": gated_norm("norm", epsilon=["variance_epsilon", "eps"], consumers=["out_proj"]),
        "tp_weight": "out_proj.in_features",
    },
)
VLLM_GDN = TRANSFORMERS_GDN.but(
    tp_weight=None,
    tp_size="tp_size",
    tp_rank="tp_rank",
    output_norm=gated_norm(
        "norm", epsilon="eps", norm_before_gate="norm_before_gate", group_size="group_size", consumers=["out_proj"]
    ),
)
SGLANG_GDN = VLLM_GDN.but(
    layer_index="layer_id",
    tp_size="attn_tp_size",
    tp_rank="attn_tp_rank",
    # The fused norm that is usually built holds neither order nor groups: it norms first, over one group.
    output_norm=gated_norm(
        "norm",
        epsilon="eps",
        norm_before_gate=["norm_before_gate", const(True)],
        group_size=["group_size", const(None)],
        consumers=["out_proj"],
    ),
)
ATOM_GDN = VLLM_GDN.but(output_norm={**VLLM_GDN.words["output_norm"], "activation": const("silu")})
SGLANG_GDN_KERNEL = Facts(
    GatedDeltaNetKernelSpec,
    _same("head_k_dim", "head_v_dim")
    | {
        # Unlike on the layer around it, these are this rank's.
        "num_local_k_heads": "num_k_heads",
        "num_local_v_heads": "num_v_heads",
        "layer_index": "layer_id",
        "outer": const("the delta-net layer whose .attn it is"),
    },
)
ATOM_GDN_KERNEL = SGLANG_GDN_KERNEL.but(
    # This one keeps the whole model's, and divides by the size its kernel object holds.
    num_local_k_heads="num_k_heads / impl.tp_size",
    num_local_v_heads="num_v_heads / impl.tp_size",
    layer_index="layer_num",
)

# ---- grouped-query attention -----------------------------------------------------------------------------------------

TRANSFORMERS_GQA = Facts(
    GQASpec,
    {
        # The layer holds no head counts. Its query projection may be twice as wide (output gate), so only the
        # config, or the output projection, tells.
        "num_heads": ["config.num_attention_heads", "o_proj.in_features / head_dim"],
        "num_kv_heads": "config.num_key_value_heads",
        "head_dim": "head_dim",
        "v_head_dim": "head_dim",
        "softmax_scale": "scaling",
        "sliding_window": const(None),
        "has_sinks": const(False),
        "hidden_size": "config.hidden_size",
        "layer_index": "layer_idx",
        "tp_weight": "o_proj.in_features",
    },
)
VLLM_GQA = Facts(
    GQASpec,
    _same("head_dim", "hidden_size")
    | {
        # Where a layer holds `total_num_heads`, its `num_heads` is this rank's.
        "num_heads": "total_num_heads",
        "num_local_heads": "num_heads",
        "num_kv_heads": "total_num_kv_heads",
        "num_local_kv_heads": "num_kv_heads",
        "v_head_dim": "attn.head_size_v",
        "softmax_scale": "scaling",
        "sliding_window": "attn.sliding_window",
        "has_sinks": "attn.has_sink",
        "layer_index": _read_as("attn.layer_name", "name_index"),
        "tp_rank": "o_proj.tp_rank",
    },
)
VLLM_GPT_OSS = VLLM_GQA.but(
    num_heads="num_attention_heads",
    num_local_heads="num_local_attention_heads",
    num_kv_heads="num_key_value_heads",
    # A plain floor division: 0 when ranks outnumber KV heads, which the spec then refuses by name.
    num_local_kv_heads="num_local_key_value_heads",
    has_sinks=_read_as("sinks", "present"),
    layer_index="layer_idx",
)
ATOM_GPT_OSS = VLLM_GPT_OSS.but(v_head_dim="head_dim", sliding_window="attn.impl.sliding_window")
SGLANG_GQA = VLLM_GQA.but(
    v_head_dim="attn.v_head_dim",
    sliding_window=_read_as("attn.sliding_window_size", "window_before"),
    has_sinks=const(False),
    layer_index="layer_id",
    tp_rank="o_proj.tp_group.rank_in_group",
)
ATOM_GQA = VLLM_GQA.but(
    v_head_dim="head_dim",
    sliding_window="attn.impl.sliding_window",
    has_sinks=_read_as("attn.sinks", "present"),
    layer_index="attn.layer_num",
)

VLLM_GQA_KERNEL = Facts(
    GQAKernelSpec,
    {
        "num_local_heads": "num_heads",
        "num_local_kv_heads": "num_kv_heads",
        "head_dim": "head_size",
        "v_head_dim": "head_size_v",
        "softmax_scale": "impl.scale",
        "sliding_window": "sliding_window",
        "layer_index": _read_as("layer_name", "name_index"),
        "outer": _read_as("layer_name", "parent_name"),
    },
)
SGLANG_GQA_KERNEL = VLLM_GQA_KERNEL.but(
    num_local_heads="tp_q_head_num",
    num_local_kv_heads="tp_k_head_num",
    **_same("head_dim", "v_head_dim"),
    softmax_scale="scaling",
    sliding_window=_read_as("sliding_window_size", "window_before"),
    layer_index="layer_id",
    outer=const("the attention layer whose .attn, .attn_mqa or .attn_mha it is"),
)
ATOM_GQA_KERNEL = VLLM_GQA_KERNEL.but(
    head_dim="head_dim",
    # The same class wraps MLA in its absorbed form, whose value is the latent and which has no window.
    v_head_dim=["impl.kv_lora_rank", "head_dim"],
    softmax_scale="scale",
    sliding_window=["impl.sliding_window", _read_as("impl.kv_lora_rank", "none")],
    layer_index="layer_num",
    outer=const("the attention layer whose .attn it is"),
)
