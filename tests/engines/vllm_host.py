"""Let real vLLM build its layers on a machine without a GPU, as any rank of any tensor-parallel group.

vLLM's own configuration objects and its own group coordinators are used throughout; what this file replaces is only
what asks a device or another process for an answer.  Import it before vLLM: it chooses the platform through the
environment.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from stand_ins import fake_process_groups, init_fake_world, no_streams

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_PLUGINS", "")  # none of the plugins that happen to be installed
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Kernels over NVLink, which vLLM tries to set up when a Kimi model is built.
os.environ.setdefault("VLLM_KIMI_K3_GEMM_AR", "0")
os.environ.setdefault("VLLM_ENABLE_GEMM_RS", "0")

import torch

_version = importlib.metadata.version
# 0.26 does not read VLLM_TARGET_DEVICE: while it is imported, it takes the CPU platform where its version is that of a CPU build.
with mock.patch.object(importlib.metadata, "version", lambda name: _version(name) + ("+cpu" if name == "vllm" else "")):
    from vllm.compilation.passes.utility import fix_functionalization
    from vllm.config import (
        CacheConfig,
        CompilationConfig,
        CompilationMode,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
    )
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.models import registry as models
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

# A class that is found by its architecture's name is inspected in a process of its own, ten seconds, so that CUDA stays untouched here.
models._run_in_subprocess = lambda inspect: inspect()

# Layers ask for ops that no CPU build has, to keep them, and passes to look for them in graphs; none is called.
_C = torch.library.Library("_C", "FRAGMENT")
_ASKED = re.findall(r"torch\.ops\._C\.(\w+)", Path(fix_functionalization.__file__).read_text())
for _name in {*_ASKED, "gelu_new", "gelu_quick", "rotary_embedding", "silu_and_mul", "static_scaled_fp8_quant"}:
    with contextlib.suppress(RuntimeError):  # declared already
        _C.define(f"{_name}(Tensor(a!) x) -> ()")

CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""One folder per published checkpoint, each with the ``config.json`` keys that an engine reads to build a layer."""

ROCM_ARCH = "gfx942"
"""The GPU that ROCm-only modules are told they run on, because they ask while they are imported."""


@contextlib.contextmanager
def vllm_parallel(tp: int, rank: int, pp: int = 1) -> Iterator[None]:
    """Stand at ``rank`` of ``pp`` stages of ``tp`` ranks each, alone in this process. A stage's ranks follow each other.

    The groups are vLLM's own, on torch's "fake" backend: every collective returns at once and moves nothing.  They are
    taken down at the end, so one process can be many ranks of many groups, one after the other.
    """
    init_fake_world(tp * pp, rank)
    try:
        with (
            fake_process_groups(),
            # Both of these ask the other ranks something and believe the (empty) answer.
            mock.patch.object(parallel_state, "_node_count", return_value=1),
            mock.patch(
                "vllm.distributed.device_communicators.shm_broadcast.MessageQueue.create_from_process_group",
                return_value=None,
            ),
        ):
            parallel_state.init_distributed_environment(tp * pp, rank, "fake://", rank, "fake")
            parallel_state.initialize_model_parallel(tp, pp)
        init_workspace_manager(torch.device("meta"))
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        reset_workspace_manager()


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Answer the questions that GPU-only layers ask a device while they are built.

    Streams and events become None (a layer without a second stream runs on one), and sparse attention, which the CPU
    platform refuses, gets the backend that CUDA would choose.
    """
    choose_backend = type(current_platform).get_attn_backend_cls

    def choose_backend_sparse_too(selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        if attn_selector_config.use_sparse:
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        if attn_selector_config.use_mla:  # 0.26 refuses it on a CPU
            return AttentionBackendEnum.TRITON_MLA.get_path()
        return choose_backend(selected_backend, attn_selector_config, **kwargs)

    with (
        no_streams(),
        mock.patch.object(type(current_platform), "get_attn_backend_cls", staticmethod(choose_backend_sparse_too)),
        # 0.26 makes the kernel of prefills with the layer.
        mock.patch.object(mla_attention, "get_mla_prefill_backend", return_value=lambda **_: None),
        # Says in the log which experts a rank has, also where nothing holds data.
        mock.patch.object(ExpertMapManager, "get_compressed_map_string", return_value=""),
        # Scratch memory grows while a sparse layer is built, and tells the device to let go of the old one.
        mock.patch.object(torch.accelerator, "empty_cache"),
        # vllm.platforms.rocm asks for the architecture while it is imported.
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(gcnArchName=ROCM_ARCH)),
        # Weights are packed for the kernels of some CPUs, which this build of vLLM does not hold.
        mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=False),
        mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False),
    ):
        yield


def import_model(path: str) -> type[torch.nn.Module]:
    """Import ``"package.module:Class"``, a model class that may be written for another platform."""
    module_name, _, class_name = path.partition(":")
    with _image_processor_stand_in():
        return getattr(importlib.import_module(module_name), class_name)


@contextlib.contextmanager
def _image_processor_stand_in() -> Iterator[None]:
    """Let Qwen3.5, a model that also sees, be imported without torchvision, whose builds ask for a CUDA torch."""
    name = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    if name in sys.modules or importlib.util.find_spec("torchvision"):
        yield
        return
    stand_in = ModuleType(name)
    stand_in.__dict__.update(Qwen2VLImageProcessor=type("Qwen2VLImageProcessor", (), {}), smart_resize=None)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def published_config(checkpoint: str) -> dict[str, Any]:
    """The ``config.json`` of ``checkpoint``, as published."""
    return json.loads((CHECKPOINTS / checkpoint / "config.json").read_text())


def architecture(checkpoint: str) -> str:
    return published_config(checkpoint)["architectures"][0]


def vllm_config(
    checkpoint: str, *, tp: int, rank: int, overrides: Mapping[str, Any], pp: int = 1, whole_experts: bool = True
) -> VllmConfig:
    """The configuration with which vLLM would serve ``checkpoint`` at ``tp`` and ``pp``, not compiled.

    ``overrides`` replace keys of the (text) config.  Experts are spread whole over the ranks unless told otherwise, because CPU
    kernels refuse the narrow slices that slicing each of them may give; attention is sharded as ever.
    """
    nested = "text_config" in published_config(checkpoint)
    return config_on_cpu(
        checkpoint,
        tp=tp,
        rank=rank,
        pp=pp,
        whole_experts=whole_experts,
        model={
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "language_model_only": True,
            "hf_overrides": {"text_config": dict(overrides)} if nested and overrides else dict(overrides),
        },
        compilation={"mode": CompilationMode.NONE},
    )


def config_on_cpu(
    checkpoint: str,
    *,
    tp: int,
    rank: int,
    model: Mapping[str, Any],
    compilation: Mapping[str, Any],
    pp: int = 1,
    whole_experts: bool = False,
    **more: Any,
) -> VllmConfig:
    """A config of ``checkpoint`` without its tokenizer; ``model``, ``compilation`` and ``more`` are vLLM's own arguments."""
    path = str(CHECKPOINTS / checkpoint)
    made = ModelConfig(model=path, tokenizer=path, skip_tokenizer_init=True, **model)
    return VllmConfig(
        model_config=made,
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            rank=rank,
            enable_expert_parallel=whole_experts and made.is_moe,
        ),
        cache_config=CacheConfig(enable_prefix_caching=False),
        device_config=DeviceConfig("cpu"),
        compilation_config=CompilationConfig(**compilation),
        **more,
    )
