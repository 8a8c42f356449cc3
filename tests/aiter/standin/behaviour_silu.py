"""The gated activations that quantise: HIP's in groups, Triton's for a given scale, and Triton's that cuts at a limit."""

from __future__ import annotations

import torch
from torch import Tensor

from layerfuse.fusion.ops.quantisation import quantise

from .behaviour import Call, body, by_given_scale
from .misuse import SIXTEEN_BIT, check, expect, expect_rows, is_power_of_two

MODULE = "fused_silu_mul_fp8_per_tensor_static_quant"


def _halves(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    check(x.dim() == 2, f"{name} must have two dimensions", AssertionError)
    expect_rows(x, name)
    check(x.shape[1] % 2 == 0, "D % 2 == 0", AssertionError)
    gate, up = x.float().chunk(2, dim=-1)
    return gate, up


def _product(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


@body("aiter.ops.activation:silu_and_mul_quant")
def silu_and_mul_quant(call: Call) -> None:
    """Reads no stride; cuts the gate at the limit rounded to its dtype."""
    x, out, scale, group_size, limit = (call[name] for name in ("input", "out", "scale", "group_size", "limit"))
    expect(x.is_contiguous() and out.is_contiguous() and scale.is_contiguous(), "the kernel reads no stride")
    gate, up = _halves(x, "input")
    width = gate.shape[1]
    check(x.dtype in SIXTEEN_BIT, f"not support input type: {x.dtype}")
    call.check_fp8(out)
    check(group_size > 0 and width % group_size == 0, "d must be divisible by group_size")
    check(is_power_of_two(group_size), "group_size must be power of 2")
    check(width <= 8192, "silu_and_mul_quant: d > 8192 not supported")
    per_thread = next(size for most, size in ((2048, 8), (4096, 16), (6144, 24), (8192, 32)) if width <= most)
    threads = group_size // per_thread
    expect(
        group_size % per_thread == 0 and 1 <= threads <= 64,
        f"a group of {group_size} is no whole number of threads with {per_thread} columns: other columns are reduced",
    )
    expect(out.shape == gate.shape, f"out has shape {tuple(out.shape)}, but {tuple(gate.shape)} is written")
    expect(
        scale.dtype == torch.float32 and scale.numel() == gate.numel() // group_size,
        f"{gate.numel() // group_size} float32 scales are written",
    )
    if limit > 0:
        up = up.clamp(-limit, limit)
        gate = gate.clamp(max=limit).to(x.dtype).float()
    values, scales = quantise(_product(gate, up, 0), out.dtype, group_size, False, False)
    out.copy_(values)
    scale.view(-1).copy_((scales.t() if call["shuffle_scale"] else scales).reshape(-1))


@body(f"aiter.ops.triton.quant.fused_fp8_quant:{MODULE}")
def fused_silu_mul_fp8_per_tensor_static_quant(call: Call) -> Tensor:
    """One tensor, by a scale that is given."""
    x = call["inp"]
    product = _product(*_halves(x, "inp"), 0)
    if call["silu_convert_to_inp_type"]:
        product = product.to(x.dtype).float()
    return by_given_scale(product, call["inp_scale"], call.triton_fp8(call["dtype_quant"]))


@body("aiter.ops.triton.fusions.fused_clamp_act_mul:fused_clamp_act_mul")
def fused_clamp_act_mul(call: Call) -> tuple[Tensor, Tensor]:
    """With transposed scales, a contiguous view of column-major bytes, as from the quantising norm."""
    gate, up = _halves(call["inp"], "inp")
    width, group_size = gate.shape[1], call["quant_block_size"]
    check(width >= 128 and width % 128 == 0, "n_half % 128 == 0", AssertionError)
    check(is_power_of_two(group_size), "reshape of a power of two", ValueError)
    check(group_size <= 1 << (width - 1).bit_length(), "a block is larger than the row", ValueError)
    expect(call["scale_dtype_fmt"] == "fp32" and not call["shuffle_scale"], "the stand-in knows fp32")
    for name in ("out", "scale", "weights"):
        expect(call[name] is None, f"the stand-in takes no {name}")
    expect(call["activation"] == "silu" and call["dtype_quant"] is not None, "the stand-in quantises silu")
    product = _product(gate, up, call["swiglu_limit"])
    values, scales = quantise(product, call.triton_fp8(call["dtype_quant"]), group_size, False, False)
    return values, scales.t().contiguous().view(scales.shape) if call["transpose_scale"] else scales
