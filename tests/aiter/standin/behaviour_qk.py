"""The dual norms of q and k: without quantisation, and with one scale per group or per token."""

from __future__ import annotations

import torch
from torch import Tensor

from layerfuse.fusion.ops.norm import normalise, normalise_wide
from layerfuse.fusion.ops.quantisation import quantise

from .behaviour import Call, body
from .misuse import (
    SIXTEEN_BIT,
    check,
    expect,
    expect_even,
    expect_like,
    expect_rows,
    expect_unit_stride,
    expect_weight,
)

WIDEST = 8192
GROUPS = "aiter.ops.fused_qk_rmsnorm_group_quant"
PLAIN = "aiter.ops.fused_qk_norm_rope_cache_quant"


def _dual(call: Call, q_out: Tensor | None, k_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both norms, as `csrc/kernels/fused_qk_norm.cu` checks and computes them."""
    q, k, q_weight, k_weight = call["q"], call["k"], call["q_weight"], call["k_weight"]
    check(q.dim() == 2 and k.dim() == 2, "q and k must be 2D tensors")
    check(q_weight.dim() == 1 and k_weight.dim() == 1, "the weights must be 1D tensors")
    check(q_weight.is_contiguous() and k_weight.is_contiguous(), "the weights must be contiguous")
    check(len({q.dtype, k.dtype, q_weight.dtype, k_weight.dtype}) == 1, "q, k and the weights must have one dtype")
    check(q.dtype in SIXTEEN_BIT, f"unsupported dtype {q.dtype}")
    check(max(q.shape[1], k.shape[1]) <= WIDEST, f"not support n: {max(q.shape[1], k.shape[1])}")
    expect(q.shape[0] == k.shape[0], f"q has {q.shape[0]} rows and k {k.shape[0]}: only q's are counted")
    expect_rows(q, "q")
    expect_unit_stride(q=q, k=k)
    expect_even(q=q, k=k)
    expect_weight(q_weight, q, "q_weight")
    expect_weight(k_weight, k, "k_weight")
    outputs = []
    for name, out, x, weight in (("q_out", q_out, q, q_weight), ("k_out", k_out, k, k_weight)):
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        expect_like(out, x, name)
        expect_even(**{name: out})
        out.copy_(normalise(x, weight, call["q_eps" if name == "q_out" else "k_eps"]))
        outputs.append(out)
    return outputs[0], outputs[1]


@body(f"{PLAIN}:_fused_qk_rmsnorm")
def fused_qk_rmsnorm_underscore(call: Call) -> tuple[Tensor, Tensor]:
    """Outputs are given or None, and returned."""
    return _dual(call, call["q_out"], call["k_out"])


def _fits(tensor: Tensor | None, like: Tensor, name: str, of: str) -> Tensor:
    """A row-strided tensor of the dtype and shape of another one, checked by the kernel's host code."""
    if tensor is None:
        raise RuntimeError(f"{name} is required with {of}")
    check(tensor.dim() == 2, f"{name} must be a 2D tensor")
    check(tensor.dtype == like.dtype, f"{name} must have the dtype of {of}")
    check(tensor.shape == like.shape, f"{name} must have the shape of {of}")
    return tensor


def _check_layout(**tensors: Tensor | None) -> None:
    """Strides: rows may be apart."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() == 2:
            check(tensor.stride(1) == 1, f"{name} must have stride(1)==1, got {tensor.stride(1)}")
            check(tensor.stride(0) >= tensor.shape[1], f"{name} has invalid stride(0)={tensor.stride(0)}")


def _store_scales(target: Tensor, scales: Tensor, transposed: bool) -> None:
    """Writes (m, g) scales: by index, or, into a contiguous tensor that is called transposed, column after column."""
    rows, groups = scales.shape
    if transposed and target.stride() != (1, rows):
        check(target.is_contiguous(), "q_out_scale must be contiguous or have transpose-compatible strides")
        target.view(-1).copy_(scales.t().reshape(-1))
    else:
        target.copy_(scales)
    assert groups == target.shape[1]


def _quantised_pair(call: Call, group_size: int | None, transpose_scale: bool) -> None:
    """Both norms, q's quantised from its unrounded result: `csrc/kernels/fused_qk_rmsnorm_group_quant.cu`."""
    q, weight, quantised, scale = call["q"], call["q_weight"], call["q_out_quantized"], call["q_out_scale"]
    check(q is not None and weight is not None, "q and q_weight are required")
    offset = 1.0 if call["gemma_norm"] else 0.0
    check(q.dim() == 2, "q must be a 2D tensor")
    check(q.dtype in SIXTEEN_BIT, "q must be fp16 or bf16")
    check(weight.dim() == 1 and weight.dtype == q.dtype, "q_weight must be a 1D tensor of q's dtype")
    check(weight.numel() == q.shape[1], "q_weight must have as many elements as q has columns")
    expect_rows(q, "q")
    rows, width = q.shape
    outputs = {name: call[name] for name in ("q_out_quantized", "q_out_unquantized", "q_res_out", "k_out")}
    _check_layout(q=q, k=call["k"], q_residual=call["q_residual"], **outputs)
    check(weight.stride(0) == 1, "q_weight must have stride(0)==1")
    check(width <= WIDEST, f"not support n: {width}")
    wide = q.float()
    if call["q_residual"] is not None:
        wide = wide + _fits(call["q_residual"], q, "q_residual", "q").float()
        _fits(call["q_res_out"], q, "q_res_out", "q_residual").copy_(wide)
    else:
        expect(call["q_res_out"] is None, "q_res_out is given without q_residual: nothing is written to it")
    normed = normalise_wide(wide, weight.float(), call["q_epsilon"], offset)
    if scale is not None:
        call.check_fp8(quantised)
        check(quantised.shape == q.shape, "q_out_quantized must have the shape of q")
        if group_size is not None:
            check(width % group_size == 0, "q.size(1) must be divisible by group_size")
            check(group_size in (32, 64, 128), f"group_size not support: {group_size}")
        columns = 1 if group_size is None else width // group_size
        check(tuple(scale.shape) == (rows, columns), f"q_out_scale must be [{rows}, {columns}]")
        check(scale.dtype == torch.float32, "q_out_scale must be float32 for fp8")
        values, scales = quantise(normed, call.fp8, group_size, False, False)
        quantised.copy_(values)
        _store_scales(scale, scales, transpose_scale)
    if call["q_out_unquantized"] is not None:
        _fits(call["q_out_unquantized"], q, "q_out_unquantized", "q").copy_(normed)
    _norm_of_k(call, offset)


def _norm_of_k(call: Call, offset: float) -> None:
    k = call["k"]
    if k is None:
        expect(call["k_out"] is None, "k_out is given without k: nothing is written to it")
        return
    q, weight = call["q"], call["k_weight"]
    check(weight is not None, "k_weight is required with k")
    check(k.dim() == 2 and k.dtype == q.dtype, "k must be a 2D tensor of q's dtype")
    check(k.shape[0] == q.shape[0], "k and q must have the same leading dim")
    check(weight.dim() == 1 and weight.dtype == q.dtype, "k_weight must be a 1D tensor of q's dtype")
    check(
        weight.numel() == k.shape[1] and weight.stride(0) == 1, "k_weight must have as many elements as k has columns"
    )
    check(k.shape[1] <= WIDEST, f"not support n: {k.shape[1]}")
    epsilon = call["q_epsilon"] if call["k_epsilon"] is None else call["k_epsilon"]
    _fits(call["k_out"], k, "k_out", "k").copy_(normalise(k, weight, epsilon, offset))


@body(f"{GROUPS}:fused_qk_rmsnorm_group_quant")
def fused_qk_rmsnorm_group_quant(call: Call) -> None:
    """q quantised in groups, k only normalised; every output is preallocated."""
    if call["q_out_scale"] is None:
        check(call["q_out_unquantized"] is not None, "q_out_unquantized must be provided without scales", ValueError)
        _quantised_pair(call, None, False)
        return
    group_size, quantised = call["group_size"], call["q_out_quantized"]
    check(group_size > 0, "fused_qk_rmsnorm_group_quant requires group_size > 0", ValueError)
    check(quantised is not None, "q_out_quantized must be provided when q_out_scale is", ValueError)
    if quantised.dtype == torch.uint8:
        raise NotImplementedError("the stand-in does not quantise to fp4")
    check(quantised.dtype == call.fp8, f"supports fp8/fp4x2 output quant only; got {quantised.dtype}", ValueError)
    _quantised_pair(call, group_size, call["transpose_scale"])


@body(f"{GROUPS}:fused_qk_rmsnorm_per_token_quant")
def fused_qk_rmsnorm_per_token_quant(call: Call) -> None:
    """q quantised with one scale per row."""
    quantised, scale = call["q_out_quantized"], call["q_out_scale"]
    check(quantised.dtype == call.fp8, f"supports fp8 output quant only; got {quantised.dtype}", ValueError)
    check(scale.dim() == 2 and scale.shape[1] == 1, "expects q_out_scale with shape [m, 1]", ValueError)
    _quantised_pair(call, None, False)
