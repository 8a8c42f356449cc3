"""Quantisation of activations, written down once: what every backend computes for given values, and for broken ones.

From values `n`, in float32 what a chain without the quantisation gives, rounded to its dtype, per row or per group of columns:

- `scale = max(amax |n|, 1e-10) / largest`, float32, where `largest` is 448 for e4m3fn and 240 for e4m3fnuz. A row of
  zeros gets the scale of 1e-10 and zeros.
- With `use_ue8m0` the scale is rounded up to a power of two, still stored as float32.
- `q = n * (1 / scale)`, clamped to +-largest, rounded to nearest even. Dequantised: `q * scale`. In SGLang, whose kernels
  have it so, groups have `q = n * (largest / amax)` (`Scaling.OF_AMAX`): of values of 16 bits one in 700 lies halfway between two of fp8, and
  rounding decides there.
- A NaN in a group makes the group's scale NaN and all its values NaN. An infinity makes the scale infinite; the
  infinity itself becomes NaN and the finite values become zero. Nothing broken is hidden behind a finite number.
- Static: the scale is given, `q = n * (1 / scale)`, clamped likewise. A NaN stays NaN, and an infinity becomes +-largest.
- MXFP8 and MXFP4 (OCP Microscaling formats 1.0): per 32 columns an exponent e8m0, that of amax after rounding amax to
  one and a half bits (from 1.75 * 2^k up it counts as 2^(k+1)), less 8 for e4m3 or 2 for e2m1, as AITER's kernels and
  quark have it. Values are `n / 2^exponent`, rounded to nearest even, clamped. A group with a NaN or an infinity has the
  byte 255, which is e8m0's NaN.
- NVFP4: per 16 columns a scale in e4m3fn, `s = global_scale * (amax * (1 / 6))`, at most 448. Values are
  `n * (1 / (s * (1 / global_scale)))` in float32, to the nearest e2m1, the even one of two, at most 6; where s is zero they are
  zeros. So n is about `q * s / global_scale`, as vLLM's and FlashInfer's kernels have it (csrc/.../fp4/nvfp4_utils.cuh), whose
  reciprocals are approximate: a value on an edge may there be the next one. A group with a NaN or an infinity has the scale NaN,
  where those write a finite one; what its values are then says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from math import prod

import torch
from torch import Tensor

from ..declare import ELEMENTS

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ELEMENTS}
"""What holds quantised values, by its name."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
"""The fp8 formats and their largest value. e4m3fnuz reaches 240; PyTorch's `finfo` says the same."""

SMALLEST_AMAX = 1e-10
"""The floor of a group's largest magnitude, as in AITER's kernels (csrc, `amax floor`) and vLLM's group quantisation."""

GROUP_SIZES = (32, 64, 128)
"""Columns per scale that the group forms take."""


class Scaling(IntEnum):
    """What the scale of fp8 values is, and what they are multiplied by."""

    OF_SCALE = 0
    "amax / largest, and one over it."
    POWER_OF_TWO = 1
    "That rounded up to a power of two, and one over it."
    OF_AMAX = 2
    "amax / largest, and largest / amax: of groups alone."


_chosen = {"groups": Scaling.OF_SCALE}


def scale_groups(how: Scaling) -> None:
    """Choose, for this process, what is done with groups whose scales are no powers of two: as the engine's own kernels do."""
    _chosen["groups"] = how


def scaling(use_ue8m0: bool, groups: bool = True) -> int:
    """What an op does, by its own option and as chosen for this process: a number of `Scaling`, which a kernel takes as it is."""
    return (Scaling.POWER_OF_TWO if use_ue8m0 else _chosen["groups"] if groups else Scaling.OF_SCALE).value


