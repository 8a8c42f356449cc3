"""Qwen3-Next and Qwen3.5: gated delta nets, with gated full attention on every fourth layer.

All norms but the delta net's own are zero-centred: they add 1 to the weight they store.
"""

from __future__ import annotations

from . import vocabulary as words
from . import vocabulary_mlps as mlps
from . import vocabulary_streams as streams
from .base import Adapter
from .sources import const

_QK = words.qk_norms("eps", weight_offset=const(1.0)) | {"rope": words.TRANSFORMERS_QK_ROPE}
_ENGINES_QK = words.qk_norms("variance_epsilon", weight_offset=const(1.0)) | {"rope": words.QK_ROPE_MODULE}
_EITHER_KIND = streams.TRANSFORMERS_RESIDUAL.but(
    layer_index=["self_attn.layer_idx", "linear_attn.layer_idx"],
    tp_weight=["self_attn.o_proj.in_features", "linear_attn.out_proj.in_features"],
)

_OF_EITHER_KIND = {
    "hidden_size": ["self_attn.hidden_size", "linear_attn.hidden_size"],
    "tp_size": ["self_attn.o_proj.tp_size", "linear_attn.tp_size"],
    "tp_rank": ["self_attn.o_proj.tp_rank", "linear_attn.tp_rank"],
}

_TRANSFORMERS = streams.zero_centred(_EITHER_KIND, "eps")
_VLLM = streams.zero_centred(streams.VLLM_RESIDUAL.but(**_OF_EITHER_KIND), "variance_epsilon")
_SGLANG_FULL = streams.zero_centred(
    streams.SGLANG_RESIDUAL.but(tp_size="attn_tp_size", tp_rank="attn_tp_rank"), "variance_epsilon"
)
_SGLANG_LINEAR = _SGLANG_FULL.but(
    hidden_size="linear_attn.hidden_size",
    layer_index="layer_id",
    tp_size="linear_attn.attn_tp_size",
    tp_rank="linear_attn.attn_tp_rank",
)
_SGLANG_EITHER = _SGLANG_FULL.but(
    hidden_size=["hidden_size", "linear_attn.hidden_size"],
    tp_size=["attn_tp_size", "linear_attn.attn_tp_size"],
    tp_rank=["attn_tp_rank", "linear_attn.attn_tp_rank"],
)
_ATOM = streams.zero_centred(streams.ATOM_RESIDUAL.but(layer_index="layer_idx", **_OF_EITHER_KIND), "variance_epsilon")

QWEN3_NEXT = Adapter(
    "qwen3_next",
    layers={
        "transformers:Qwen3NextGatedDeltaNet": words.TRANSFORMERS_GDN,
        "transformers:Qwen3NextAttention": words.TRANSFORMERS_GQA.but(**_QK),
        "transformers:Qwen3NextMLP": mlps.TRANSFORMERS_MLP,
        "transformers:Qwen3NextDecoderLayer": _TRANSFORMERS,
        "transformers:Qwen3NextModel": streams.final_norm(_TRANSFORMERS),
        "vllm:QwenGatedDeltaNetAttention": words.VLLM_GDN,
        "vllm:Qwen3NextGatedDeltaNet": words.VLLM_GDN,
        "vllm:Qwen3NextAttention": words.VLLM_GQA.but(**_ENGINES_QK),
        "vllm:Qwen2MoeMLP": mlps.VLLM_MLP,
        "vllm:Qwen3NextDecoderLayer": _VLLM,
        "vllm:Qwen3NextModel": streams.final_norm(_VLLM),
        "vllm:Qwen3NextMultiTokenPredictor": streams.final_norm(_VLLM),
        "sglang:Qwen3GatedDeltaNet": words.SGLANG_GDN,
        # There is no attention module here: the decoder layer holds the head counts itself.
        "sglang:Qwen3HybridAttentionDecoderLayer": (words.SGLANG_GQA.but(**_ENGINES_QK), _SGLANG_FULL),
        "sglang:Qwen3HybridLinearDecoderLayer": _SGLANG_LINEAR,
        "sglang:Qwen2MoeMLP": mlps.SGLANG_MLP,
        "sglang:Qwen3NextModel": streams.final_norm(_SGLANG_EITHER),
        "atom:Qwen3NextGatedDeltaNet": words.ATOM_GDN,
        "atom:Qwen3NextAttention": words.ATOM_GQA.but(**_ENGINES_QK | {"rope": words.ATOM_QK_ROPE}),
        "atom:Qwen3NextMLP": mlps.ATOM_MLP,
        "atom:LinearAttention": words.ATOM_GDN_KERNEL,
        "atom:Qwen3NextDecoderLayer": _ATOM,
        "atom:Qwen3NextModel": streams.final_norm(_ATOM),
    },
)
