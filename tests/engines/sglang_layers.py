"""Real SGLang attention layers with the dimensions of published checkpoints, at any tensor-parallel size and rank.

    model = build_model("kimi-linear", tp=8, rank=5)      # every layer, on the meta device, in well under a second

The counterpart of ``vllm_layers``, with the same names.  SGLang's Qwen models have no module for full attention: there
the decoder layer itself is the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_host import model_config, published_config, server_args, sglang_parallel, without_gpu  # isort: skip  (before SGLang)
import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How to build one model: the published config, and what must differ in it for SGLang to read it."""

    checkpoint: str
    patch: dict[str, Any] = field(default_factory=dict)
    tp_sizes: tuple[int, ...] = (1, 2, 8)


MODELS: dict[str, Model] = {
    "deepseek-v3": Model(checkpoint="deepseek-v3"),
    "deepseek-v2-lite": Model(checkpoint="deepseek-v2-lite"),
    "deepseek-v3.2": Model(checkpoint="deepseek-v3.2"),
    "kimi-k2": Model(checkpoint="kimi-k2"),
    "kimi-k2.5": Model(
        checkpoint="kimi-k2.5",
        # A vision tower is always built; any will do.
        patch={
            "vision_config": {
                "vt_hidden_size": 64,
                "vt_intermediate_size": 64,
                "vt_num_attention_heads": 8,
                "vt_num_hidden_layers": 1,
            }
        },
    ),
    "kimi-linear": Model(checkpoint="kimi-linear-48b-a3b"),
    # The text part of Kimi-K3, which the published name would build as a Kimi-Linear.
    "kimi-k3": Model(checkpoint="kimi-k3", patch={"architectures": ["KimiK3LinearForCausalLM"]}),
    "gpt-oss-20b": Model(checkpoint="gpt-oss-20b"),
    "gpt-oss-120b": Model(checkpoint="gpt-oss-120b"),
    "glm-4.7-flash": Model(checkpoint="glm-4.7-flash", tp_sizes=(1, 2, 4)),  # 20 heads
    "glm-5": Model(checkpoint="glm-5"),
    "longcat-flash": Model(
        # SGLang reads rope_parameters, and stops at a config that has rope_theta alone.
        checkpoint="longcat-flash",
        patch={"rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0}},
    ),
    "qwen3-next": Model(checkpoint="qwen3-next-80b-a3b"),
    "qwen3.5-27b": Model(checkpoint="qwen3.5-27b"),
    "qwen3.5-35b": Model(checkpoint="qwen3.5-35b-a3b"),
}


def build_model(
    name: str, *, tp: int = 1, rank: int = 0, pp: int = 1, device: str = "meta", **overrides: Any
) -> nn.Module:
    """Build the model ``name`` of ``MODELS`` as ``rank`` of ``pp`` stages of ``tp``; ``overrides`` replace keys of its text
    config.

    The parallel state is gone when this returns.
    """
    recipe = MODELS[name]
    config = published_config(recipe.checkpoint)
    config.get("text_config", config).update(overrides)
    return build_of(config, tp=tp, rank=rank, pp=pp, device=device, patch=recipe.patch)[0]


def build_of(
    config: Mapping[str, Any],
    *,
    rank: int,
    device: str = "meta",
    patch: Mapping[str, Any],
    quantised: QuantizationConfig | None = None,
    **arguments: Any,
) -> tuple[nn.Module, Any]:
    """The model of a ``config.json`` and its text config; ``arguments`` are those of ``server_args``."""
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(server_args(config, patch=patch, **arguments))
        stack.enter_context(without_gpu())
        stack.enter_context(sglang_parallel(given, rank))
        made = model_config(given)
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        stack.enter_context(torch.device(device))
        return _initialize_model(made, LoadConfig(), quantised), made.hf_text_config
