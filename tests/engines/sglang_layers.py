"""Real SGLang attention layers with the dimensions of published checkpoints, at any tensor-parallel size and rank.

    model = build_model("kimi-linear", tp=8, rank=5)      # every layer, on the meta device, in well under a second

The counterpart of ``vllm_layers``, with the same names.  SGLang's Qwen models have no module for full attention: there
the decoder layer itself is the layer.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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


MODELS = {
    name: Model(**table)
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
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
