"""Kimi-K2 and the K2.5 multimodal wrapper: DeepSeek-V3's layers, with half the heads.

Every engine builds them from the DeepSeek classes, so this adapter adds only what must be left alone.
"""

from __future__ import annotations

from .base import Adapter

KIMI_K2 = Adapter(
    "kimi_k2",
    layers={},
    # The vision tower's attention has num_heads, head_dim and scaling too, and is none of ours.
    ignored=[
        "transformers:Kimi_K25VisionAttention",
        "vllm:MMEncoderAttention",
        "sglang:VisionAttention",
        "atom:VisionAttention",
    ],
)
