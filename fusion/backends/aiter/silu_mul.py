"""`silu(gate) * up`, quantised to fp8, over AITER's kernels, which take both as the halves of one tensor.

Where they are the halves of one tensor, that is what is handed over; else they are put together first, by a copy. `scaled_silu_and_mul`
is not called for a given scale: it reads the scale on the host while the GPU may still be computing it, and a graph would keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...ops.quantisation import empty_scales
from .errors import AiterCallError
from .resolved import Resolved
from .tensors import (
    empty_like,
    flat,
    flat_like,
    next_power_of_two,
    packed_rows,
    same_shape,
    scale_buffer,
    scales_of,
    unpermuted,
)

Pair = tuple[Tensor, Tensor]
Grouped = Callable[[Tensor, Tensor, float, torch.dtype, int, bool, bool, bool], Pair]


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


def hip_group(found: Resolved) -> Grouped:
    """`silu_mul_group_quant(gate, up, limit, dtype, group_size, column_major, tma_aligned, use_ue8m0)`.

    Raises:
        AiterCallError: a limit that is not above 0, or an up that is not like gate.
    """
    name, function = found.name, found.function

    def call(
        gate: Tensor,
        up: Tensor,
        limit: float,
        dtype: torch.dtype,
        group_size: int,
        column_major: bool,
        _tma_aligned: bool,
        _ue8m0: bool,
    ) -> Pair:
        cut = _cut(name, limit)
        same_shape(name, "up", up, gate)
        out = empty_like(gate, dtype)
        if not gate.numel():
            return out, empty_scales(gate, group_size, column_major)
        scale = scale_buffer(gate, gate.shape[-1] // group_size)
        function(
            out=flat_like(out),
            input=packed_rows(halves(gate, up)),  # it reads no stride
            scale=scale,
            group_size=group_size,
            limit=cut,
            shuffle_scale=column_major,
        )
        return out, scales_of(scale, gate.shape[:-1], column_major)

    return call


def per_token(found: Resolved, grouped: Grouped, size: Callable[[int], int]) -> Callable[..., Pair]:
    """`silu_mul_per_token_quant(gate, up, limit, dtype, use_ue8m0)`, as one group of so many columns, where the op is that one."""
    if found.binding.per != "token":
        return grouped

    def call(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype, ue8m0: bool) -> Pair:
        return grouped(gate, up, limit, dtype, size(gate.shape[-1]), False, False, ue8m0)

    return call


def clamp(found: Resolved) -> Callable[..., Pair]:
    """`silu_mul_{per_token,group}_quant`, over `fused_clamp_act_mul`: one scale per token is one of a power of two, as for the norms.

    Raises:
        AiterCallError: a limit that is not above 0, or an up that is not like gate.
    """
    name, function = found.name, found.function

    def call(
        gate: Tensor,
        up: Tensor,
        limit: float,
        dtype: torch.dtype,
        group_size: int,
        column_major: bool,
        _tma_aligned: bool,
        _ue8m0: bool,
    ) -> Pair:
        cut = _cut(name, limit)
        same_shape(name, "up", up, gate)
        if not gate.numel():
            return empty_like(gate, dtype), empty_scales(gate, group_size, column_major)
        out, scales = function(
            inp=halves(gate, up),
            swiglu_limit=cut,
            dtype_quant=dtype,
            transpose_scale=column_major,
            quant_block_size=group_size,
        )
        return out.view(gate.shape), unpermuted(scales, gate.shape[:-1], column_major)

    return per_token(found, call, next_power_of_two)


def triton(found: Resolved) -> Callable[..., Pair]:
    """`silu_mul_{per_token,group}_quant`, over `act_mul_and_fp8_group_quant`: one scale per token for a width that is a power of two.

    Raises:
        AiterCallError: a limit, column-major scales, a group that does not divide the width, or an up unlike gate.
    """
    name, function = found.name, found.function

    def call(
        gate: Tensor,
        up: Tensor,
        limit: float,
        dtype: torch.dtype,
        group_size: int,
        column_major: bool,
        _tma_aligned: bool,
        _ue8m0: bool,
    ) -> Pair:
        _no_limit(name, limit)
        same_shape(name, "up", up, gate)
        if not gate.numel():
            return empty_like(gate, dtype), empty_scales(gate, group_size, column_major)
        if column_major or gate.shape[-1] % group_size:
            raise AiterCallError(
                name, f"groups of {group_size} in {gate.shape[-1]} columns, column_major={column_major}"
            )
        out, scales = function(x=halves(gate, up), activation="silu", group_size=group_size, dtype_quant=dtype)
        return out.view(gate.shape), unpermuted(scales, gate.shape[:-1], False)

    return per_token(found, call, int)


def triton_static(found: Resolved) -> Callable[[Tensor, Tensor, float, Tensor, torch.dtype], Tensor]:
    """`silu_mul_static_quant(gate, up, limit, scale, dtype)`.

    Raises:
        AiterCallError: a limit, or an up that is not like gate.
    """
    name, function = found.name, found.function

    def call(gate: Tensor, up: Tensor, limit: float, scale: Tensor, dtype: torch.dtype) -> Tensor:
        _no_limit(name, limit)
        same_shape(name, "up", up, gate)
        if not gate.numel():
            return empty_like(gate, dtype)
        out: Tensor = function(inp=halves(gate, up), inp_scale=scale, dtype_quant=dtype)
        return out.view(gate.shape)

    return call


def _cut(name: str, limit: float) -> float:
    """The limit as AITER takes it: 0 is none."""
    if not limit > 0:
        raise AiterCallError(name, f"limit {limit}: AITER takes limits above 0, and 0 for none")
    return 0.0 if limit == math.inf else limit


def _no_limit(name: str, limit: float) -> None:
    if limit != math.inf:
        raise AiterCallError(name, f"limit {limit}: this function of AITER's has no such option")
