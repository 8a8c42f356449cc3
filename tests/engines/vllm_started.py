"""Real vLLM models on the CPU: loaded by vLLM's loader, compiled by its `VllmBackend`, and run once as its profiling run does.

The attention kernel, which needs a device, is an op of plain torch here, and the graph is split at it as it would be there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
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
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router import fused_topk_router, grouped_topk_router
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm_layers import MODELS, architecture, fp8_kernel

from layerfuse.engines import process
from layerfuse.engines.compiled_module import CompiledModule
from layerfuse.engines.vllm import loading, plugin
from layerfuse.fusion import Target

KDA = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn.KimiGatedDeltaNetAttention"
SPLIT_AT = "layerfuse_tests::attend"
"""The op that stands for attention."""

TINY: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "vllm_tiny.json").read_text(encoding="utf-8"))
for _name, _changes in TINY.items():
    TINY[_name] = {**TINY.get(_changes.pop("like", ""), {}), **_changes}
"""Model of `MODELS` -> what is smaller than published. Enough layers for the graph to have pieces that are equal; how experts are
chosen (groups, correction bias, scale of the routed part) is as published."""

TWO_LAYERS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "gpt-oss-20b": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Overrides where no test looks at equal pieces: two layers are compiled in two thirds of the time of three."""
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 1}
"""Of DeepSeek-V3, where none looks at several layers or at experts either: in half of that."""

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
    return torch.ops.layerfuse_tests.attend(q, k, v, q[0].numel())


