"""`silu(gate) * up`, quantised to fp8, over AITER's kernels, which take both as the halves of one tensor.

Where they are the halves of one tensor, that is what is handed over; else they are put together first, by a copy. `scaled_silu_and_mul`
is not called for a given scale: it reads the scale on the host while the GPU may still be computing it, and a graph would keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .table import Resolved
from .tensors import (
    empty_like,
    flat,
    flat_like,
    next_power_of_two,
    packed_rows,
    scale_buffer,
    scales_of,
    unpermuted,
)

Pair = tuple[Tensor, Tensor]


def halves(gate: Tensor, up: Tensor) -> Tensor:
    """(rows, 2 * width) with the gate in front: the tensor that they are the halves of, or a new one."""
    one, other = flat(gate), flat(up)
    width, step = one.shape[1], one.stride(0)
    beside = other.data_ptr() - one.data_ptr() == width * one.itemsize
    # Neighbours of one layout may still be two allocations.
    if beside and one.stride() == other.stride() == (step, 1) and _storage(one) == _storage(other):
        return one.as_strided((one.shape[0], 2 * width), (step, 1))
    return torch.cat((one, other), dim=1)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage().data_ptr())


def hip_group(found: Resolved) -> Callable[..., Pair]:
    """`silu_mul_group_quant(gate, up, limit, dtype, group_size, column_major, tma_aligned, use_ue8m0)`."""

    def core(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype, group_size: int, column_major: bool) -> Pair:
        out, scale = empty_like(gate, dtype), scale_buffer(gate, gate.shape[-1] // group_size)
        found.function(
            out=flat_like(out),
            input=packed_rows(halves(gate, up)),  # it reads no stride
            scale=scale,
            group_size=group_size,
            limit=_cut(limit),
            shuffle_scale=column_major,
        )
        return out, scales_of(scale, gate.shape[:-1], column_major)

    return _grouped(found, core)


def clamp(found: Resolved) -> Callable[..., Pair]:
    """`silu_mul_{per_token,group}_quant`, over `fused_clamp_act_mul`: one scale per token is one of a power of two, as for the norms."""

    def core(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype, group_size: int, column_major: bool) -> Pair:
        out, scales = found.function(
            inp=halves(gate, up),
            swiglu_limit=_cut(limit),
            dtype_quant=dtype,
            transpose_scale=column_major,
            quant_block_size=group_size,
        )
        return out.view(gate.shape), unpermuted(scales, gate.shape[:-1], column_major)

    return _grouped(found, core, next_power_of_two)


def triton(found: Resolved) -> Callable[..., Pair]:
    """`silu_mul_{per_token,group}_quant`, over `act_mul_and_fp8_group_quant`: one scale per token for a width that is a power of two."""

    def core(gate: Tensor, up: Tensor, _limit: float, dtype: torch.dtype, group_size: int, _column_major: bool) -> Pair:
        out, scales = found.function(x=halves(gate, up), activation="silu", group_size=group_size, dtype_quant=dtype)
        return out.view(gate.shape), unpermuted(scales, gate.shape[:-1], False)

    return _grouped(found, core)


def _grouped(found: Resolved, core: Callable[..., Pair], size: Callable[[int], int] = int) -> Callable[..., Pair]:
    """The op over a function that quantises in groups: one scale per token is one group of `size` columns, from the width."""

    def group(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype, *options: Any) -> Pair:
        return core(gate, up, limit, dtype, *options[:2])

    def token(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype, _ue8m0: bool) -> Pair:
        return core(gate, up, limit, dtype, size(gate.shape[-1]), False)

    return token if found.binding.per == "token" else group


def triton_static(found: Resolved) -> Callable[[Tensor, Tensor, float, Tensor, torch.dtype], Tensor]:
    """`silu_mul_static_quant(gate, up, limit, scale, dtype)`."""

    def call(gate: Tensor, up: Tensor, _limit: float, scale: Tensor, dtype: torch.dtype) -> Tensor:
        out: Tensor = found.function(inp=halves(gate, up), inp_scale=scale, dtype_quant=dtype)
        return out.view(gate.shape)

    return call


def _cut(limit: float) -> float:
    """The limit as AITER takes it: 0 is none."""
    return 0.0 if limit == math.inf else limit
