"""Kimi-Linear and Kimi-K3: Kimi delta attention on most layers, MLA without rotary embedding on the others.

Which kind a layer is, only its class says: `num_heads` on both may be the same number by accident.
"""

from __future__ import annotations

from . import vocabulary as words
from . import vocabulary_mlps as mlps
from . import vocabulary_streams as streams
from .base import Adapter
from .sources import const

KIMI_LINEAR = Adapter(
    "kimi_linear",
    layers={
        "transformers:KimiLinearAttention": words.TRANSFORMERS_MLA.but(rope=const(None)),
        "transformers:KimiLinearDeltaAttention": words.TRANSFORMERS_KDA,
        "transformers:KimiLinearMLP": mlps.TRANSFORMERS_MLP,
        "transformers:KimiLinearDecoderLayer": streams.TRANSFORMERS_RESIDUAL,
        "transformers:KimiLinearModel": streams.final_norm(streams.TRANSFORMERS_RESIDUAL),
        "vllm:MultiHeadLatentAttention": words.VLLM_MLA_ITSELF,
        "vllm:KimiMLAAttention": words.VLLM_MLA,
        "vllm:KimiGatedDeltaNetAttention": words.VLLM_KDA,
        "vllm:KimiK3DeltaAttention": words.VLLM_KDA,
        "vllm:KimiMLP": mlps.VLLM_MLP,
        "sglang:KimiDeltaAttention": words.SGLANG_KDA,
        "sglang:KimiK3DeltaAttention": words.SGLANG_KDA.but(tp_size="attn_tp_size", tp_rank="attn_tp_rank"),
        "sglang:RadixLinearAttention": words.SGLANG_GDN_KERNEL,
        # SGLang builds Kimi-Linear with this one.
        "sglang.srt.models.llama:LlamaMLP": mlps.SGLANG_MLP,
        "sglang:KimiK3MLP": mlps.SGLANG_MLP,
        # The decoder layer keeps no index of its own, and each kind of attention spells it differently.
        "sglang:KimiDecoderLayer": streams.SGLANG_RESIDUAL.but(
            layer_index=["self_attn.layer_id", "self_attn.layer_idx"]
        ),
        "sglang:KimiLinearModel": streams.final_norm(streams.SGLANG_RESIDUAL),
        # Its rotary module turns nothing, and says the width all the same.
        "atom:KimiFullAttention": words.ATOM_MLA.but(tp_size="tp_size", rope=const(None)),
        "atom:KimiKDAAttention": words.ATOM_KDA,
        "atom:KimiMLP": mlps.ATOM_MLP,
        "atom:KimiDecoderLayer": streams.ATOM_RESIDUAL,
        "atom:KimiLinearModel": streams.final_norm(streams.ATOM_RESIDUAL),
    },
)
