"""The canonical ops: one norm, and the quantisations of activations.

They are what a model may call to be recognised at once. What no fusion has taken is lowered back to plain arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..declare import (
    COLUMN_MAJOR,
    SWIZZLED,
    TMA_ALIGNED,
    UE8M0,
    Epsilon,
    Exponents,
    GlobalScale,
    GroupSize,
    Like,
    Op,
    Packed,
    QuantDtype,
    Quantised,
    Rows,
    Scales,
    SmallScales,
    StaticScale,
    Weight,
    WeightOffset,
)
from .norm import normalise, normalise_backward
from .quantisation import quantise, quantise_mxfp4, quantise_mxfp8, quantise_nvfp4, quantise_static

_X = Rows(name="x", doc="(..., width), any strides.", any_strides=True)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 (torch passes it by name)
    x, weight, ctx.epsilon, ctx.weight_offset = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return (*normalise_backward(grad, x, weight, ctx.epsilon, ctx.weight_offset), None, None)


def _per_token(x: Tensor, dtype: torch.dtype, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    return quantise(x.float(), dtype, None, False, use_ue8m0)


def _group(
    x: Tensor, dtype: torch.dtype, group_size: int, column_major: bool, tma_aligned: bool, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    return quantise(x.float(), dtype, group_size, column_major, use_ue8m0, tma_aligned)


def _static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return quantise_static(x.float(), scale, dtype)


RMS_NORM = Op(
    name="rms_norm",
    doc="RMSNorm over the last dimension (arXiv 1910.07467).",
    args=(_X, Weight(name="weight", of="x"), Epsilon(), WeightOffset()),
    results=(Like(name="normed", of="x", doc="x normed."),),
    reference=normalise,
    backward=_backward,
    setup_context=_setup,
)
QUANTISE_PER_TOKEN = Op(
    name="quantise_per_token",
    doc="Quantise to fp8 with one scale per token; `quantisation` says how.",
    args=(_X, QuantDtype(), UE8M0),
    results=(
        Quantised(name="values", of="x", doc="x in fp8."),
        Scales(name="scales", of="x", doc="its float32 scales, (..., 1)."),
    ),
    reference=_per_token,
)
QUANTISE_GROUP = Op(
    name="quantise_group",
    doc="Quantise to fp8 with one scale per `group_size` columns; `quantisation` says how.",
    args=(_X, QuantDtype(), GroupSize(), COLUMN_MAJOR, TMA_ALIGNED, UE8M0),
    results=(
        Quantised(name="values", of="x", doc="x in fp8."),
        Scales(name="scales", of="x", doc="its float32 scales, (..., groups)."),
    ),
    reference=_group,
)
QUANTISE_STATIC = Op(
    name="quantise_static",
    doc="Quantise to fp8 by a static scale; `quantisation` says how.",
    args=(_X, StaticScale(), QuantDtype()),
    results=(Quantised(name="values", of="x", doc="x in fp8."),),
    reference=_static,
)
_EXPONENTS = Exponents(name="scales", of="x", doc="exponents plus 127, one per 32 columns.")
QUANTISE_MXFP8 = Op(
    name="quantise_mxfp8",
    doc="Quantise to MXFP8, fp8 with one exponent per 32 columns; `quantisation` says how.",
    args=(_X,),
    results=(Quantised(name="values", of="x", doc="x in fp8."), _EXPONENTS),
    reference=quantise_mxfp8,
)
QUANTISE_MXFP4 = Op(
    name="quantise_mxfp4",
    doc="Quantise to MXFP4, fp4 with one exponent per 32 columns; `quantisation` says how.",
    args=(_X,),
    results=(Packed(name="values", of="x", doc="two fp4 values per byte."), _EXPONENTS),
    reference=quantise_mxfp4,
)
QUANTISE_NVFP4 = Op(
    name="quantise_nvfp4",
    doc="Quantise to NVFP4, fp4 with one fp8 scale per 16 columns; `quantisation` says how.",
    args=(_X, GlobalScale(), SWIZZLED),
    results=(
        Packed(name="values", of="x", doc="two fp4 values per byte."),
        SmallScales(name="scales", of="x", doc="float8_e4m3fn, one per 16 columns, times `global_scale`."),
    ),
    reference=quantise_nvfp4,
)
CANONICAL = (
    *(RMS_NORM, QUANTISE_PER_TOKEN, QUANTISE_GROUP, QUANTISE_STATIC, QUANTISE_MXFP8, QUANTISE_MXFP4, QUANTISE_NVFP4),
)
