"""Real vLLM attention layers with the dimensions of published checkpoints, at any tensor-parallel size and rank.

    model = build_model("kimi-linear", tp=8, rank=5)      # every layer, on the meta device, in well under a second

A model is vLLM's own, built as vLLM builds it, so its layers have their real names, their decoder layers and norms, and
their inner kernel layers.  Nothing holds data unless ``device="cpu"`` is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
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


_DEEPSEEK = "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM"
# Their routed experts are built for one GPU family each; a dense feed-forward leaves attention and norms as they are.
_ALL_DENSE = {"first_k_dense_replace": 1000}

_KNOWN: dict[str, Model] = {
    "deepseek-v3": Model(checkpoint="deepseek-v3", model_class=_DEEPSEEK),
    "deepseek-v3-mla-off": Model(checkpoint="deepseek-v3", model_class=_DEEPSEEK, environ={"VLLM_MLA_DISABLE": "1"}),
    "deepseek-v2-lite": Model(
        checkpoint="deepseek-v2-lite", model_class="vllm.model_executor.models.deepseek_v2:DeepseekV2ForCausalLM"
    ),
    "deepseek-v3.2": Model(
        checkpoint="deepseek-v3.2", model_class="vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM"
    ),
    "deepseek-v3.2-rocm": Model(
        checkpoint="deepseek-v3.2", model_class="vllm.models.deepseek_v32.amd.model:DeepseekV32ForCausalLM"
    ),
    "kimi-k2": Model(checkpoint="kimi-k2", model_class=_DEEPSEEK),
    "kimi-k2.5": Model(
        checkpoint="kimi-k2.5", model_class="vllm.model_executor.models.kimi_k25:KimiK25ForConditionalGeneration"
    ),
    "kimi-linear": Model(
        checkpoint="kimi-linear-48b-a3b",
        model_class="vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM",
        overrides=_ALL_DENSE,
    ),
    "kimi-linear-rocm": Model(
        checkpoint="kimi-linear-48b-a3b",
        model_class="vllm.models.kimi_k3.amd.linear:KimiLinearForCausalLM",
        overrides=_ALL_DENSE,
    ),
    "kimi-k3": Model(
        checkpoint="kimi-k3",
        model_class="vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM",
        overrides=_ALL_DENSE,
    ),
    "kimi-k3-rocm": Model(
        checkpoint="kimi-k3",
        model_class="vllm.models.kimi_k3.amd.linear:KimiLinearForCausalLM",
        overrides=_ALL_DENSE,
    ),
    "gpt-oss-20b": Model(checkpoint="gpt-oss-20b", model_class="vllm.model_executor.models.gpt_oss:GptOssForCausalLM"),
    "gpt-oss-120b": Model(
        checkpoint="gpt-oss-120b", model_class="vllm.model_executor.models.gpt_oss:GptOssForCausalLM"
    ),
    "glm-4.7-flash": Model(
        checkpoint="glm-4.7-flash",
        model_class="vllm.model_executor.models.glm4_moe_lite:Glm4MoeLiteForCausalLM",
        tp_sizes=(1, 2, 4),  # 20 heads
    ),
    "glm-5": Model(checkpoint="glm-5", model_class="vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM"),
    "longcat-flash": Model(
        checkpoint="longcat-flash", model_class="vllm.model_executor.models.longcat_flash:LongcatFlashForCausalLM"
    ),
    "qwen3": Model(checkpoint="qwen3-4b", model_class="vllm.model_executor.models.qwen3:Qwen3ForCausalLM"),
    "qwen3-next": Model(
        checkpoint="qwen3-next-80b-a3b", model_class="vllm.model_executor.models.qwen3_next:Qwen3NextForCausalLM"
    ),
    "qwen3.5-27b": Model(
        checkpoint="qwen3.5-27b",
        model_class="vllm.model_executor.models.qwen3_5:Qwen3_5ForConditionalGeneration",
    ),
    "qwen3.5-35b": Model(
        checkpoint="qwen3.5-35b-a3b",
        model_class="vllm.model_executor.models.qwen3_5:Qwen3_5MoeForConditionalGeneration",
    ),
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
