"""The Triton ops: they allocate their results, at fixed places in a tuple."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerfuse.fusion.ops.norm import normalise_wide
from layerfuse.fusion.ops.quantisation import quantise

from .behaviour import Call, body, by_given_scale
from .misuse import check, expect, expect_rows, is_power_of_two

MODULE = "aiter.ops.triton.quant.fused_fp8_quant"


def _two_dimensions(x: Tensor, name: str) -> tuple[int, int]:
    check(x.dim() == 2, f"wrong number of values to unpack: {name} has {x.dim()} dimensions", ValueError)
    expect_rows(x, name)
    return x.shape[0], x.shape[1]


def _weight(weight: Tensor, width: int, name: str) -> None:
    expect(weight.dim() == 1 and weight.numel() == width, f"{name} {tuple(weight.shape)}: {width} elements are read")
    expect(weight.stride(0) == 1, f"{name} has stride {weight.stride(0)}, but 1 is assumed unchecked")


def _first(call: Call) -> tuple[Tensor, Tensor | None]:
    """The first norm before rounding, and the rounded sum with the residual."""
    x, residual = call["inp1"], call["res1"]
    rows, width = _two_dimensions(x, "inp1")
    _weight(call["inp1_weight"], width, "inp1_weight")
    wide, summed = x.float(), None
    if residual is not None:
        check(tuple(residual.shape) == (rows, width), "inp1 and res1 should have one shape", AssertionError)
        wide = wide + residual.float()
        summed = wide.to(x.dtype).contiguous()
    return normalise_wide(wide, call["inp1_weight"].float(), call["inp1_epsilon"]), summed


def _second(call: Call) -> Tensor | None:
    x = call["inp2"]
    if x is None:
        return None
    rows, width = _two_dimensions(x, "inp2")
    check(rows == call["inp1"].shape[0], "The leading dimension should be identical", AssertionError)
    expect(call["inp2_weight"] is not None and call["inp2_epsilon"] is not None, "inp2 needs its weight and epsilon")
    _weight(call["inp2_weight"], width, "inp2_weight")
    second = normalise_wide(x.float(), call["inp2_weight"].float(), call["inp2_epsilon"])
    return second.to(call["inp1"].dtype).contiguous()


@body(f"{MODULE}:fused_rms_fp8_group_quant")
def fused_rms_fp8_group_quant(call: Call) -> tuple[Any, ...]:
    """((fp8, scales), unquantised, second norm, sum with the residual): what was not asked for is None."""
    group_size, transposed, strided = call["group_size"], call["transpose_scale"], call.get("is_x_scale_strided", False)
    check(is_power_of_two(group_size), f"arange's range must be a power of 2, got {group_size}", ValueError)
    normed, summed = _first(call)
    second = _second(call)
    values, scales = quantise(normed, call.triton_fp8(call["dtype_quant"]), group_size, False, False)
    if transposed:
        memory = scales.t().contiguous()
        scales = memory.t() if strided else memory.view(scales.shape)
    unquantised = normed.to(call["inp1"].dtype).contiguous() if call["output_unquantized_inp1"] else None
    return (values, scales), unquantised, second, summed


@body(f"{MODULE}:fused_rms_fp8_per_tensor_static_quant")
def fused_rms_fp8_per_tensor_static_quant(call: Call) -> tuple[Any, ...]:
    """(fp8, unquantised, second norm, sum with the residual), by a scale that is given."""
    normed, summed = _first(call)
    second = _second(call)
    if second is not None:
        block = 1 << (second.shape[1] - 1).bit_length()
        expect(block >= normed.shape[1], f"the block of {block} is chosen by inp2 alone: columns of inp1 are left out")
    rounded = normed.to(call["inp1"].dtype).float() if call["rmsnorm_convert_to_inp1_type"] else normed
    values = by_given_scale(rounded, call["inp1_scale"], call.triton_fp8(call["dtype_quant"]))
    unquantised = normed.to(call["inp1"].dtype).contiguous() if call["output_unquantized_inp1"] else None
    return values, unquantised, second, summed


@body("aiter.ops.triton.normalization.fused_add_rmsnorm_pad:fused_add_rmsnorm_pad")
def fused_add_rmsnorm_pad(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """The norm, zero-padded to a multiple; with a residual a tuple, without one a tensor."""
    x, residual, multiple = call["x"], call["res"], call["x_pad_to_multiple"]
    rows, width = _two_dimensions(x, "x")
    _weight(call["weight"], width, "weight")
    strides = (*x.stride(), *(() if residual is None else residual.stride()))
    expect(min(strides) > 0, f"the kernel assumes that strides are above 0: {strides}")
    wide = x.float()
    if residual is not None:
        check(tuple(residual.shape) == (rows, width), "Shape error!", AssertionError)
        wide = wide + residual.float()
    out = normalise_wide(wide, call["weight"].float(), call["epsilon"]).to(x.dtype).contiguous()
    if multiple > 0:
        out = torch.nn.functional.pad(out, (0, -width % multiple))
    return out if residual is None else (out, wide.to(residual.dtype).contiguous())


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@body("aiter.ops.triton.activation:act_mul_and_fp8_group_quant")
def act_mul_and_fp8_group_quant(call: Call) -> tuple[Tensor, Tensor]:
    """The first half activated, times the second."""
    x, group_size = call["x"], call["group_size"]
    _, width = _two_dimensions(x, "x")
    check(width % 2 == 0, "N % 2 == 0", AssertionError)
    check(is_power_of_two(group_size), f"arange's range must be a power of 2, got {group_size}", ValueError)
    expect(call["activation"] in ACTIVATIONS, f"activation {call['activation']!r} silently means none")
    half = width // 2
    expect(half % group_size == 0, f"columns behind the {half} are not loaded, but count for a scale of {group_size}")
    product = ACTIVATIONS[call["activation"]](x[:, :half].float()) * x[:, half:].float()
    return quantise(product, call.triton_fp8(call["dtype_quant"]), group_size, False, False)
