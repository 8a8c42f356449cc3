"""Tensors as AITER's kernels need them: 2-D, rows that start on 16 bytes. Copied only where they are not.

The kernels load 16 bytes at a time and do not check the alignment, so it is looked at here, in every call: two comparisons and no
copy, where a model lays its tensors out as models do. Shapes and dtypes are the op's own checks, and options the `restrictions`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.quantisation import scale_strides

_ALIGNED = 15


def rows(x: Tensor) -> Tensor:
    """A tensor (..., width), not empty, as a 2-D view of row-contiguous, aligned, separate rows; else as a copy of it."""
    two = flat(x)
    step, gap = two.stride()
    if gap == 1 and step >= two.shape[1] and not (step * two.itemsize | two.data_ptr()) & _ALIGNED:
        return two
    return two.clone(memory_format=torch.contiguous_format)


def packed_rows(x: Tensor) -> Tensor:
    """The same without gaps between rows, for functions that ignore the row stride."""
    two = flat(x)
    if two.stride() == (two.shape[1], 1) and not two.data_ptr() & _ALIGNED:
        return two
    return two.clone(memory_format=torch.contiguous_format)


def flat(x: Tensor) -> Tensor:
    """A tensor (..., width) in two dimensions, for kernels that read every stride: a view where there is one."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def dense(weight: Tensor) -> Tensor:
    """A weight without gaps, for kernels that read it in any dtype."""
    return weight if weight.is_contiguous() else weight.contiguous()


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()


def vector(weight: Tensor) -> Tensor:
    """A norm's weight, aligned and without gaps."""
    if weight.is_contiguous() and not weight.data_ptr() & _ALIGNED:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of x's shape, whatever x's strides are."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def flat_like(out: Tensor) -> Tensor:
    """A contiguous output as the 2-D view that the kernel writes."""
    return out if out.ndim == 2 else out.view(-1, out.shape[-1])


def scale_buffer(x: Tensor, groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised scales for the rows of x, not empty: (rows, groups), contiguous."""
    return x.new_empty((x.numel() // x.shape[-1], groups), dtype=dtype)


def scales_of(buffer: Tensor, leading: torch.Size, column_major: bool) -> Tensor:
    """The written buffer as (*leading, groups); AITER wrote it group by group where it is column-major."""
    shape = (*leading, buffer.shape[1])
    if column_major:
        return buffer.as_strided(shape, scale_strides(shape, True))
    return buffer if len(shape) == 2 else buffer.view(shape)


def unpermuted(scales: Tensor, leading: torch.Size, column_major: bool) -> Tensor:
    """Scales that a function allocated: column-major ones come contiguous, so that indexing them is wrong."""
    shape = (*leading, scales.shape[1])
    return scales.as_strided(shape, scale_strides(shape, True)) if column_major else scales.view(shape)


def shaped(out: Tensor | None, x: Tensor) -> Tensor | None:
    """A result that a function allocated, if it gave one, in x's shape."""
    return None if out is None else out.view(x.shape)


def gemma(weight_offset: float) -> dict[str, Any]:
    """From a weight offset, 0 or 1, to the option that asks for it: AITER's `gemma_norm`, which adds 1 to the weight."""
    return {"gemma_norm": True} if weight_offset else {}
