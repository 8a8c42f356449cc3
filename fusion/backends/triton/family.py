"""The ops of the Triton backend: from their arguments to a launch.

Which kernel is decided by what is constant for a layer (widths, epsilons, alignment) and by the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.quantisation import LARGEST, empty_scales
from . import launcher, tuning
from .kernels import dual_norm, row_norm

_NO_QUANT, _PER_TOKEN, _PER_GROUP = 0, 1, 2


def mla_dual_rms_norm(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    q_offset: float,
    kv_offset: float,
) -> tuple[Tensor, Tensor]:
    """See `ops.mla_dual_rms_norm`."""
    q_out = _empty(q, q.dtype)
    kv_out = _empty(kv, kv.dtype)
    _dual_norm((q, kv, q_weight, kv_weight, q_out, q_out, kv_out), q_epsilon, kv_epsilon, _NO_QUANT, 0, False, (0, 0))
    return q_out, kv_out


def mla_dual_rms_norm_per_token_quant(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    q_offset: float,
    kv_offset: float,
    dtype: torch.dtype,
    use_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.mla_dual_rms_norm_quant`."""
    q_out = _empty(q, dtype)
    scales = torch.empty((*q.shape[:-1], 1), dtype=torch.float32, device=q.device)
    kv_out = _empty(kv, kv.dtype)
    tensors = (q, kv, q_weight, kv_weight, q_out, scales, kv_out)
    _dual_norm(tensors, q_epsilon, kv_epsilon, _PER_TOKEN, 0, use_ue8m0, (1, 1))
    return q_out, scales, kv_out


