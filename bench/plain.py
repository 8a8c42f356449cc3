"""The arithmetic written out in plain torch operations, as a model without fused kernels has it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (everybody's name for it)

from .inputs import Work

Results = tuple[Tensor, ...]

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
SMALLEST_AMAX = 1e-10


def wide_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The norm in float32, not yet rounded."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()


def quantise(values: Tensor, dtype: torch.dtype, group_size: int | None, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Float32 values (tokens, width) to fp8 and the float32 scales (tokens, groups)."""
    width = values.shape[-1]
    size = width if group_size is None else group_size
    groups = -(-width // size)
    if groups * size != width:
        values = F.pad(values, (0, groups * size - width))
    grouped = values.view(-1, groups, size)
    scales = grouped.abs().amax(-1).clamp(min=SMALLEST_AMAX) / LARGEST[dtype]
    if ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    quantised = (grouped / scales.unsqueeze(-1)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return quantised.view(-1, groups * size)[:, :width], scales


def eager(work: Work, q: Tensor, kv: Tensor) -> Results:
    """PyTorch's own norm, twice, and then the quantisation of its rounded result."""
    case = work.case
    q_normed = F.rms_norm(q, (case.q_width,), work.q_weight, case.q_epsilon)
    kv_normed = F.rms_norm(kv, (case.kv_width,), work.kv_weight, case.kv_epsilon)
    if case.quant is None:
        return q_normed, kv_normed
    return (*quantise(q_normed.float(), work.fp8, case.group_size, case.ue8m0), kv_normed)


def fusable(work: Work) -> Callable[..., Results]:
    """The arithmetic without a rounding in between, for a compiler to fuse: takes q, kv and the two weights."""
    case, fp8 = work.case, work.fp8
    q_epsilon, kv_epsilon = case.q_epsilon, case.kv_epsilon
    quantised, group_size, ue8m0 = case.quant is not None, case.group_size, case.ue8m0

    def dual_norm(q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Results:
        q_wide = wide_norm(q, q_weight, q_epsilon)
        kv_normed = wide_norm(kv, kv_weight, kv_epsilon).to(kv.dtype)
        if quantised:
            return (*quantise(q_wide, fp8, group_size, ue8m0), kv_normed)
        return q_wide.to(q.dtype), kv_normed

    return dual_norm
