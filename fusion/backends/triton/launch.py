"""From an op's arguments to a kernel launch, with little work on the host: compiled kernels are kept and called directly.

Which kernel is decided by what is constant for a layer (widths, epsilons, strides) and by the number of rows.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from torch import Tensor
from triton.knobs import HookChain

from ...ops.quantisation import LARGEST, empty_scales
from . import tuning
from .kernels import dual_norm

OVERLAP = "LAYERFUSE_PDL"
"""Environment variable: 0 turns off programmatic dependent launch, with which a kernel starts while the one before ends.
It is read when a kernel is first launched."""

_NO_QUANT, _PER_TOKEN, _PER_GROUP = 0, 1, 2

_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""From what a kernel is compiled for to how it is launched: launcher, function, metadata, programs per row, constants."""

_hooks = triton.knobs.runtime
_HIP = torch.version.hip is not None

# What torch.cuda's functions of these names call, without asking first whether CUDA is initialised.
_current_device: Any = torch._C._cuda_getDevice if torch.cuda._is_compiled() else None
_current_stream: Any = torch._C._cuda_getCurrentRawStream if torch.cuda._is_compiled() else None


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    # Less than half the time of torch.empty with a shape, a dtype and a device.
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def mla_dual_rms_norm(
    q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, q_epsilon: float, kv_epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `ops.mla_dual_rms_norm`."""
    q_out = _empty(q, q.dtype)
    kv_out = _empty(kv, kv.dtype)
    _launch((q, kv, q_weight, kv_weight, q_out, q_out, kv_out), q_epsilon, kv_epsilon, _NO_QUANT, 0, False, (0, 0))
    return q_out, kv_out


def mla_dual_rms_norm_per_token_quant(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    dtype: torch.dtype,
    use_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.mla_dual_rms_norm_quant`."""
    q_out = _empty(q, dtype)
    scales = torch.empty((*q.shape[:-1], 1), dtype=torch.float32, device=q.device)
    kv_out = _empty(kv, kv.dtype)
    tensors = (q, kv, q_weight, kv_weight, q_out, scales, kv_out)
    _launch(tensors, q_epsilon, kv_epsilon, _PER_TOKEN, 0, use_ue8m0, (1, 1))
    return q_out, scales, kv_out


def mla_dual_rms_norm_group_quant(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    dtype: torch.dtype,
    group_size: int,
    column_major: bool,
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
    _launch(tensors, q_epsilon, kv_epsilon, _PER_GROUP, group_size, use_ue8m0, strides)
    return q_out, scales, kv_out


def _rows(x: Tensor) -> Tensor:
    """The (rows, width) view of x, or a copy where its leading dimensions cannot be counted as one."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _launch(
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
    kv_width, q_stride, kv_stride = kv.shape[1], q.stride(0), kv.stride(0)
    step = tuning.regime(rows, quant != _NO_QUANT)
    device = q.get_device()
    reads = q.data_ptr(), kv.data_ptr(), q_weight.data_ptr(), kv_weight.data_ptr()
    # Triton compiles for the alignment that it sees. For inputs off the 16-byte grid it decides at every launch.
    # On ROCm it also compiles for storages below 2 GiB.
    usual = not (reads[0] | reads[1] | reads[2] | reads[3]) & 15 and not (_HIP and _has_large_storage(tensors))
    key = (
        device, step, q.dtype, q_weight.dtype, kv_weight.dtype, q_out.dtype, q_width, kv_width, q_epsilon, kv_epsilon,
        quant, group_size, use_ue8m0, q_stride, kv_stride,
    )  # fmt: skip
    numbers = (q_stride, kv_stride, *scale_strides)
    known = _compiled.get(key)
    if known is not None and usual and device == _current_device() and not _profiled():
        run, function, metadata, per_row, constants = known
        # What the compiled kernel's own launcher does, without its detours; addresses instead of tensors, as Triton
        # would ask the driver about each tensor again. A profiler's hooks take the long way below.
        run(
            per_row * rows, 1, 1, _current_stream(device), function, metadata, None, None, None,
            *reads, q_out.data_ptr(), scales.data_ptr(), kv_out.data_ptr(), *numbers, *constants,
        )  # fmt: skip
        return
    quantised = quant != _NO_QUANT
    launch = tuning.launch_for(step, q_width, kv_width, group_size or None, quantised, _wave(q.device))
    early = _overlaps(q.device)
    constants = (
        q_width, kv_width, q_epsilon, kv_epsilon, quant, group_size, LARGEST[q_out.dtype] if quantised else 0.0,
        use_ue8m0, launch.q_chunk, launch.kv_chunk, launch.split, early,
    )  # fmt: skip
    grid = (2 * rows if launch.split else rows, 1, 1)
    options: dict[str, Any] = {"num_warps": launch.warps} | ({"launch_pdl": True} if early else {})
    arguments = (q, kv, q_weight, kv_weight, q_out, scales, kv_out, *numbers, *constants)
    if device < 0:  # Triton's interpreter
        dual_norm[grid](*arguments, **options)
        return
    with torch.cuda.device(device):
        kernel = dual_norm[grid](*arguments, **options)
    if usual:
        per_row = 2 if launch.split else 1
        _compiled[key] = kernel.run, kernel.function, kernel.packed_metadata, per_row, constants


def _has_large_storage(tensors: tuple[Tensor, ...]) -> bool:
    return any(tensor.untyped_storage().nbytes() > 2**31 - 1 for tensor in tensors)


def _profiled() -> bool:
    """Whether somebody has hooks on Triton's launches: a chain that is not empty, or a function in place of the chain."""
    hooks = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    return any(hook.calls if isinstance(hook, HookChain) else hook is not None for hook in hooks)


def _wave(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).warp_size) if device.type == "cuda" else 32


def _overlaps(device: torch.device) -> bool:
    """Whether kernels may start while the one before ends: NVIDIA from sm90 on, unless turned off."""
    if device.type != "cuda" or torch.version.hip or os.environ.get(OVERLAP) == "0":
        return False
    return bool(torch.cuda.get_device_capability(device) >= (9, 0))
