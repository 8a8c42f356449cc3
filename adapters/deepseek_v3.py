"""DeepSeek-V3: multi-head latent attention with a compressed query.

vLLM, SGLang and ATOM serve every DeepSeek-shaped MLA model with the classes named here.
"""

from __future__ import annotations

from . import vocabulary as words
from . import vocabulary_mlps as mlps
from . import vocabulary_streams as streams
from .base import Adapter

DEEPSEEK_V3 = Adapter(
    "deepseek_v3",
    layers={
        "transformers:DeepseekV3Attention": words.TRANSFORMERS_MLA,
        "transformers:DeepseekV3MLP": mlps.TRANSFORMERS_MLP,
        "transformers:DeepseekV3DecoderLayer": streams.TRANSFORMERS_RESIDUAL,
        "transformers:DeepseekV3Model": streams.final_norm(streams.TRANSFORMERS_RESIDUAL),
        "vllm:DeepseekV2MLAAttention": words.VLLM_MLA,
        "vllm:DeepseekV2Attention": words.VLLM_MLA_EXPANDED,
        "vllm:MultiHeadLatentAttentionWrapper": words.VLLM_MLA_WRAPPER,
        "vllm:MLAAttention": words.VLLM_MLA_KERNEL,
        "vllm:DeepseekV2MLP": mlps.VLLM_MLP,
        "vllm:DeepseekV2DecoderLayer": streams.VLLM_RESIDUAL,
        # A draft model has a class of the same name.
        "vllm.model_executor.models.deepseek_v2:DeepseekV2Model": streams.final_norm(streams.VLLM_RESIDUAL),
        "vllm.model_executor.models.deepseek_eagle:DeepseekV2Model": streams.final_norm(streams.VLLM_RESIDUAL),
        "sglang:DeepseekV2AttentionMLA": words.SGLANG_MLA,
        "sglang:DeepseekV2MLP": mlps.SGLANG_MLP,
        "sglang:DeepseekV2DecoderLayer": streams.SGLANG_RESIDUAL,
        "sglang:DeepseekV2Model": streams.final_norm(streams.SGLANG_RESIDUAL),
        "atom:DeepseekV2MLAAttention": words.ATOM_MLA,
        "atom:MLAAttention": words.ATOM_MLA_KERNEL,
        "atom:DeepseekV2MLP": mlps.ATOM_MLP,
        "atom:DeepseekV2DecoderLayer": streams.ATOM_RESIDUAL,
        "atom:DeepseekV2Model": streams.final_norm(streams.ATOM_RESIDUAL),
    },
)