def _delta(_: nn.Module, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """In the place of the recurrence, behind vLLM's own op for it."""
    core_attn_out.copy_(_attend(b, mixed_qkv, a, core_attn_out[0].numel()).view_as(core_attn_out))


def _kda(layer: Any, *, mixed_qkv: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor, **_: Any) -> None:
    """In the place of Kimi-Linear's recurrence, before vLLM's own gated norm."""
    mixed = _attend(beta[0], mixed_qkv, beta[0], core_attn_out[0, 0].numel()).view_as(core_attn_out)
    core_attn_out.copy_(layer.o_norm(mixed, g2))


def _kimi_mla(_: Any, _positions: Tensor, q: Tensor, kv_c: Tensor, k_pe: Tensor, attn_out: Tensor) -> None:
    attn_out.copy_(_attend(q, kv_c, k_pe, attn_out.shape[-1]))


class PlainExperts(FusedMoEMethodBase):
    """In the place of the experts' kernels, which are made for one GPU family each; router, shared experts and sums are vLLM's."""

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        width = intermediate_size_per_partition
        for name, shape in (("w13_weight", (2 * width, hidden_size)), ("w2_weight", (hidden_size, width))):
            weight = torch.empty(num_experts, *shape, dtype=params_dtype)
            layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def apply(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        chosen = topk_ids.long()
        gate, up = torch.einsum("th,teih->tei", x, layer.w13_weight[chosen]).chunk(2, -1)
        each = torch.einsum("tei,tehi->teh", nn.functional.silu(gate) * up, layer.w2_weight[chosen])
        return (each * topk_weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _best(weights: Tensor, ids: Tensor, _: Tensor, logits: Tensor, renormalise: bool = False) -> tuple[Tensor, Tensor]:
    """In the place of the CUDA op by which 0.26 routes gpt-oss and Qwen3-Next."""
    best, chosen = logits.float().softmax(-1).topk(weights.shape[-1])
    weights.copy_(best / best.sum(-1, keepdim=True) if renormalise else best)
    return weights, ids.copy_(chosen)


def _quantise(
    x: Tensor, values: Tensor, scales: Tensor, size: int, floor: float, low: float, high: float, *_: bool
) -> None:
    grouped = x.float().unflatten(-1, (-1, size))
    scale = grouped.abs().amax(-1).clamp(min=floor) / high
    values.copy_((grouped / scale.unsqueeze(-1)).clamp(low, high).flatten(-2).to(values.dtype))
    scales.copy_(scale)


class _AsCuda(type(current_platform)):
    """The CPU's platform, which says that it is CUDA's to who asks which kernels it has."""

    def is_cpu(self) -> bool:
        return False

    def is_cuda_alike(self) -> bool:
        return True


def _quantise_rows(values: Tensor, x: Tensor, scales: Tensor, _: Tensor | None) -> None:
    _quantise(x, values, scales, x.shape[-1], 1 / (512 * 448), -448, 448)


_QUANTISES = {
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()": _quantise,
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()": _quantise_rows,
}
"""Schemas of vLLM's ops that quantise -> the same in plain torch."""


@contextlib.contextmanager
def quantised_as_on_cuda() -> Iterator[None]:
    """Have linears quantise what they read by vLLM's op, as on a GPU, where the CPU takes plain torch."""
    for schema, function in _QUANTISES.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            _C.define(schema)
            _C.impl(name, function, "CPU")
            torch.library.register_fake(f"_C::{name}", lambda *_: None, lib=_C)
    with (
        mock.patch.object(fp8_utils, "current_platform", _AsCuda()),
        mock.patch.object(QuantFP8, "dispatch_forward", lambda self, **_: self.forward_cuda),
    ):
        yield


BLOCK_FP8 = {
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "moe_intermediate_size": 256,
}  # fmt: skip
"""The published format of DeepSeek-V3, with dimensions that its blocks divide."""


def _block_product(_: Any, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
    """What the block fp8 kernels compute, in float32."""
    a = A.float() * As.repeat_interleave(128, -1)[:, : A.shape[-1]]
    scales = Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (a @ (B.float() * scales[: B.shape[0], : B.shape[1]]).T).bfloat16()


def _row_product(_: Any, *, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor, **__: Any) -> Tensor:
    """The same of kernels with one scale for a row and one for an output channel."""
    return (A.float() * As @ (B.float() * Bs.view(1, -1))).bfloat16()


@contextlib.contextmanager
def fp8(kernel: str) -> Iterator[None]:
    """Give vLLM's linears an fp8 kernel, `package.module:Class` as for `fp8_kernel`, on a CPU that says it has fp8."""
    module, _, name = kernel.partition(":")
    cls = getattr(importlib.import_module(f"vllm.model_executor.kernels.linear.scaled_mm.{module}"), name)
    product, plain = ("apply_block_scaled_mm", _block_product) if "Block" in name else ("apply_scaled_mm", _row_product)
    with (
        fp8_kernel(kernel),
        mock.patch.object(cls, product, plain),
        mock.patch.object(loading, "target_of", return_value=Target(arch="cpu", vendor="cpu", fp8="e4m3fn")),
    ):
        yield


@frozen(kw_only=True)
class Started:
    """A model that has been loaded, and can be called."""

    config: VllmConfig
    model: nn.Module

    def __call__(self, tokens: int = 6) -> Tensor:
        """The hidden states of some tokens. The first call compiles, as vLLM's first call does.

        A stage of a pipeline is given some by the one before, and gives the sum of its two streams to the next.
        """
        ids = torch.arange(tokens) % 64
        given = () if get_pp_group().is_first_rank else (self._from_before(tokens),)
        with set_forward_context(None, self.config, num_tokens=tokens):
            found = self.model(ids, torch.arange(tokens), *given)
        return sum(found.tensors.values()) if isinstance(found, IntermediateTensors) else found

    def _from_before(self, tokens: int) -> IntermediateTensors:
        made = self.model.make_empty_intermediate_tensors(tokens, self.config.model_config.dtype, "cpu")
        generator = torch.Generator().manual_seed(1)
        for tensor in made.tensors.values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.5)
        return made

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
    pp: int = 1,
    dtype: str = "float32",
    mode: str = "VLLM_COMPILE",
    slot: Any = None,
    captured: int = 0,
    overrides: Mapping[str, Any] | None = None,
    **compilation: Any,
) -> VllmConfig:
    """The config of a tiny model, with layerfuse's options. The mode is set where the CPU platform would lower it.

    ``captured``: the most tokens that vLLM is taken to capture in CUDA graphs.
    """
    recipe = MODELS[name]
    ModelRegistry.register_model(architecture(recipe.checkpoint), import_model(recipe.model_class))
    config = config_on_cpu(
        recipe.checkpoint,
        tp=tp,
        rank=rank,
        pp=pp,
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
    short_ropes(config.model_config.hf_text_config)
    made = config.compilation_config
    made.max_cudagraph_capture_size = captured
    made.mode, made.backend, made.ir_enable_torch_wrap = CompilationMode[mode], "inductor", mode != "NONE"
    made.splitting_ops = [SPLIT_AT, "vllm::qwen_gdn_attention_core"] if split else []
    for field in dataclasses.fields(made.pass_config):
        # vLLM's own fusions are not there on a CPU.
        if getattr(made.pass_config, field.name) is True and field.name != "eliminate_noops":
            setattr(made.pass_config, field.name, False)
    return config


def short_ropes(config: Any) -> None:
    """Angles for 256 positions, of 10^5 and more: a model's table of their cosines would take as long as to load all else of it."""
    config.max_position_embeddings = 256
    for parameters in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if parameters and "original_max_position_embeddings" in parameters:
            parameters["original_max_position_embeddings"] = 32


@contextlib.contextmanager
def experts() -> Iterator[None]:
    """MoE layers as on a GPU: one op in the graph, behind which vLLM's gate, router and shared experts run, with plain experts."""
    grouped = grouped_topk_router.grouped_topk
    with (
        mock.patch.object(RoutedExperts, "_get_quant_method", lambda _, _prefix, _quant, moe: PlainExperts(moe)),
        mock.patch.object(moe_runner, "current_platform", _AsCuda()),
        # 0.26 has no router for CPUs: its kernel, and what it compiles for a GPU.
        mock.patch.object(fused_topk_router, "vllm_topk_softmax", _best),
        mock.patch.object(grouped_topk_router, "grouped_topk", getattr(grouped, "_torchdynamo_orig_callable", grouped)),
    ):
        yield


@contextlib.contextmanager
def kimi_linear() -> Iterator[None]:
    """Plain torch in the place of the attention kernels of Kimi-Linear, in a release that does not compile it."""
    if importlib.util.find_spec("vllm.models.kimi_k3") is None:
        yield
        return
    with (
        mock.patch("vllm.models.kimi_k3.nvidia.mla.MultiHeadLatentAttention._attention", _kimi_mla),
        mock.patch(f"{KDA}._forward", _kda),
    ):
        yield


_compile_apart = CustomOp.maybe_compile


def _wrapped(op: CustomOp, function: Any, *, enable: bool = True) -> Any:
    """What vLLM makes of a method that it compiles by itself behind its ops, not compiled: that would take a C++ compiler."""
    with mock.patch.object(torch, "compile", lambda function, **__: function):
        return _compile_apart(op, function, enable=enable)


@contextlib.contextmanager
def in_engine(config: VllmConfig, cache: Path, groups: Any = None) -> Iterator[None]:
    """vLLM's surroundings: its cache in a folder, its process groups, its config.

    ``groups``: a context in which the process groups are there; the fake ones of one process if not given.
    """
    parallel = config.parallel_config
    sizes = parallel.tensor_parallel_size, parallel.rank, parallel.pipeline_parallel_size
    made = vllm_parallel(*sizes) if groups is None else groups
    with (
        # vLLM sets TORCHINDUCTOR_CACHE_DIR for the rest of the process; so do nothing but let it come back.
        mock.patch.dict("os.environ", {"VLLM_CACHE_ROOT": str(cache)}),
        set_current_vllm_config(config),
        without_gpu(),
        made,
        mock.patch.object(MLAAttention, "forward", _mla),
        mock.patch.object(Attention, "forward", _gqa),
        mock.patch.object(QwenGatedDeltaNetAttention, "_forward_core", _delta),
        mock.patch.object(CustomOp, "maybe_compile", _wrapped),
        kimi_linear(),
        experts(),
        # vLLM collects garbage twice for each model that it loads, which would be most of a load's time.
        mock.patch("gc.collect"),
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
    """Load a model as a worker does, with seeded weights."""
    model = get_model(vllm_config=config)
    for module in model.modules():
        if isinstance(module, QwenGatedDeltaNetAttention):
            module._forward_method = module.forward_cuda  # what a GPU's platform would choose
    filled(model)
    return Started(config=config, model=model)


def filled(model: nn.Module) -> None:
    """Give a model weights that make its numbers worth comparing."""
    generator = torch.Generator().manual_seed(0)
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point():
            drawn = torch.rand(parameter.shape, generator=generator) * 0.2
            drawn = drawn + 0.11 if path.endswith("input_scale") else drawn
            # The same numbers in every dtype.
            parameter.data.copy_((drawn + 0.9 if "norm" in path else drawn - 0.1).bfloat16())


def apart(found: Tensor, expected: Tensor) -> float:
    """How far two results differ: the norm of the difference by that of what is expected."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


ROUNDING = 1e-4
"""How far two results of a tiny model in float32 are `apart` at most where only their rounding differs: Kimi-Linear's by 2e-5. One
rounding to bfloat16 anywhere would be 2e-3."""


def as_near(found: Tensor, own: Tensor, exact: Tensor) -> bool:
    """Whether a narrow dtype's results are as near to those in float32 as vLLM's own are, token by token.

    But for one at most: rounding may choose another expert for a token, which is then as far away as experts are. The median has to be as
    near too.
    """
    ours, theirs = (torch.tensor([apart(*rows) for rows in zip(each, exact, strict=True)]) for each in (found, own))
    farther = (ours > 1.25 * theirs.max()).sum()
    return bool(found.isfinite().all() and ours.median() < 1.25 * theirs.median() and farther <= 1)


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether results of a model in fp8 are alike, but for one token at most, for which rounding may choose another expert."""
    apart = sum(not torch.allclose(*rows, rtol=0.1, atol=0.1) for rows in zip(found, expected, strict=True))
    return bool(found.isfinite().all()) and apart <= 1


def waiting() -> tuple[Any, CompiledModule]:
    """The one module that waits for its first call, and what layerfuse plans in it."""
    (module,) = process.this.waiting
    return module, vars(module)[plugin.WAITS]


def loaded_from_cache() -> int:
    """How many compiled models vLLM has read from its cache in this process."""
    return compilation_counter.num_aot_artifacts_loaded
