"""Real vLLM models on the CPU: loaded by vLLM's loader, compiled by its `VllmBackend`, and run once as its profiling run does.

The attention kernel, which needs a device, is an op of plain torch here, and the graph is split at it as it would be there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attrs import frozen
from torch import Tensor, nn

from vllm_host import _C, config_on_cpu, import_model, vllm_parallel, without_gpu  # isort: skip  (before vllm)
from vllm.compilation.counter import compilation_counter
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import ModelRegistry, gpt_oss, qwen3_next
from vllm.platforms import current_platform
from vllm_layers import MODELS, architecture

SPLIT_AT = "layerfuse_tests::attend"
"""The op that stands for attention."""

EXPERTS = "FusedMoEFactory" if "FusedMoEFactory" in vars(gpt_oss) else "FusedMoE"
"""What models make their experts with: a function in 0.33, a class in 0.26."""

TINY = {
    "deepseek-v3": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1000,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 128,
        "quantization_config": None,
    },
    "gpt-oss-20b": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "vocab_size": 128,
    },
    "qwen3-next": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "vocab_size": 128,
    },
}
TINY["kimi-k2"] = TINY["deepseek-v3"]
"""Model of `MODELS` -> what is smaller than published. Enough layers for the graph to have pieces that are equal."""

_OURS = torch.library.Library("layerfuse_tests", "FRAGMENT")
_OURS.define("attend(Tensor q, Tensor k, Tensor v, int width) -> Tensor")


def before_attention(q: Tensor) -> None:
    """Called by every attention, for tests that do something there."""


def _attend(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    """Some function of all three that looks at every earlier token; what it computes matters to nobody."""
    before_attention(q)
    mixed = torch.cat([k.flatten(1), v.flatten(1)], -1).cumsum(0)
    mixed = mixed.repeat(1, -(-width // mixed.shape[-1]))[:, :width]
    return (mixed * q.flatten(1).mean(-1, keepdim=True)).contiguous()


_OURS.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake(SPLIT_AT, lambda q, k, v, width: q.new_empty(q.shape[0], width), lib=_OURS)


def _mla(_: nn.Module, q: Tensor, kv_c: Tensor, k_pe: Tensor, output_shape: Any, **__: Any) -> Tensor:
    return torch.ops.layerfuse_tests.attend(q, kv_c, k_pe, output_shape[1])


def _gqa(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> Tensor:
    return torch.ops.layerfuse_tests.attend(q, k, v, q.shape[-1])


def _delta(_: nn.Module, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """In the place of the recurrence, behind vLLM's own op for it."""
    core_attn_out.copy_(_attend(b, mixed_qkv, a, core_attn_out[0].numel()).view_as(core_attn_out))


class PlainExpert(nn.Module):
    """In the place of the experts, whose kernels are made for one GPU family each: the best expert's score scales a product."""

    is_internal_router = False

    def __init__(
        self, *, hidden_size: int, gate: nn.Module | None = None, shared_experts: nn.Module | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.gate, self.shared_experts = gate, shared_experts
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size), requires_grad=False)

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        routed = hidden_states @ self.weight * router_logits.softmax(-1).amax(-1, keepdim=True)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden_states)


def _quantise(
    x: Tensor, values: Tensor, scales: Tensor, size: int, floor: float, low: float, high: float, *_: bool
) -> None:
    grouped = x.float().unflatten(-1, (-1, size))
    scale = grouped.abs().amax(-1).clamp(min=floor) / high
    values.copy_((grouped / scale.unsqueeze(-1)).clamp(low, high).flatten(-2).to(values.dtype))
    scales.copy_(scale)


class _AsCuda(type(current_platform)):
    """The CPU's platform, which says that it is CUDA's to who asks which kernels it has."""

    def is_cuda_alike(self) -> bool:
        return True


@contextlib.contextmanager
def quantised_as_on_cuda() -> Iterator[None]:
    """Have linears quantise what they read by vLLM's op, as on a GPU, where the CPU takes plain torch."""
    if not hasattr(torch.ops._C, "per_token_group_fp8_quant"):
        _C.define(
            "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
            "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
        )
        _C.impl("per_token_group_fp8_quant", _quantise, "CPU")
        torch.library.register_fake("_C::per_token_group_fp8_quant", lambda *_: None, lib=_C)
    with (
        mock.patch.object(fp8_utils, "current_platform", _AsCuda()),
        mock.patch.object(QuantFP8, "dispatch_forward", lambda self, **_: self.forward_cuda),
    ):
        yield


