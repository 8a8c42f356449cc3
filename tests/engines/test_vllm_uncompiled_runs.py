"""Models that vLLM does not compile, tiny and run on a CPU: the ops that stand in them are called at every site, and give vLLM's numbers.

Plain torch stands for kernels of attention and for those that mix streams. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from attrs import frozen

pytest.importorskip("vllm_started")
from few_token_linears import BLOCKS
from test_vllm_inside import as_installed
from test_vllm_plugin import ADD, DUAL, ROWS, fresh, said  # noqa: F401 (`fresh` is a fixture)
from test_vllm_specs import BLOCK
from torch import Tensor
from vllm.config import CompilationMode
from vllm.config.load import LoadConfig
from vllm.model_executor.layers import mhc
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models import ModelRegistry
from vllm_defaults import DEFAULTS, kernels, on, write_config
from vllm_host import config_on_cpu, import_model
from vllm_started import ROUNDING, Started, apart, fp8, in_engine, load

GATED = "gated_rms_norm"
EDGES = 4e-2
"""How far results are `apart` at most where numbers on the edge of two in fp8, which are 6e-2 from each other, become the other one."""
MLA = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256, "vocab_size": 128,
    "n_routed_experts": 8, "num_experts_per_tok": 8, "max_position_embeddings": 256,
}  # fmt: skip


def _rows(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    rows = x.float()
    return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon) * (1 + weight.float())).to(x.dtype)


def _add_rows(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual.add_(x)
    x.copy_(_rows(residual, weight, epsilon))


@contextlib.contextmanager
def flashinfer() -> Iterator[None]:
    """In the place of FlashInfer's norms, which write to what they are given, and of vLLM's kernel for heads."""
    norms, package = ModuleType("flashinfer.norm"), ModuleType("flashinfer")
    norms.__dict__.update(gemma_rmsnorm=_rows, gemma_fused_add_rmsnorm=_add_rows)
    names = {"flashinfer": package, "flashinfer.norm": norms}
    sys.modules.update(names)
    try:
        with mock.patch("vllm._custom_ops.fused_minimax_m3_qknorm_rope_kv_insert"):
            yield
    finally:
        for name in names:  # not the whole of sys.modules as it was: vLLM's modules register what they hold once
            del sys.modules[name]


def _embedded(ids: Tensor, table: Tensor, *, chain_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """In the place of one kernel for the embedding and the first norm."""
    rows = table[ids]
    return rows, _rows(rows, chain_weight - 1, eps)


@contextlib.contextmanager
def hyper_connections() -> Iterator[None]:
    """In the place of the kernels that mix streams and norm what they mix."""

    def normed(mixed: Tensor, norm_weight: Tensor, norm_eps: float) -> Tensor:
        return _rows(mixed, norm_weight - 1, norm_eps)

    def pre(_: Any, *, residual: Tensor, norm_weight: Tensor, norm_eps: float, **__: Any) -> tuple[Any, Any, Tensor]:
        return residual, residual, normed(residual.mean(1), norm_weight, norm_eps)

    def post(_: Any, x: Tensor, residual: Tensor, *__: Any) -> Tensor:
        return residual + x.unsqueeze(1)

    def both(
        _: Any, *, x: Tensor, residual: Tensor, norm_weight: Tensor, norm_eps: float, **__: Any
    ) -> tuple[Any, ...]:
        stream = residual + x.unsqueeze(1)
        return stream, stream, stream, normed(stream.mean(1), norm_weight, norm_eps)

    init = MultiHeadLatentAttentionWrapper.__init__

    def apart(self: Any, *args: Any, fuse_qkv_rmsnorm: bool, **kwargs: Any) -> None:
        init(self, *args, **kwargs)  # which calls both norms by themselves: vLLM's kernel for both is a GPU's
        self.is_sparse = False  # what chooses tokens is that too

    with (
        mock.patch.object(MultiHeadLatentAttentionWrapper, "__init__", apart),
        mock.patch.object(mhc.MHCPreOp, "forward", pre),
        mock.patch.object(mhc.MHCPostOp, "forward", post),
        mock.patch.object(mhc.MHCFusedPostPreOp, "forward", both),
        mock.patch("vllm.models.glm5next.common.kda.Glm5NextLinearAttention._forward", _recurrence),
    ):
        yield


def _recurrence(_: Any, *, qkv_proj_states: Tensor, core_attn_out: Tensor, **__: Any) -> None:
    core_attn_out.copy_(qkv_proj_states[:, : core_attn_out[0, 0].numel()].cumsum(0).view_as(core_attn_out))


def _weighed(*, prefix: Tensor, blocks: Tensor, num_blocks: int, **_: Any) -> Tensor:
    """In the place of attention over the sums of several blocks of layers."""
    return torch.cat([blocks[:, :num_blocks], prefix.unsqueeze(1)], 1).mean(1)


def _route(router: Any, _: Tensor, logits: Tensor, __: Any, **___: Any) -> tuple[Tensor, Tensor]:
    """In the place of what routes by sigmoids, which vLLM has for GPUs only."""
    best, chosen = logits.float().sigmoid().topk(router.top_k)
    return best / best.sum(-1, keepdim=True), chosen.int()


@frozen
class Tiny:
    """What is smaller than by default, and what stands for kernels."""

    config: dict[str, Any]
    stand_ins: Callable[[], Any] = contextlib.nullcontext


TINY = {
    "MiniMaxM3SparseForCausalLM": Tiny(
        {
            "text_config": {
                "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 256, "dense_intermediate_size": 256, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 128, "rotary_dim": 32, "vocab_size": 128, "num_local_experts": 8,
                "num_experts_per_tok": 8, "moe_layer_freq": [0, 0, 1], "sparse_attention_config": {"sparse_attention_freq": [0, 0, 0], "sparse_num_index_heads": 2, "sparse_topk_blocks": 4},
            },
        },
        flashinfer,
    ),
    "HYV4ForCausalLM": Tiny({**MLA, "num_hidden_layers": 3}),
    "Dots3NoteForCausalLM": Tiny(
        {
            **MLA, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3, "swa_num_attention_heads": 4, "swa_qk_nope_head_dim": 64,
            "swa_qk_rope_head_dim": 64, "swa_v_head_dim": 64, "swa_q_lora_rank": 128, "swa_kv_lora_rank": 128, "n_shared_experts": 1,
        },
        lambda: mock.patch("vllm.models.deepseek_v32.nvidia.model.fused_embed_norm", _embedded),
    ),
    "Glm5NextForCausalLM": Tiny(
        {
            **MLA, "num_hidden_layers": 3, "qk_rope_head_dim": 0, "linear_head_dim": 64, "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "full_attention"], "mlp_layer_types": ["dense", "dense", "sparse"],
        },
        hyper_connections,
    ),
    "AliceAIForCausalLM": Tiny(
        {
            "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
            "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 8,
            "num_experts_per_tok": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "block_attn_res_block_size": 2,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        lambda: mock.patch("vllm.model_executor.models.alice_ai.attn_res", _weighed),
    ),
}  # fmt: skip


@contextlib.contextmanager
def started(
    architecture: str,
    folder: Path,
    options: Any,
    quant: Any = None,
    dtype: str = "float32",
    tp: int = 1,
    rank: int = 0,
    groups: Any = None,
) -> Iterator[Started]:
    folder.mkdir(exist_ok=True)
    tiny = TINY[architecture]
    write_config(architecture, folder, quant, **tiny.config)
    with kernels():
        ModelRegistry.register_model(architecture, import_model(DEFAULTS[architecture].model_class))
    config = config_on_cpu(
        str(folder),
        tp=tp,
        rank=rank,
        model={"dtype": dtype, "max_model_len": 256, "language_model_only": True},
        compilation={"mode": CompilationMode.NONE, "custom_ops": ["none"]},
        load_config=LoadConfig(load_format="dummy"),
        additional_config={"layerfuse": options},
    )
    config.kernel_config.enable_jit_warmup = False
    routes = mock.patch.object(CPURouter, "_compute_routing", _route)
    with tiny.stand_ins(), in_engine(config, folder, groups), on(DEFAULTS[architecture]), routes:
        yield load(config)


@pytest.mark.parametrize(
    ("architecture", "fused"),
    [
        ("MiniMaxM3SparseForCausalLM", {ADD: 6}),
        ("AliceAIForCausalLM", {GATED: 3}),
        ("Glm5NextForCausalLM", {GATED: 1, DUAL: 2}),
        ("Dots3NoteForCausalLM", {ADD: 6}),
    ],
)
def test_the_ops_that_stand_there_give_vllms_numbers(
    architecture: str, fused: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(architecture, tmp_path, False) as engine:
        plain = [engine(tokens) for tokens in (6, 1, 33)]
    caplog.clear()
    with started(architecture, tmp_path, {"fusions": list(fused), "strict": True}) as engine:
        got = [engine(tokens) for tokens in (6, 1, 33)]
    assert max(apart(*both) for both in zip(got, plain, strict=True)) < ROUNDING
    for fusion, sites in fused.items():
        assert f"{fusion}: {sites} expected, {sites} fused, 0 missed; called {sites} times in the first run" in said(
            caplog
        )


@pytest.mark.parametrize(
    ("architecture", "fused"),
    [
        ("MiniMaxM3SparseForCausalLM", {f"{ADD}_group_quant": 4, "rms_norm_group_quant": 1}),
        ("HYV4ForCausalLM", {"rms_norm_group_quant": 4, "silu_mul_group_quant": 1}),
        ("AliceAIForCausalLM", {"rms_norm_group_quant": 4}),
        ("Glm5NextForCausalLM", {"silu_mul_group_quant": 2}),
        ("Dots3NoteForCausalLM", {f"{ADD}_group_quant": 5, "silu_mul_group_quant": 3}),
    ],
)
def test_linears_behind_them_take_what_they_quantise(
    architecture: str, fused: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fp8(ROWS), started(architecture, tmp_path, False, BLOCK, "bfloat16") as engine:
        plain = [engine(tokens) for tokens in (6, 1, 33)]
    caplog.clear()
    options = {"fusions": list(fused), "strict": True}
    with fp8(ROWS), started(architecture, tmp_path, options, BLOCK, "bfloat16") as engine:
        assert max(apart(engine(tokens), each) for tokens, each in zip((6, 1, 33), plain, strict=True)) < EDGES
    for fusion, sites in fused.items():
        assert f"{fusion}: {sites} expected, {sites} fused, 0 missed; called {sites} times in the first run" in said(
            caplog
        )


def test_shared_experts_that_are_called_by_themselves_have_the_plans_own_chains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With FlashInfer installed their products are layerfuse's for few tokens too, behind silu * up that stands there once."""
    names = f"{ADD}_group_quant", "silu_mul_group_quant", BLOCKS
    with as_installed(), started("Dots3NoteForCausalLM", tmp_path, False, BLOCK, "bfloat16") as engine:
        plain = [engine(tokens) for tokens in (6, 1, 33)]
    caplog.clear()
    options = {"fusions": [*names], "strict": True}
    with as_installed(), started("Dots3NoteForCausalLM", tmp_path, options, BLOCK, "bfloat16") as engine:
        assert max(apart(engine(tokens), each) for tokens, each in zip((6, 1, 33), plain, strict=True)) < EDGES
    for name, sites in zip(names, (5, 3, 8), strict=True):
        line = f"{name}: {sites} expected, {sites} fused, 0 missed; called {sites} times in the first run"
        assert line in said(caplog)
