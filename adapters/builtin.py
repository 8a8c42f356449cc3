"""The adapters that come with the library. Relatives that share their classes are declared in models.toml."""

from __future__ import annotations

from .attention_kernels import ATTENTION_KERNELS
from .base import Adapter
from .decoders import DECODERS
from .deepseek_v3 import DEEPSEEK_V3
from .gpt_oss import GPT_OSS
from .hybrids import HYBRIDS
from .kimi_k2 import KIMI_K2
from .kimi_linear import KIMI_LINEAR
from .layer_norm_decoders import LAYER_NORM_DECODERS
from .qwen3_next import QWEN3_NEXT
from .sglang_decoders import SGLANG_DECODERS
from .sglang_hybrids import SGLANG_HYBRIDS
from .vllm_decoders import VLLM_DECODERS
from .vllm_hybrids import VLLM_HYBRIDS
from .vllm_uncompiled import VLLM_UNCOMPILED

BUILTIN: tuple[Adapter, ...] = (
    DEEPSEEK_V3,
    KIMI_K2,
    KIMI_LINEAR,
    GPT_OSS,
    ATTENTION_KERNELS,
    QWEN3_NEXT,
    DECODERS,
    LAYER_NORM_DECODERS,
    HYBRIDS,
    VLLM_DECODERS,
    VLLM_HYBRIDS,
    VLLM_UNCOMPILED,
    SGLANG_DECODERS,
    SGLANG_HYBRIDS,
)
"""In the order they are registered."""
