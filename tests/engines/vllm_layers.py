"""Real vLLM attention layers with the dimensions of published checkpoints, at any tensor-parallel size and rank.

    model = build_model("kimi-linear", tp=8, rank=5)      # every layer, on the meta device, in well under a second

A model is vLLM's own, built as vLLM builds it, so its layers have their real names, their decoder layers and norms, and
their inner kernel layers.  Nothing holds data unless ``device="cpu"`` is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from vllm_host import architecture, import_model, vllm_config, vllm_parallel, without_gpu  # isort: skip  (before vllm)
import vllm
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import set_default_torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How to build one model: the published config, vLLM's class for it, and what must differ from a GPU host."""

    checkpoint: str
    model_class: str
    overrides: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    tp_sizes: tuple[int, ...] = (1, 2, 8)


_KNOWN = {
    name: Model(**table)
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}

MISSING = {
    "0.26": frozenset(
        {"deepseek-v3.2", "deepseek-v3.2-rocm", "glm-5", "kimi-linear", "kimi-linear-rocm", "kimi-k3", "kimi-k3-rocm"}
    )
}
"""Release -> models that it has no such class of: K3 came later, and the others were written elsewhere."""
RELEASE = ".".join(vllm.__version__.split(".")[:2])
MODELS = {name: model for name, model in _KNOWN.items() if name not in MISSING.get(RELEASE, ())}
"""Those that the installed release has."""


def build_model(
    name: str,
    *,
    tp: int = 1,
    rank: int = 0,
    pp: int = 1,
    device: str = "meta",
    whole_experts: bool = True,
    **overrides: Any,
) -> nn.Module:
    """Build the model ``name`` of ``MODELS`` as ``rank`` of ``pp`` stages of ``tp``; ``overrides`` replace keys of its config.

    The parallel state is gone when this returns.  To run the model, build it inside ``vllm_parallel`` yourself.
    """
    recipe = MODELS[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", recipe.environ))
        stack.enter_context(without_gpu())
        model_class = import_model(recipe.model_class)
        ModelRegistry.register_model(architecture(recipe.checkpoint), model_class)
        told = {**recipe.overrides, **overrides}
        config = vllm_config(recipe.checkpoint, tp=tp, rank=rank, pp=pp, overrides=told, whole_experts=whole_experts)
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(vllm_parallel(tp, rank, pp))
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        stack.enter_context(torch.device(device))
        # A fifth of the time, for weights that come later.
        noted = "vllm.model_executor.model_loader.utils.record_metadata_for_reloading"
        stack.enter_context(mock.patch(noted, create=True))
        return initialize_model(config, model_class=model_class)


@contextlib.contextmanager
def fp8_kernel(kernel: str) -> Iterator[None]:
    """Have vLLM give fp8 linears this kernel, ``package.module:Class`` below its kernels, whatever the machine can run."""
    module_name, _, class_name = kernel.partition(":")
    cls = getattr(importlib.import_module(f"vllm.model_executor.kernels.linear.scaled_mm.{module_name}"), class_name)
    with (
        mock.patch("vllm.model_executor.kernels.linear.choose_scaled_mm_linear_kernel", return_value=cls),
        mock.patch.object(cls, "is_supported", return_value=(True, None)),
        mock.patch.object(cls, "can_implement", return_value=(True, None)),
    ):
        yield
