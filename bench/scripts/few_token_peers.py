"""What multiplies a few tokens by weights: kernels that engines call, and layerfuse's, each as what it does to activations and to weights.

Weights are fp8 in blocks of 128 x 128, fp8 with a scale per column of the product, or bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerfuse.fusion import ops

BLOCK = 128
"""Columns of an activation's scale, and both sides of a weight's (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""
FP8 = torch.float8_e4m3fn
EPSILON = 1e-6

CUTLASS, SCALED_MM, CUBLAS = "vLLM CUTLASS", "vLLM cutlass_scaled_mm", "cuBLAS"
WEIGHTS_ALONE = "vLLM Marlin, bfloat16 in"
"""Reads activations as they are."""
INSTALLED, BEYOND = "FlashInfer, bfloat16 in", "DeepGEMM"
"""vLLM's linears as it is installed, with FlashInfer and without."""
FLASHINFER_BELOW = 32
"""Tokens from which vLLM's op of FlashInfer's kernel calls DeepGEMM's."""
OURS = "layerfuse"


class Peer(NamedTuple):
    """What multiplies."""

    multiply: Callable[..., Tensor]
    """Of what `quantise` gives and what `load` gives."""
    quantise: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    """Activations, at each call; None: it takes them in bfloat16."""
    load: Callable[..., tuple[Any, ...]] = lambda *weight: weight
    """Weights, once."""
    behind_norm: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None
    """Activations and the norm's weight to what `multiply` takes, at each call: one launch, or the norm and what quantises."""
    few: bool = False
    """Whether it takes few tokens alone."""
    beyond: Callable[[int], str] | None = None
    """Who multiplies more tokens than few, in its place."""


def _vllm_quantised(**given: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return partial(per_token_group_quant_fp8, group_size=BLOCK, use_ue8m0=False, **given)


def vllm_norm(x: Tensor, weight: Tensor) -> Tensor:
    """By vLLM's kernel."""
    from vllm._custom_ops import rms_norm

    out = torch.empty_like(x)
    rms_norm(out, x, weight, EPSILON)
    return out


def _vllm_norm_quantised(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm and its quantisation by vLLM's one kernel, with scales as DeepGEMM's kernel reads them."""
    from vllm._custom_ops import rms_norm_per_block_quant

    return rms_norm_per_block_quant(  # type: ignore[no-any-return]
        x, weight, EPSILON, FP8, [1, BLOCK], is_scale_transposed=True, tma_alignment=4
    )


def _cutlass() -> Peer:
    from vllm._custom_ops import cutlass_scaled_mm

    return Peer(
        lambda x, scales, weight, weight_scales: cutlass_scaled_mm(
            x, weight.T, out_dtype=torch.bfloat16, scale_a=scales, scale_b=weight_scales.T
        ),
        _vllm_quantised(column_major_scales=True),
    )


def _deep_gemm() -> Peer:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block
    from vllm.utils.deep_gemm import fp8_gemm_nt

    def multiply(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=torch.bfloat16, device=x.device)
        fp8_gemm_nt((x, scales), (weight, weight_scales), out, is_deep_gemm_e8m0_used=False)
        return out

    load = partial(deepgemm_post_process_fp8_weight_block, quant_block_shape=(BLOCK, BLOCK), use_e8m0=False)
    quantise = _vllm_quantised(column_major_scales=True, tma_aligned_scales=True)
    return Peer(multiply, quantise, load, _vllm_norm_quantised)


def _vllm_triton() -> Peer:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm as multiply

    return Peer(
        lambda x, scales, weight, weight_scales: multiply(
            x, weight, scales, weight_scales, [BLOCK, BLOCK], torch.bfloat16
        ),
        _vllm_quantised(column_major_scales=False),
    )


def _flashinfer() -> Peer:
    # Its kernel reads scales as DeepGEMM's does, by columns of a multiple of four, whatever its docstring says.
    from flashinfer.gemm import fp8_blockscale_gemm_sm90 as multiply

    return Peer(
        lambda x, scales, weight, weight_scales: multiply(x, weight, scales, weight_scales),
        _vllm_quantised(column_major_scales=True, tma_aligned_scales=True),
    )


def _flashinfer_inside() -> Peer:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90 as multiply

    return Peer(
        lambda x, weight, weight_scales: multiply(x, weight, None, weight_scales),
        behind_norm=lambda x, weight: (vllm_norm(x, weight),),
    )


def _marlin() -> Peer:
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8

    def load(weight: Tensor, weight_scales: Tensor) -> tuple[Any, ...]:
        layer: Any = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale_inv = torch.nn.Parameter(weight_scales, requires_grad=False)
        layer.output_size_per_partition, layer.input_size_per_partition = weight.shape
        layer.weight_block_size, layer.orig_dtype = [BLOCK, BLOCK], torch.bfloat16
        marlin_utils_fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
        return layer.weight, layer.weight_scale_inv, *weight.shape

    def multiply(x: Tensor, weight: Tensor, weight_scales: Tensor, columns: int, depth: int) -> Tensor:
        return marlin_utils_fp8.apply_fp8_marlin_linear(  # type: ignore[no-any-return]
            x, weight, weight_scales, None, columns, depth, None
        )

    return Peer(multiply, load=load)


def _scaled_mm(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    return torch._scaled_mm(x, weight.T, scale_a=scales, scale_b=weight_scales.T, out_dtype=torch.bfloat16)


def torch_blocks() -> Peer:
    """The product of torch, by cuBLAS, whose weight scales lie in rows of a multiple of four."""

    def load(weight: Tensor, weight_scales: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = weight_scales.shape
        wide = weight_scales.new_zeros(rows, -(-columns // 4) * 4)
        wide[:, :columns] = weight_scales
        return weight, wide[:, :columns]

    return Peer(_scaled_mm, _vllm_quantised(column_major_scales=True), load)


def _channel_cutlass() -> Peer:
    from vllm._custom_ops import cutlass_scaled_mm, scaled_fp8_quant

    return Peer(
        lambda x, scales, weight, weight_scales: cutlass_scaled_mm(
            x, weight.T, out_dtype=torch.bfloat16, scale_a=scales, scale_b=weight_scales
        ),
        partial(scaled_fp8_quant, use_per_token_if_dynamic=True),
    )


def _fused_a(overlaps: bool) -> Peer:
    from vllm._custom_ops import dsv3_fused_a_gemm

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        dsv3_fused_a_gemm(out, x, weight.T, enable_pdl=overlaps)
        return out

    return Peer(multiply, few=True)


def _ours() -> Peer:
    aligned = {"column_major": True, "tma_aligned": True}
    return Peer(
        partial(ops.block_scaled_linear, steady=True),
        partial(ops.quantise_group, dtype=FP8, group_size=BLOCK, **aligned),
        behind_norm=lambda x, weight: ops.rms_norm_group_quant(x, weight, EPSILON, **aligned),
        few=True,
        beyond=lambda tokens: "FlashInfer" if tokens < FLASHINFER_BELOW else BEYOND,
    )


Makers = dict[str, Callable[[], Peer]]
PEERS: dict[str, Makers] = {
    "blocks": {
        CUTLASS: _cutlass, BEYOND: _deep_gemm, "FlashInfer": _flashinfer, "vLLM Triton": _vllm_triton, INSTALLED: _flashinfer_inside,
        WEIGHTS_ALONE: _marlin, "torch._scaled_mm of blocks": torch_blocks,
        OURS: _ours, f"{OURS}, bfloat16 in": lambda: Peer(partial(ops.group_quant_linear, steady=True), few=True),
    },
    "channels": {
        SCALED_MM: _channel_cutlass, "torch._scaled_mm": lambda: Peer(_scaled_mm, ops.quantise_per_token),
        OURS: lambda: Peer(partial(ops.scaled_linear, steady=True), ops.quantise_per_token, few=True),
    },
    "bfloat16": {
        CUBLAS: lambda: Peer(torch.nn.functional.linear),
        "vLLM fused_a_gemm": partial(_fused_a, False), "vLLM fused_a_gemm, overlapping": partial(_fused_a, True),
        OURS: lambda: Peer(partial(ops.few_token_linear, steady=True)),
    },
}  # fmt: skip
"""By what the weights are, and by name."""


def names_of(kind: str, parts: str) -> list[str]:
    """Those of a kind of weights: the peers that are asked for by parts of their names, cuBLAS and layerfuse."""
    wanted = [each for each in parts.split(",") if each]
    return [name for name in PEERS[kind] if any(each in name for each in (*wanted, CUBLAS, OURS))]


@cache
def made(kind: str, name: str) -> Peer | Exception:
    """Once; or why not."""
    try:
        return PEERS[kind][name]()
    except Exception as problem:  # whatever is not installed here
        return problem


def peer(kind: str, name: str) -> Peer:
    """Raises what its making raised, each time."""
    found = made(kind, name)
    if isinstance(found, Exception):
        raise found
    return found
