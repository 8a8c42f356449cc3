"""The signatures of the norms that quantise, put over one function of all their arguments, once, when binding.

All take `x, weight, epsilon, weight_offset`, a residual behind x where they add one, and the options of their quantisation. All
return the values, the scales unless they were given, the plain norm where it is kept, and the sum where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .resolved import Resolved

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Values, scales, plain norm, sum with the residual; None for what there is not."""

Grouped = Callable[[Tensor, Tensor | None, Tensor, float, float, torch.dtype, int | None, bool], Results]
"""From x, residual, weight, epsilon, weight_offset, dtype, group_size (None: one scale per row), column_major."""

Scaled = Callable[[Tensor, Tensor | None, Tensor, float, float, Tensor, torch.dtype], Results]
"""From x, residual, weight, epsilon, weight_offset, scale, dtype."""

MX = Callable[[Tensor, Tensor | None, Tensor, float, float], Results]
"""From x, residual, weight, epsilon, weight_offset."""


def picked(found: Resolved, scales: bool = True) -> Callable[[Results], Any]:
    """What a binding returns of `Results`: one tensor alone, several as a tuple."""
    places = (0, *((1,) if scales else ()), *((2,) if found.keeps_norm else ()), *((3,) if found.adds else ()))
    pick: Callable[[Results], Any] = itemgetter(*places)
    return pick


def per_token(found: Resolved, core: Grouped) -> Callable[..., Any]:
    """`(x, [residual,] weight, epsilon, weight_offset, dtype, use_ue8m0)`."""
    pick = picked(found)

    def call(x: Tensor, weight: Tensor, epsilon: float, offset: float, dtype: torch.dtype, _ue8m0: bool) -> Any:
        return pick(core(x, None, weight, epsilon, offset, dtype, None, False))

    def adding(
        x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float, dtype: torch.dtype, _ue8m0: bool
    ) -> Any:
        return pick(core(x, residual, weight, epsilon, offset, dtype, None, False))

    return adding if found.adds else call


def group(found: Resolved, core: Grouped) -> Callable[..., Any]:
    """`(x, [residual,] weight, epsilon, weight_offset, dtype, group_size, column_major, tma_aligned, use_ue8m0)`."""
    pick = picked(found)

    def call(
        x: Tensor,
        weight: Tensor,
        epsilon: float,
        offset: float,
        dtype: torch.dtype,
        group_size: int,
        column_major: bool,
        _tma_aligned: bool,
        _ue8m0: bool,
    ) -> Any:
        return pick(core(x, None, weight, epsilon, offset, dtype, group_size, column_major))

    def adding(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        offset: float,
        dtype: torch.dtype,
        group_size: int,
        column_major: bool,
        _tma_aligned: bool,
        _ue8m0: bool,
    ) -> Any:
        return pick(core(x, residual, weight, epsilon, offset, dtype, group_size, column_major))

    return adding if found.adds else call


def static(found: Resolved, core: Scaled) -> Callable[..., Any]:
    """`(x, [residual,] weight, epsilon, weight_offset, scale, dtype)`; values are divided by the scale."""
    pick = picked(found, scales=False)

    def call(x: Tensor, weight: Tensor, epsilon: float, offset: float, scale: Tensor, dtype: torch.dtype) -> Any:
        return pick(core(x, None, weight, epsilon, offset, scale, dtype))

    def adding(
        x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float, scale: Tensor, dtype: torch.dtype
    ) -> Any:
        return pick(core(x, residual, weight, epsilon, offset, scale, dtype))

    return adding if found.adds else call


def mx(found: Resolved, core: MX) -> Callable[..., Any]:
    """`(x, [residual,] weight, epsilon, weight_offset)`."""
    pick = picked(found)

    def call(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Any:
        return pick(core(x, None, weight, epsilon, offset))

    def adding(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float) -> Any:
        return pick(core(x, residual, weight, epsilon, offset))

    return adding if found.adds else call
