"""The norms quantised in blocks of 32 with a byte for each scale, on Triton, and what bytes stand for which scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerfuse.fusion.ops.norm import normalise_wide

from .behaviour import Call, body
from .misuse import check, expect, expect_rows, expect_unit_stride

BLOCK = 32
STEPS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Halfway between the magnitudes of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def exponents(scales: Tensor) -> Tensor:
    """The biased exponents of powers of two, as bytes."""
    return ((scales.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def _rounded_exponent(values: Tensor, most: int) -> Tensor:
    """Of the largest magnitude of a block, rounded to a power of two from 1.75 times one on, less that of the format."""
    amax = values.abs().amax(-1).contiguous()
    power = ((amax.view(torch.int32) + 0x200000) & ~0x7FFFFF).view(torch.float32)
    return (power.log2().floor() - most).clamp(-127, 127)


def _blocks(call: Call, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm in blocks, (rows, blocks, 32), and the sum."""
    check(x.dim() == 2, f"x must be 2D, got {x.dim()}", AssertionError)
    expect_rows(x, "x")
    width = x.shape[1]
    expect(width % BLOCK == 0, f"the stand-in knows whole blocks only, not {width} columns")
    expect(weight.dim() == 1 and weight.numel() == width and weight.is_contiguous(), "weight does not fit x")
    wide = x.float() if residual is None else x.float() + residual.float()
    return normalise_wide(wide, weight.float(), epsilon).unflatten(-1, (-1, BLOCK)), wide


@body("aiter.ops.triton.quant.fused_mxfp8_quant:fused_rms_mxfp8_quant")
def fused_rms_mxfp8_quant(call: Call) -> tuple[Tensor, Tensor]:
    """Allocates; always e4m3fn."""
    expect(call.fp8 == torch.float8_e4m3fn, f"{call.arch} has no store for e4m3fn")
    expect(call["y"] is None and call["scale"] is None, "the stand-in allocates")
    blocks, _ = _blocks(call, call["x"], call["weight"], call["eps"], None)
    exponent = _rounded_exponent(blocks, 8)
    values = (blocks * torch.exp2(-exponent).unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return values, (exponent + 127).to(torch.uint8)


def _e2m1(values: Tensor) -> Tensor:
    """Codes of four bits, to nearest even; what is larger than 6 becomes 6."""
    magnitude = values.abs().contiguous()
    code = torch.bucketize(magnitude, STEPS)
    halfway = (magnitude.unsqueeze(-1) == STEPS).any(-1)
    code = code + (halfway & (code % 2 == 1))
    return code.to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)


@body("aiter.ops.triton.quant.fused_mxfp4_quant:fused_rms_mxfp4_quant")
def fused_rms_mxfp4_quant(call: Call) -> tuple[Any, ...]:
    """Two values in a byte, the first in its low half."""
    x, residual = call["x1"], call["res1"]
    expect(call["x2"] is None, "the stand-in knows no second input")
    expect(not call["shuffle"] and not call["scale_shuffle_padding"], "the stand-in shuffles nothing")
    expect_unit_stride(x=x, residual=residual)
    if residual is not None:
        expect(residual.shape == x.shape and residual.dtype == x.dtype, "res1 is read as if it were like x")
    blocks, wide = _blocks(call, x, call["x1_weight"], call["x1_epsilon"], residual)
    exponent = _rounded_exponent(blocks, 2)
    codes = _e2m1((blocks * torch.exp2(-exponent).unsqueeze(-1)).flatten(-2))
    quantised = codes[:, ::2] | (codes[:, 1::2] << 4), (exponent + 127).to(torch.uint8)
    summed = None if residual is None else wide.to(x.dtype).contiguous()
    plain = blocks.flatten(-2).to(x.dtype) if call["output_unquantized_inp1"] else None
    return quantised, plain, None, summed
