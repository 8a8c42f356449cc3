"""`layerfuse::quantise_per_token` and `layerfuse::quantise_group`, the canonical fp8 quantisations of activations.

They are what a model may call to be recognised at once; what no pass has taken is lowered back to plain arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .library import define
from .quantisation import check_quant, empty_scales, quantise

_PER_TOKEN = "layerfuse::quantise_per_token"
_GROUP = "layerfuse::quantise_group"

Quantised = tuple[Tensor, Tensor]


class QuantCase(NamedTuple):
    """What of a call decides which backend takes it. `group_size` None: one scale per token."""

    dtype: torch.dtype
    width: int
    quant_dtype: torch.dtype
    group_size: int | None
    column_major: bool
    use_ue8m0: bool


def _check(op: str, x: Tensor, dtype: torch.dtype, group_size: int | None) -> None:
    if x.dim() < 1:
        raise ValueError(f"{op}: x needs at least one dimension, got a scalar")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.shape[-1] == 0:
        raise ValueError(f"{op}: x {tuple(x.shape)} has rows of no columns, and so no scale")
    check_quant(op, dtype, group_size)
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(f"{op} is for inference and has no backward; use no_grad()")


def _empty(x: Tensor, dtype: torch.dtype, group_size: int | None, column_major: bool) -> Quantised:
    return torch.empty(x.shape, dtype=dtype, device=x.device), empty_scales(x, group_size, column_major)


_per_token = define(
    "quantise_per_token(Tensor x, ScalarType dtype, bool use_ue8m0) -> (Tensor, Tensor)",
    reference=lambda x, dtype, use_ue8m0: quantise(x.float(), dtype, None, False, use_ue8m0),
    check=lambda x, dtype, _ue8m0: _check(_PER_TOKEN, x, dtype, None),
    fake=lambda x, dtype, _ue8m0: _empty(x, dtype, None, False),
    case=lambda x, dtype, use_ue8m0: QuantCase(x.dtype, x.shape[-1], dtype, None, False, use_ue8m0),
)
_group = define(
    "quantise_group(Tensor x, ScalarType dtype, int group_size, bool column_major, bool use_ue8m0) -> (Tensor, Tensor)",
    reference=lambda x, dtype, size, column_major, use_ue8m0: quantise(x.float(), dtype, size, column_major, use_ue8m0),
    check=lambda x, dtype, size, _column_major, _ue8m0: _check(_GROUP, x, dtype, size),
    fake=lambda x, dtype, size, column_major, _ue8m0: _empty(x, dtype, size, column_major),
    case=lambda x, dtype, *options: QuantCase(x.dtype, x.shape[-1], dtype, *options),
)


def quantise_per_token(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, use_ue8m0: bool = False) -> Quantised:
    """Quantise to fp8 with one scale per token; `quantisation` says how.

    Args:
        x: (..., width), float32, bfloat16 or float16, any strides.
        dtype: torch.float8_e4m3fn, or torch.float8_e4m3fnuz for gfx942.
        use_ue8m0: round the scales up to powers of two.

    Returns:
        x as contiguous fp8, and its float32 scales, (..., 1).

    Raises:
        ValueError: dtypes or options that do not fit; the message names the argument.
        RuntimeError: x requires grad while grad is enabled.
    """
    result: Quantised = _per_token(x, dtype, use_ue8m0)
    return result


def quantise_group(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int = 128,
    column_major: bool = False,
    use_ue8m0: bool = False,
) -> Quantised:
    """Quantise to fp8 with one scale per `group_size` columns; `quantisation` says how.

    Args:
        x: (..., width), float32, bfloat16 or float16, any strides.
        dtype: torch.float8_e4m3fn, or torch.float8_e4m3fnuz for gfx942.
        group_size: 32, 64 or 128; the last group may be short.
        column_major: the scales' strides, (1, M) for M rows instead of (groups, 1); indexing means the same in both.
        use_ue8m0: round the scales up to powers of two.

    Returns:
        x as contiguous fp8, and its float32 scales, (..., groups).

    Raises:
        ValueError: dtypes or options that do not fit; the message names the argument.
        RuntimeError: x requires grad while grad is enabled.
    """
    result: Quantised = _group(x, dtype, group_size, column_major, use_ue8m0)
    return result