@frozen(kw_only=True)
class Started:
    """A model that has been loaded, and can be called."""

    config: VllmConfig
    model: nn.Module

    def __call__(self, tokens: int = 6) -> Tensor:
        """The hidden states of some tokens. The first call compiles, as vLLM's first call does."""
        ids = torch.arange(tokens) % 64
        with set_forward_context(None, self.config, num_tokens=tokens):
            return self.model(ids, torch.arange(tokens))

    def uncompiled(self, tokens: int = 6) -> Tensor:
        """The same of the model as it is."""
        compiled = [module for module in self.model.modules() if vars(module).get("do_not_compile") is False]
        for module in compiled:
            module.do_not_compile = True
        try:
            return self(tokens)
        finally:
            for module in compiled:
                module.do_not_compile = False


def engine_config(
    name: str,
    *,
    layerfuse: Any = None,
    split: bool = True,
    tp: int = 1,
    rank: int = 0,
    dtype: str = "float32",
    mode: str = "VLLM_COMPILE",
    slot: Any = None,
    overrides: Mapping[str, Any] | None = None,
    **compilation: Any,
) -> VllmConfig:
    """The config of a tiny model, with layerfuse's options. The mode is set where the CPU platform would lower it."""
    recipe = MODELS[name]
    ModelRegistry.register_model(architecture(recipe.checkpoint), import_model(recipe.model_class))
    config = config_on_cpu(
        recipe.checkpoint,
        tp=tp,
        rank=rank,
        model={"dtype": dtype, "max_model_len": 256, "hf_overrides": {**TINY[name], **(overrides or {})}},
        compilation={
            "mode": CompilationMode[mode],
            "custom_ops": ["none"],
            "compile_sizes": [],
            # Inductor's own fallbacks in the place of its C++ kernels, which take a compiler half a minute.
            "inductor_compile_config": {
                "fallback_by_default": True,
                **({} if slot is None else {"post_grad_custom_post_pass": slot}),
            },
            **compilation,
        },
        load_config=LoadConfig(load_format="dummy"),
        additional_config={} if layerfuse is None else {"layerfuse": layerfuse},
    )
    made = config.compilation_config
    made.mode, made.backend, made.ir_enable_torch_wrap = CompilationMode[mode], "inductor", mode != "NONE"
    made.splitting_ops = [SPLIT_AT, "vllm::qwen_gdn_attention_core"] if split else []
    for field in dataclasses.fields(made.pass_config):
        # vLLM's own fusions are not there on a CPU.
        if getattr(made.pass_config, field.name) is True and field.name != "eliminate_noops":
            setattr(made.pass_config, field.name, False)
    return config


@contextlib.contextmanager
def in_engine(config: VllmConfig, cache: Path, groups: Any = None) -> Iterator[None]:
    """vLLM's surroundings: its cache in a folder, its process groups, its config.

    ``groups``: a context in which the process groups are there; the fake ones of one process if not given.
    """
    parallel = config.parallel_config
    made = vllm_parallel(parallel.tensor_parallel_size, parallel.rank) if groups is None else groups
    with (
        # vLLM sets TORCHINDUCTOR_CACHE_DIR for the rest of the process; so do nothing but let it come back.
        mock.patch.dict("os.environ", {"VLLM_CACHE_ROOT": str(cache)}),
        set_current_vllm_config(config),
        without_gpu(),
        made,
        mock.patch.object(MLAAttention, "forward", _mla),
        mock.patch.object(Attention, "forward", _gqa),
        mock.patch.object(gpt_oss, EXPERTS, PlainExpert),
        mock.patch.object(qwen3_next, EXPERTS, PlainExpert),
        mock.patch.object(QwenGatedDeltaNetAttention, "_forward_core", _delta),
        torch.inference_mode(),
    ):
        torch._dynamo.reset()
        # As in a new process: 0.26 counts the layers that a model makes, as part of the key of its cache.
        rotary_embedding._ROPE_DICT.clear()
        yield


@contextlib.contextmanager
def started(name: str, cache: Path, **config: Any) -> Iterator[Started]:
    """A tiny model, loaded and not called yet. ``config``: as for `engine_config`."""
    made = engine_config(name, **config)
    with in_engine(made, cache):
        yield load(made)


def load(config: VllmConfig) -> Started:
    """Load a model as a worker does, with weights that make its numbers worth comparing."""
    model = get_model(vllm_config=config)
    for module in model.modules():
        if isinstance(module, QwenGatedDeltaNetAttention):
            module._forward_method = module.forward_cuda  # what a GPU's platform would choose
    generator = torch.Generator().manual_seed(0)
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point():
            drawn = torch.rand(parameter.shape, generator=generator) * 0.2
            parameter.data.copy_(drawn + 0.9 if "norm" in path else drawn - 0.1)
    return Started(config=config, model=model)


def loaded_from_cache() -> int:
    """How many compiled models vLLM has read from its cache in this process."""
    return compilation_counter.num_aot_artifacts_loaded
