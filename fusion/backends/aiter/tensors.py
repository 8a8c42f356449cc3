"""Tensors as AITER's kernels need them: 2-D, rows that start on 16 bytes, one dtype. Copied only where they are not.

The kernels load 16 bytes at a time and check neither alignment nor the dtype of a weight, so both are looked at here,
in every call: two comparisons and no copy, where a model lays its tensors out as models do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.quantisation import scale_strides
from .errors import AiterCallError
from .resolved import Resolved

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


def vector(binding: str, name: str, weight: Tensor, x: Tensor) -> Tensor:
    """A norm's weight, aligned and without gaps.

    Raises:
        AiterCallError: its dtype is not that of x. The kernels read both as one.
    """
    if weight.dtype != x.dtype:
        raise AiterCallError(
            binding, f"{name} is {weight.dtype}, the activations {x.dtype}; AITER reads both as one dtype"
        )
    if weight.is_contiguous() and not weight.data_ptr() & _ALIGNED:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def same_shape(binding: str, name: str, other: Tensor, x: Tensor) -> Tensor:
    """`other`, which must have the shape and dtype of x: the kernels do not look.

    Raises:
        AiterCallError: it has not.
    """
    if other.dtype != x.dtype or other.shape != x.shape:
        raise AiterCallError(
            binding, f"{name} must be like x, {x.dtype} {tuple(x.shape)}; got {other.dtype} {tuple(other.shape)}"
        )
    return other


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


def no_offset(binding: str, weight_offset: float) -> None:
    """For functions that know no weight offset.

    Raises:
        AiterCallError: there is one.
    """
    if weight_offset:
        raise AiterCallError(binding, f"weight_offset {weight_offset}: this function of AITER's has no such option")


def gemma_of(found: Resolved) -> Callable[[float], dict[str, Any]]:
    """From a weight offset to the option that asks for it: AITER's `gemma_norm`, which adds 1 to the weight.

    The function raises AiterCallError for another offset, or where the installed function has no such option.
    """
    name, known = found.name, "gemma_norm" in found.names

    def gemma(weight_offset: float) -> dict[str, Any]:
        if not weight_offset:
            return {}
        if weight_offset != 1 or not known:
            only = "1 is the only other offset it knows" if known else "the installed function has no gemma_norm"
            raise AiterCallError(name, f"weight_offset {weight_offset}: {only}")
        return {"gemma_norm": True}

    return gemma
