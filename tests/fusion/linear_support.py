"""Arguments of the linears with few tokens, and what each must give, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerfuse.fusion import ops
from layerfuse.fusion.ops.linear import dequantised, scales_shape
from layerfuse.fusion.ops.quantisation import quantise

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FP8 = torch.float8_e4m3fn
PLAIN, QUANTISES, BLOCKS, ROWS = "few_token_linear", "group_quant_linear", "block_scaled_linear", "scaled_linear"
LINEARS = (PLAIN, QUANTISES, BLOCKS, ROWS)
UNIT = {torch.bfloat16: 2**-8 if GPU else 2**-7, torch.float16: 2**-11, torch.float32: 2**-20}
"""One rounding. Triton's interpreter cuts float32 down to bfloat16."""


def given_of(
    op: str,
    tokens: int,
    columns: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    scheme: tuple[str, str] = ("token", "channel"),
    column_major: bool = False,
) -> dict[str, Any]:
    """By name. What is quantised in groups is what fp8 holds exactly: Triton's interpreter rounds to fp8 as no hardware does."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def scales(*shape: int) -> Tensor:
        return ((torch.rand(shape, generator=generator) + 0.1) * 0.01).to(DEVICE)

    if op == PLAIN:
        given = {"x": drawn(tokens, width).to(DEVICE, dtype), "weight": drawn(columns, width).to(DEVICE, dtype)}
        return given | ({"bias": drawn(columns).to(DEVICE, dtype)} if bias else {})
    x, weight = ((drawn(rows, width) * 100).clamp(-448, 448) for rows in (tokens, columns))
    x, weight = (each.where(each.abs() > 1, 0).to(FP8).to(DEVICE) for each in (x, weight))
    if op == ROWS:
        given = {"x": x, "x_scale": scales(*((tokens, 1) if scheme[0] == "token" else ()))}
        given |= {"weight": weight, "weight_scale": scales(*((columns, 1) if scheme[1] == "channel" else (1,)))}
        added = {"bias": (drawn(columns) * 100).to(DEVICE, dtype)} if bias else {}
        return given | {"out_dtype": dtype} | added
    wide = x.float()
    wide[:, ::128] = 448
    given = {"x": wide.to(dtype), "weight": weight, "weight_scale": scales(*scales_shape(weight)) * width**-0.5 / 100}
    if op == BLOCKS:
        values, of_groups = quantise(wide, FP8, 128, column_major, False, column_major)
        given |= {"x": values, "x_scale": of_groups, "out_dtype": dtype}
    return given


def call(op: str, given: dict[str, Any], **changes: Any) -> Tensor:
    result: Tensor = getattr(ops, op)(**(given | changes))
    return result


def operands(op: str, given: dict[str, Any], use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """What is multiplied, in float64."""
    x, weight = given["x"], given["weight"]
    if op == PLAIN:
        return x.double(), weight.double()
    if op == ROWS:
        return x.double() * given["x_scale"], weight.double() * given["weight_scale"].view(-1, 1)
    values = (x, given["x_scale"]) if op == BLOCKS else quantise(x.float(), FP8, 128, False, use_ue8m0)
    return dequantised(*values, 1).double(), dequantised(weight, given["weight_scale"], 128).double()


def close(op: str, got: Tensor, given: dict[str, Any], backend: str = "triton") -> None:
    """To float64, but for one rounding and what the order of sums loses."""
    x, weight = operands(op, given)
    right = x @ weight.t() + (given["bias"].double() if "bias" in given else 0)
    # Hopper's tensor cores keep 14 bits of a sum of fp8 products (DeepSeek-V3, arXiv 2412.19437, section 3.5.2), here of 128 of them.
    # What torch calls may round in between.
    lost = 2**-9 if op == PLAIN and backend == "reference" else 2**-11 if GPU and op != PLAIN else 2**-20
    assert got.dtype == given.get("out_dtype", given["x"].dtype) and got.is_contiguous()
    assert bool(
        ((got.double() - right).abs() <= right.abs() * UNIT[got.dtype] + x.abs() @ weight.abs().t() * lost).all()
    )
