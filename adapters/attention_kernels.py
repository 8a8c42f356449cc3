"""The layers in which engines call softmax attention's kernel, whatever the model."""

from __future__ import annotations

from . import vocabulary as words
from .base import Adapter

ATTENTION_KERNELS = Adapter(
    "attention_kernels",
    layers={
        "vllm:Attention": words.VLLM_GQA_KERNEL,
        "sglang:RadixAttention": words.SGLANG_GQA_KERNEL,
        "atom:Attention": words.ATOM_GQA_KERNEL,
    },
)
