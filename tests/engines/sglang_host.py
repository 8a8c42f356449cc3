"""Let real SGLang build its layers on a machine without a GPU, as any rank of any tensor-parallel group.

SGLang's own ``ServerArgs``, published configuration and group coordinators are used throughout; what is replaced is the
binary kernel package and what asks a device or another process for an answer.  Import it before SGLang.

The CPU engine (``SGLANG_USE_CPU_ENGINE``) stays off on purpose: with it, layers take other branches and other numbers
than on a GPU.
"""
# ruff: noqa: E402  (SGLang can only be imported once the stand-ins are in place)

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from stand_ins import (
    allow_missing_kernels,
    declare_torchvision_ops,
    fake_process_groups,
    init_fake_world,
    no_streams,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")  # it would wait for the other ranks
_torchvision_ops = declare_torchvision_ops()
allow_missing_kernels("sgl_kernel")
logging.getLogger("sglang").setLevel(logging.ERROR)

import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.server_args import ServerArgs

CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""One folder per published checkpoint, each with the ``config.json`` keys that an engine reads to build a layer."""

CUDA_CAPABILITY = (9, 0)
"""The GPU that sparse attention is told it runs on, because SGLang asks while it resolves its arguments."""


@contextlib.contextmanager
def sglang_parallel(arguments: ServerArgs, rank: int) -> Iterator[None]:
    """Publish ``arguments`` and stand at ``rank`` of their stages and tensor-parallel groups, alone in this process.

    The groups are SGLang's own, on torch's "fake" backend.  Configuration and groups are taken down at the end, so one
    process can be many ranks of many groups, one after the other.
    """
    tp, pp = arguments.tp_size, arguments.pp_size
    init_fake_world(tp * pp, rank)
    try:
        runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=rank))
        with fake_process_groups():
            parallel_state.init_distributed_environment(tp * pp, rank, "fake://", rank, "fake")
            parallel_state.initialize_model_parallel()
        initialize_dp_attention(arguments)
        initialize_moe_config()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        runtime_context.reset_context()


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Answer the questions that layers ask a device while they are built, and build rotary embeddings as for a GPU."""

    def get_rope(*args: Any) -> torch.nn.Module:
        *for_gpu, _device = args
        return factory.get_rope(*for_gpu)

    with (
        no_streams(),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=CUDA_CAPABILITY),
        mock.patch.object(factory, "get_rope_cpu", get_rope),
        # On a platform that it does not know, a rotary embedding looks for its kernel in vLLM.
        mock.patch("sglang.srt.layers.rotary_embedding.base._is_cpu", True),
        mock.patch("sglang.srt.layers.rotary_embedding.rope_variant.get_device", return_value="cpu"),
    ):
        yield


def published_config(checkpoint: str) -> dict[str, Any]:
    """The keys of ``config.json`` of one of ``CHECKPOINTS``."""
    config: dict[str, Any] = json.loads((CHECKPOINTS / checkpoint / "config.json").read_text())
    return config


@contextlib.contextmanager
def server_args(
    config: Mapping[str, Any], *, tp: int, pp: int = 1, patch: Mapping[str, Any], **more: Any
) -> Iterator[ServerArgs]:
    """The arguments with which SGLang would serve a ``config.json`` at ``tp`` and ``pp``, valid inside the ``with`` block.

    ``patch`` replaces attributes of the configuration object that is made of it; ``more`` are further arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield ServerArgs(
            model_path=folder,
            json_model_override_args=json.dumps(dict(patch)),
            tp_size=tp,
            pp_size=pp,
            device="cpu",
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            attention_backend="triton",
            sampling_backend="pytorch",
            mem_fraction_static=0.5,  # else derived from the memory of a GPU
            disable_cuda_graph=True,
            disable_custom_all_reduce=True,
            disable_radix_cache=True,  # on a CPU it does not go with linear attention
            **more,
        )


def model_config(arguments: ServerArgs) -> ModelConfig:
    return ModelConfig.from_server_args(arguments)
