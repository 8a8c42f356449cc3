"""GPT-OSS: grouped-query attention with learned sinks, a sliding window on every other layer."""

from __future__ import annotations

from . import vocabulary as words
from . import vocabulary_streams as streams
from .base import Adapter

_VLLM_BLOCK = streams.VLLM_RESIDUAL.but(
    hidden_size="attn.hidden_size",
    tp_size="attn.o_proj.tp_size",
    tp_rank="attn.o_proj.tp_rank",
    **streams.norms("variance_epsilon", ["attn.qkv_proj"], []),
)
_SGLANG_DECODER = streams.SGLANG_RESIDUAL.but(tp_size="self_attn.total_num_heads / self_attn.num_heads")

GPT_OSS = Adapter(
    "gpt_oss",
    layers={
        "transformers:GptOssAttention": words.TRANSFORMERS_GQA.but(
            sliding_window="sliding_window", has_sinks={"path": "sinks", "as": "present"}
        ),
        "transformers:GptOssDecoderLayer": streams.TRANSFORMERS_RESIDUAL,
        "transformers:GptOssModel": streams.final_norm(streams.TRANSFORMERS_RESIDUAL),
        "vllm:OAIAttention": words.VLLM_GPT_OSS,
        "vllm.model_executor.models.gpt_oss:TransformerBlock": _VLLM_BLOCK,
        "vllm:GptOssModel": streams.final_norm(_VLLM_BLOCK),
        "sglang:GptOssAttention": words.SGLANG_GQA.but(has_sinks={"path": "sinks", "as": "present"}),
        "sglang:GptOssDecoderLayer": _SGLANG_DECODER,
        "sglang:GptOssModel": streams.final_norm(_SGLANG_DECODER),
        "atom:OAIAttention": words.ATOM_GPT_OSS,
        "atom.models.gpt_oss:TransformerBlock": streams.ATOM_RESIDUAL.but(layer_index="layer_idx"),
        "atom:GptOssModel": streams.final_norm(streams.ATOM_RESIDUAL),
    },
)