def scale_shape(leading: tuple[int, ...], width: int, group_size: int | None) -> tuple[int, ...]:
    """Shape of the scales of a (*leading, width) tensor: one per row, or one per group, the last one maybe short."""
    return (*leading, 1 if group_size is None else -(-width // group_size))


def up_to_4(count: int) -> int:
    """The next multiple of 4."""
    return (count + 3) // 4 * 4


def scale_strides(
    shape: tuple[int, ...], column_major: bool, tma_aligned: bool = False, up: Callable[[int], int] = up_to_4
) -> tuple[int, ...]:
    """Strides of a scale tensor.

    Column-major means that the scales of one group lie together, row after row: for (M, G) the strides are (1, M), and
    element [r, g] is still the scale of row r and group g. Leading dimensions keep their order. TMA-aligned: (1, M rounded
    up to 4), so that each group's scales start on 16 bytes, as DeepGEMM asks for. `up` rounds up to 4: for symbols another
    way to write it is another expression.
    """
    strides = [0] * len(shape)
    step = 1
    for i in (*range(len(shape) - 2, -1, -1), len(shape) - 1) if column_major else range(len(shape) - 1, -1, -1):
        if tma_aligned and i == len(shape) - 1:
            step = up(step)
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


def empty_scales(x: Tensor, group_size: int | None, column_major: bool, tma_aligned: bool = False) -> Tensor:
    """An uninitialised float32 scale tensor for x, on x's device."""
    shape = scale_shape(tuple(x.shape[:-1]), x.shape[-1], group_size)
    strides = scale_strides(shape, column_major, tma_aligned)
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below each positive float32: exact, on the bits."""
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isnan(), scale, bits.view(torch.float32))


def quantise(
    values: Tensor,
    dtype: torch.dtype,
    group_size: int | None,
    column_major: bool,
    use_ue8m0: bool,
    tma_aligned: bool = False,
) -> tuple[Tensor, Tensor]:
    """The reference of the dynamic forms.

    Args:
        values: (..., width), of any dtype.
        dtype: an fp8 dtype of `LARGEST`.
        group_size: columns per scale, the last group may be short; None for one scale per row.
        column_major: how the scales lie in memory, see `scale_strides`.
        use_ue8m0: whether scales are powers of two.
        tma_aligned: how column-major scales lie in memory, likewise.

    Returns:
        The contiguous fp8 tensor of the shape of `values`, and the float32 scales (..., groups).
    """
    largest = LARGEST[dtype]
    width = values.shape[-1]
    step = width if group_size is None else group_size
    groups = -(-width // step)
    padded = values.float()
    if groups * step != width:
        padded = torch.nn.functional.pad(padded, (0, groups * step - width))
    padded = padded.unflatten(-1, (groups, step))
    amax = padded.abs().amax(-1).clamp_(min=SMALLEST_AMAX)
    how = scaling(use_ue8m0, group_size is not None)
    scale = amax / largest
    if how == Scaling.POWER_OF_TWO:
        scale = round_up_to_power_of_two(scale)
    inverse = largest / amax if how == Scaling.OF_AMAX else scale.reciprocal()
    # Nothing is left to clamp: a value times its inverse is at most two roundings above the largest, and rounds to it.
    scaled = (padded * inverse.unsqueeze(-1)).flatten(-2)
    if groups * step != width:
        # Into a tensor of its own: a slice of one row or of none counts as contiguous whatever its strides.
        quantised = torch.empty(values.shape, dtype=dtype, device=values.device).copy_(scaled[..., :width])
    else:
        quantised = scaled.to(dtype).contiguous()
    if not column_major:
        return quantised, scale.contiguous()
    return quantised, empty_scales(values, group_size, column_major, tma_aligned).copy_(scale)


def quantise_per_token(values: Tensor, dtype: torch.dtype, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """The reference of one scale per token: values (..., width), scales (..., 1)."""
    return quantise(values, dtype, None, False, use_ue8m0)


def quantise_group(
    values: Tensor, dtype: torch.dtype, group_size: int, column_major: bool, tma_aligned: bool, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """The reference of one scale per group: values (..., width), scales (..., groups)."""
    return quantise(values, dtype, group_size, column_major, use_ue8m0, tma_aligned)


def quantise_static(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference of the static form: values (..., width), of any dtype; scale: one float32 element."""
    largest = LARGEST[dtype]
    scaled = (values.float() * scale.reciprocal().reshape(())).clamp_(-largest, largest)
    return scaled.to(dtype).contiguous()


MX_COLUMNS = 32
"""Columns per exponent of the MX formats."""


def _mx(values: Tensor, largest_exponent: int) -> tuple[Tensor, Tensor]:
    """The values (..., groups, 32) over their groups' scales, and the scales' bytes."""
    grouped = values.float().unflatten(-1, (-1, MX_COLUMNS))
    bits = grouped.abs().amax(-1).contiguous().view(torch.int32)
    exponent = (((bits + 0x200000) >> 23) - largest_exponent).clamp(0, 254)
    # 2 ** (127 - exponent) by halves, since the whole may lie outside float32's normal numbers.
    half = (127 - exponent) // 2
    scaled = (
        grouped * torch.exp2(half.float()).unsqueeze(-1) * torch.exp2((127 - exponent - half).float()).unsqueeze(-1)
    )
    broken = bits >= 0x7F800000
    return scaled, torch.where(broken, 255, exponent).to(torch.uint8).contiguous()


def quantise_mxfp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8: e4m3fn values of the shape of `values` (..., width), and uint8 exponents (..., width / 32)."""
    scaled, exponents = _mx(values, 8)
    return scaled.clamp_(-448.0, 448.0).flatten(-2).to(torch.float8_e4m3fn).contiguous(), exponents


def quantise_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4: two e2m1 values per byte, the first in the low bits, uint8 (..., width / 2); exponents (..., width / 32)."""
    scaled, exponents = _mx(values, 2)
    return packed(scaled), exponents


NVFP4_COLUMNS = 16
"""Columns per scale of NVFP4."""


def quantise_nvfp4(values: Tensor, global_scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """NVFP4: two e2m1 values per byte, uint8 (..., width / 2), and float8_e4m3fn scales (..., width / 16).

    Args:
        values: (..., width), of any dtype.
        global_scale: one float32 element, that the scales are stored times.
        swizzled: whether the scales come as `swizzle` lays them out.
    """
    grouped, factor = values.float().unflatten(-1, (-1, NVFP4_COLUMNS)), global_scale.reshape(())
    amax = grouped.abs().amax(-1)
    wide = (factor * (amax * (1 / 6))).clamp(max=LARGEST[torch.float8_e4m3fn])
    scales = wide.masked_fill(amax.isinf(), float("nan")).to(torch.float8_e4m3fn).contiguous()
    wide = scales.float()
    inverse = torch.where(wide > 0, (wide * factor.reciprocal()).reciprocal(), 0.0)
    return packed(grouped * inverse.unsqueeze(-1)), swizzle(scales) if swizzled else scales


TILE_ROWS, TILE_COLUMNS = 128, 4
"""Of a tile of scales in the layout that NVIDIA's tensor cores take them in (PTX, tcgen05.mma, scale factor layout 4x)."""


def swizzled_shape(shape: tuple[int, ...], width: int) -> tuple[int, int]:
    """Shape of the swizzled scales of a (*leading, width) tensor: all rows and all scales of a row, up to whole tiles."""
    rows, columns = prod(shape[:-1]), width // NVFP4_COLUMNS
    return (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS, (columns + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """Scales (..., columns), of one byte each, tile after tile: row r and column c of a tile at byte r % 32 * 16 + r // 32 * 4 + c.

    Tiles lie row by row. Zeros stand for rows and columns that there are not. vLLM's `swizzle_blockscale` is the same.
    """
    rows, columns = prod(scales.shape[:-1]), scales.shape[-1]
    down, along = (rows + TILE_ROWS - 1) // TILE_ROWS, (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    padding = (0, along * TILE_COLUMNS - columns, 0, down * TILE_ROWS - rows)
    padded = torch.nn.functional.pad(scales.reshape(rows, columns).view(torch.uint8), padding)
    tiles = padded.view(down, 4, 32, along, TILE_COLUMNS).permute(0, 3, 2, 1, 4).contiguous()
    return tiles.view(down * TILE_ROWS, along * TILE_COLUMNS).view(scales.dtype)


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The scales (rows, columns) that `swizzle` laid out."""
    down, along = scales.shape[0] // TILE_ROWS, scales.shape[1] // TILE_COLUMNS
    tiles = scales.view(torch.uint8).view(down, along, 32, 4, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(scales.shape)[:rows, :columns].contiguous().view(scales.dtype)


def packed(scaled: Tensor) -> Tensor:
    """The codes of values in groups (..., groups, columns), two to a byte, the first in the low bits: (..., width / 2)."""
    codes = e2m1(scaled).flatten(-2)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def e2m1(values: Tensor) -> Tensor:
    """Each float32 as a 4-bit code of sign, two exponent bits and one of mantissa, to nearest even; 6 is the largest."""
    magnitude = values.abs().clamp(max=6.0)
    # Steps of a half up to 2, of 1 up to 4, then of 2; the codes count them. round() goes to the even one of two.
    code = torch.where(
        magnitude <= 2.0,
        (magnitude * 2).round(),
        torch.where(magnitude <= 4.0, magnitude.round() + 2, (magnitude / 2).round() + 4),
    )
    return code.nan_to_num(7.0).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
