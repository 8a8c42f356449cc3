"""The gated norms with quantisation: Triton's, and the two HIP kernels for heads of 128 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from layerfuse.fusion.ops.norm import normalise_wide
from layerfuse.fusion.ops.quantisation import round_up_to_power_of_two

from .behaviour import LARGEST, Call, body
from .misuse import SIXTEEN_BIT, check, expect, expect_rows, expect_unit_stride

HEAD = 128


def _gate(values: Tensor, z: Tensor, activation: str) -> Tensor:
    wide = z.float()
    return values * (wide.sigmoid() if activation == "sigmoid" else wide * wide.sigmoid())


@body("aiter.ops.triton.quant.fused_fp8_quant:fused_rms_gated_fp8_group_quant")
def fused_rms_gated_fp8_group_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Allocates; scales are (rows,) without groups, and e4m3fnuz is bounded by 224."""
    x, z, weight, bias = call["x"], call["z"], call["weight"], call["bias"]
    check(x.is_contiguous() and z.is_contiguous(), "x and z must be contiguous", AssertionError)
    check(x.shape == z.shape, "x and z must have the same shape", AssertionError)
    dtype = call["out_dtype"] or call.fp8
    call.check_fp8(torch.empty(0, dtype=dtype))
    least, largest = call["fp8_min"], call["fp8_max"]
    check((least is None) == (largest is None), "fp8_min and fp8_max must be passed together", ValueError)
    if largest is None:
        largest = 224.0 if dtype == torch.float8_e4m3fnuz else LARGEST[dtype]
        least = -largest
    expect(-largest <= least <= 0 < largest <= LARGEST[dtype], f"{dtype} has no values up to {largest}")
    check(x.dim() == 2, f"not enough values to unpack: x has {x.dim()} dimensions", ValueError)
    rows, width = x.shape
    expect_rows(x, "x")
    group_size = call["group_size"]
    if group_size is not None:
        check(0 < group_size <= width and width % group_size == 0, f"group_size {group_size} does not fit", ValueError)
    check(width <= 65536 // x.element_size(), "This RMSNorm quant kernel does not support N >= 64KB.")
    activation = call["activation"]
    expect(activation in ("silu", "swish", "sigmoid"), f"activation {activation!r} silently means no gate at all")
    expect(weight.numel() == width, f"weight has {weight.numel()} elements, {width} are read")
    expect(bias is None or bias.numel() == width, "bias does not fit the width")
    wide = x.float()
    if not call["norm_before_gate"]:
        wide = _gate(wide, z, activation)
    normed = normalise_wide(wide, weight.float(), call["eps"])
    if bias is not None:
        normed = normed + bias.float()
    if call["norm_before_gate"]:
        normed = _gate(normed, z, activation)
    grouped = normed.unflatten(-1, (-1, group_size or width))
    scales = grouped.abs().amax(-1) / largest
    if call["use_ue8m0"]:
        scales = round_up_to_power_of_two(scales)
    floor = call["fp8_min_scaling_factor"]
    scales = scales.clamp(min=1.0 / (largest * 512.0) if floor is None else floor)
    quantised = (grouped / scales.unsqueeze(-1)).clamp(least, largest).flatten(-2).to(dtype)
    return quantised, scales if group_size is not None else scales.view(rows)


def _heads(call: Call) -> tuple[Tensor, int, int]:
    """The gated values of both HIP kernels, (tokens, heads, 128), with their tokens and heads."""
    x, z, weight, out = call["x"], call["z"], call["weight"], call["out"]
    check(x.dim() == 3 and z.dim() == 3, "Input x and z must be 3D: [num_tokens, num_heads, head_dim]")
    check(x.shape == z.shape, "Gating tensor z must have same shape as x")
    tokens, heads, width = x.shape
    check(width == HEAD, f"ONLY head_dim=128 is supported, got {width}")
    check(weight.shape[0] == width, "Weight size must match head_dim")
    expect(weight.dim() == 1 and weight.is_contiguous(), "weight is not contiguous, but would be read as if it were")
    expect(weight.dtype == x.dtype, f"weight is {weight.dtype}, but would be read as {x.dtype}")
    expect(z.dtype == x.dtype, f"z is {z.dtype}, but would be read as {x.dtype}")
    check(x.stride(2) == 1 and z.stride(2) == 1, "the stride of the last dimension must be 1")
    expect_rows(x, "x")
    call.check_fp8(out)
    check(x.dtype in SIXTEEN_BIT and out.dtype in LARGEST, f"Unsupported dtype combination {x.dtype}, {out.dtype}")
    flat = out.is_contiguous() and out.numel() == tokens * heads * width and out.shape[0] == tokens
    expect(flat, f"out {tuple(out.shape)} is written as contiguous [{tokens}, {heads * width}]")
    return _gate(normalise_wide(x.float(), weight.float(), call["epsilon"]), z, "silu"), tokens, heads


def _quantise(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scale over the last dimension. Zeros get a scale of 1e-10 itself, unlike in the other kernels."""
    largest = LARGEST[dtype]
    amax = values.abs().amax(-1)
    scales = torch.where(amax > 1e-10, amax / largest, 1e-10)
    quantised = (values * scales.reciprocal().unsqueeze(-1)).clamp(-largest, largest).to(dtype)
    return quantised, scales


@body("aiter.ops.gated_rmsnorm_fp8_group_quant:gated_rmsnorm_fp8_group_quant")
def gated_rmsnorm_fp8_group_quant(call: Call) -> None:
    """One scale per head; transposed ones are (heads, tokens) in memory, whatever the tensor's shape says."""
    out, scale = call["out"], call["scale"]
    values, tokens, heads = _heads(call)
    check(call["group_size"] == HEAD, f"ONLY group_size=128 is supported, got {call['group_size']}")
    expect(scale.dtype == torch.float32, f"scale is {scale.dtype}, but float32 is written")
    dense = scale.is_contiguous() or (call["transpose_scale"] and scale.t().is_contiguous())
    expect(
        dense and scale.numel() == tokens * heads, f"scale {tuple(scale.shape)} is written as {tokens * heads} floats"
    )
    quantised, scales = _quantise(values, out.dtype)
    out.view(tokens, -1).copy_(quantised.flatten(1))
    memory = scale if scale.is_contiguous() else scale.t()
    memory.view(-1).copy_((scales.t() if call["transpose_scale"] else scales).reshape(-1))


@body("aiter.ops.gated_rmsnorm_fp8_per_token_quant:gated_rmsnorm_fp8_per_token_quant")
def gated_rmsnorm_fp8_per_token_quant(call: Call) -> None:
    """One scale per token, over all its heads."""
    out, scale = call["out"], call["scale"]
    check(out.is_contiguous(), "out must be contiguous")
    values, tokens, heads = _heads(call)
    check(heads <= 128, f"num_heads must be <= 128, got {heads}")
    check(scale.dtype == torch.float32 and scale.is_contiguous(), "scale must be contiguous float32")
    check(scale.numel() == tokens, f"scale must have {tokens} elements")
    expect_unit_stride(out=out)
    quantised, scales = _quantise(values.flatten(1), out.dtype)
    out.view(tokens, -1).copy_(quantised)
    scale.view(-1).copy_(scales)
