"""Dynamic fp8 quantisation, written down once: what every backend computes for given values, and for broken ones.

From float32 values `n` (a norm's result before any rounding), per row or per group of columns:

- `scale = max(amax |n|, 1e-10) / largest`, float32, where `largest` is 448 for e4m3fn and 240 for e4m3fnuz. A row of
  zeros gets the scale of 1e-10 and zeros.
- With `use_ue8m0` the scale is rounded up to a power of two, still stored as float32.
- `q = n * (1 / scale)`, clamped to +-largest, rounded to nearest even. Dequantised: `q * scale`.
- A NaN in a group makes the group's scale NaN and all its values NaN. An infinity makes the scale infinite; the
  infinity itself becomes NaN and the finite values become zero. Nothing broken is hidden behind a finite number.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
"""The fp8 formats and their largest value. e4m3fnuz reaches 240; PyTorch's `finfo` says the same."""

SMALLEST_AMAX = 1e-10
"""The floor of a group's largest magnitude, as in AITER's kernels (csrc, `amax floor`) and vLLM's group quantisation."""

GROUP_SIZES = (32, 64, 128)
"""Columns per scale that the group forms take."""


def scale_shape(leading: tuple[int, ...], width: int, group_size: int | None) -> tuple[int, ...]:
    """Shape of the scales of a (*leading, width) tensor: one per row, or one per group, the last one maybe short."""
    return (*leading, 1 if group_size is None else -(-width // group_size))


def scale_strides(shape: tuple[int, ...], column_major: bool) -> tuple[int, ...]:
    """Strides of a scale tensor.

    Column-major means that the scales of one group lie together, row after row: for (M, G) the strides are (1, M), and
    element [r, g] is still the scale of row r and group g. Leading dimensions keep their order.
    """
    strides = [0] * len(shape)
    step = 1
    for i in (*range(len(shape) - 2, -1, -1), len(shape) - 1) if column_major else range(len(shape) - 1, -1, -1):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


def empty_scales(x: Tensor, group_size: int | None, column_major: bool) -> Tensor:
    """An uninitialised float32 scale tensor for x, on x's device."""
    shape = scale_shape(tuple(x.shape[:-1]), x.shape[-1], group_size)
    return torch.empty_strided(shape, scale_strides(shape, column_major), dtype=torch.float32, device=x.device)


def check_quant(op: str, dtype: torch.dtype, group_size: int | None) -> None:
    """What every backend needs of the options.

    Raises:
        ValueError: a dtype or group size that no backend takes; the message names it.
    """
    if dtype not in LARGEST:
        raise ValueError(f"{op}: dtype must be one of {', '.join(map(str, LARGEST))}, got {dtype}")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ValueError(f"{op}: group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group_size}")


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below each positive float32: exact, on the bits."""
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isnan(), scale, bits.view(torch.float32))


def quantise(
    values: Tensor, dtype: torch.dtype, group_size: int | None, column_major: bool, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """The reference.

    Args:
        values: (..., width), float32 or float64, not yet rounded.
        dtype: an fp8 dtype of `LARGEST`.
        group_size: columns per scale, the last group may be short; None for one scale per row.
        column_major: how the scales lie in memory, see `scale_strides`.
        use_ue8m0: whether scales are powers of two.

    Returns:
        The contiguous fp8 tensor of the shape of `values`, and the float32 scales (..., groups).
    """
    largest = LARGEST[dtype]
    width = values.shape[-1]
    step = width if group_size is None else group_size
    groups = -(-width // step)
    padded = torch.nn.functional.pad(values.float(), (0, groups * step - width)).unflatten(-1, (groups, step))
    scale = padded.abs().amax(-1).clamp(min=SMALLEST_AMAX) / largest
    if use_ue8m0:
        scale = round_up_to_power_of_two(scale)
    scaled = (padded * scale.reciprocal().unsqueeze(-1)).clamp(-largest, largest)
    # Into a tensor of its own: a slice of one row or of none counts as contiguous whatever its strides.
    quantised = torch.empty(values.shape, dtype=dtype, device=values.device)
    quantised.copy_(scaled.flatten(-2)[..., :width])
    scales = empty_scales(values, group_size, column_major)
    return quantised, scales.copy_(scale)
