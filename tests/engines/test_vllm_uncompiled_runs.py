"""Models that vLLM does not compile, tiny and run on a CPU: the ops that stand in them are called at every site, and give vLLM's numbers.

Plain torch stands for kernels of attention and for those that mix streams. Run by `make test-engines` in an environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm_started")
from few_token_linears import BLOCKS
from reports import FIRST, Said, told
from test_vllm_inside import as_installed
from test_vllm_plugin import ADD, DUAL, ROWS
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


TINY = json.loads((Path(__file__).parent / "vllm_tiny_uncompiled.json").read_text(encoding="utf-8"))
"""What is smaller than by default."""
STAND_INS: dict[str, Callable[[], Any]] = {
    "MiniMaxM3SparseForCausalLM": flashinfer,
    "HYV4ForCausalLM": contextlib.nullcontext,
    "Dots3NoteForCausalLM": lambda: mock.patch("vllm.models.deepseek_v32.nvidia.model.fused_embed_norm", _embedded),
    "Glm5NextForCausalLM": hyper_connections,
    "AliceAIForCausalLM": lambda: mock.patch("vllm.model_executor.models.alice_ai.attn_res", _weighed),
}
"""What stands for kernels."""


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
    write_config(architecture, folder, quant, **TINY[architecture])
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
    with STAND_INS[architecture](), in_engine(config, folder, groups), on(DEFAULTS[architecture]), routes:
        yield load(config)


QUANTISING = "rms_norm_group_quant", "silu_mul_group_quant", f"{ADD}_group_quant"


@pytest.mark.parametrize(
    ("architecture", "fused"),
    [
        ("MiniMaxM3SparseForCausalLM", {ADD: 6}),
        ("AliceAIForCausalLM", {GATED: 3}),
        ("Glm5NextForCausalLM", {GATED: 1, DUAL: 2}),
        ("Dots3NoteForCausalLM", {ADD: 6}),
        # Linears behind them take what they quantise.
        ("MiniMaxM3SparseForCausalLM", {f"{ADD}_group_quant": 4, "rms_norm_group_quant": 1}),
        ("HYV4ForCausalLM", {"rms_norm_group_quant": 4, "silu_mul_group_quant": 1}),
        ("AliceAIForCausalLM", {"rms_norm_group_quant": 4}),
        ("Glm5NextForCausalLM", {"silu_mul_group_quant": 2}),
        ("Dots3NoteForCausalLM", {f"{ADD}_group_quant": 5, "silu_mul_group_quant": 3}),
        # With FlashInfer installed few tokens are layerfuse's in shared experts too, which the model calls: their silu * up stands there once.
        ("Dots3NoteForCausalLM", {f"{ADD}_group_quant": 5, "silu_mul_group_quant": 3, BLOCKS: 8}),
    ],
)
def test_the_ops_that_stand_there_give_vllms_numbers(
    architecture: str, fused: dict[str, int], tmp_path: Path, said: Said
) -> None:
    quantising = not {*fused}.isdisjoint(QUANTISING)
    given: Any = (BLOCK, "bfloat16") if quantising else ()
    results = []
    for options in (False, {"fusions": [*fused], "strict": True}):
        said.clear()
        kernel = as_installed() if BLOCKS in fused else fp8(ROWS) if quantising else contextlib.nullcontext()
        with kernel, started(architecture, tmp_path, options, *given) as engine:
            results.append([engine(tokens) for tokens in (6, 1, 33)])
    assert max(apart(*both) for both in zip(*reversed(results), strict=True)) < (EDGES if quantising else ROUNDING)
    assert {told(fusion, sites, FIRST) for fusion, sites in fused.items()} <= {*said()}