def mla_dual_rms_norm_group_quant(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    q_offset: float,
    kv_offset: float,
    dtype: torch.dtype,
    group_size: int,
    column_major: bool,
    tma_aligned: bool,
    use_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.mla_dual_rms_norm_quant`."""
    q_out = _empty(q, dtype)
    scales = empty_scales(q, group_size, column_major)
    kv_out = _empty(kv, kv.dtype)
    tensors = (q, kv, q_weight, kv_weight, q_out, scales, kv_out)
    # Strides in a scale tensor of (rows, groups): leading dimensions keep their order, so they count as one.
    groups = scales.shape[-1]
    strides = (1, scales.numel() // max(groups, 1)) if column_major else (groups, 1)
    _dual_norm(tensors, q_epsilon, kv_epsilon, _PER_GROUP, group_size, use_ue8m0, strides)
    return q_out, scales, kv_out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum.

    Args:
        x: (..., width), bfloat16, float16 or float32; the elements of a row lie together, rows as they like.
        residual: of the same shape and dtype, with strides of its own.
        weight: (width,), of any float dtype.
        epsilon: added to the mean square.
        weight_offset: added to the weight in float32: 0.0, or 1.0 where weights are stored around zero.

    Returns:
        The norm of the float32 sum, and the sum, each rounded once to the dtype of x; both contiguous.
    """
    out = _empty(x, x.dtype)
    residual_out = _empty(x, x.dtype)
    x, residual = _rows(x), _rows(residual)
    rows, width = x.shape
    if rows == 0:
        return out, residual_out
    x_stride, residual_stride = x.stride(0), residual.stride(0)
    # Strides are counted in the largest power of two that divides them, up to 16: the kernel then knows their alignment.
    x_unit, residual_unit = x_stride & -x_stride & 15 or 16, residual_stride & -residual_stride & 15 or 16
    numbers = (rows, x_stride // x_unit, residual_stride // residual_unit, 0, 0)
    reads = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    bits, high = reads[0] | reads[1] | reads[2], rows | x_stride | residual_stride
    tensors = (x, residual, weight, out, residual_out, out)
    special = launcher.special(high, reads, tensors) if bits & 15 or high >> 31 or launcher.HIP else None
    step, device, written = tuning.regime(rows), x.get_device(), out.data_ptr()
    key = (
        "add_rms_norm", device, step, x.dtype, weight.dtype, width, epsilon, weight_offset, x_unit, residual_unit, special,
    )  # fmt: skip
    if launcher.again(key, device, (*reads, written, residual_out.data_ptr(), written), numbers):
        return out, residual_out
    item = x.element_size()
    aligned = not (bits | x_unit * item | residual_unit * item | width * item) & 15
    plan = tuning.launch_single(step, width, item, aligned, launcher.wave(x.device))
    constants = (
        width, epsilon, weight_offset, x_unit, residual_unit, True, _NO_QUANT, 0, 0.0, False,
        plan.chunk, plan.tail, plan.rows, plan.hold,
    )  # fmt: skip
    launcher.first(row_norm, key, tensors, numbers, constants, rows=plan.rows, sides=1, warps=plan.warps)
    return out, residual_out


def _dual_norm(
    tensors: tuple[Tensor, ...],
    q_epsilon: float,
    kv_epsilon: float,
    quant: int,
    group_size: int,
    use_ue8m0: bool,
    scale_strides: tuple[int, int],
) -> None:
    q, kv, q_weight, kv_weight, q_out, scales, kv_out = tensors
    q, kv = _rows(q), _rows(kv)
    rows, q_width = q.shape
    if rows == 0:
        return
    kv_width = kv.shape[1]
    q_stride, kv_stride = q.stride(0), kv.stride(0)
    q_unit, kv_unit = q_stride & -q_stride & 15 or 16, kv_stride & -kv_stride & 15 or 16  # as in add_rms_norm
    numbers = (rows, q_stride // q_unit, kv_stride // kv_unit, *scale_strides)
    reads = q.data_ptr(), kv.data_ptr(), q_weight.data_ptr(), kv_weight.data_ptr()
    bits, high = reads[0] | reads[1] | reads[2] | reads[3], rows | q_stride | kv_stride
    special = launcher.special(high, reads, tensors) if bits & 15 or high >> 31 or launcher.HIP else None
    step, device = tuning.regime(rows), q.get_device()
    key = (
        "dual_norm", device, step, q.dtype, q_weight.dtype, kv_weight.dtype, q_out.dtype, q_width, kv_width, q_epsilon,
        kv_epsilon, quant, group_size, use_ue8m0, q_unit, kv_unit, special,
    )  # fmt: skip
    if launcher.again(key, device, (*reads, q_out.data_ptr(), scales.data_ptr(), kv_out.data_ptr()), numbers):
        return
    item, quantised = q.element_size(), quant != _NO_QUANT
    aligned = not (bits | q_unit * item | kv_unit * item | q_width * item) & 15
    dual = tuning.Dual(q_width, kv_width, item, quantised, group_size, aligned)
    plan = tuning.launch_dual(step, dual, launcher.wave(q.device))
    constants = (
        q_width, kv_width, q_epsilon, kv_epsilon, q_unit, kv_unit, quant, group_size,
        LARGEST[q_out.dtype] if quantised else 0.0, use_ue8m0,
        plan.chunk, plan.tail, plan.kv_chunk, plan.rows, plan.split, plan.hold,
    )  # fmt: skip
    inputs = (q, kv, *tensors[2:])
    sides = 2 if plan.split else 1
    launcher.first(dual_norm, key, inputs, numbers, constants, rows=plan.rows, sides=sides, warps=plan.warps)


def _rows(x: Tensor) -> Tensor:
    """The (rows, width) view of x, or a copy where its leading dimensions cannot be counted as one."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    # Less than half the time of torch.empty with a shape, a dtype and a device.
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def function_of(op):
    return {
        "mla_dual_rms_norm": mla_dual_rms_norm,
        "mla_dual_rms_norm_per_token_quant": mla_dual_rms_norm_per_token_quant,
        "mla_dual_rms_norm_group_quant": mla_dual_rms_norm_group_quant,
        "add_rms_norm": add_rms_norm,
    }[op.name]
