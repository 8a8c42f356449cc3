"""`layerfuse::mla_dual_rms_norm`: the norms of an MLA layer's two latents in one launch.

Both inputs may be column ranges of one down-projection's output; nothing is written but the two results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .library import define
from .rms_norm import check_norm, normalise

_NAME = "layerfuse::mla_dual_rms_norm"


class DualNormCase(NamedTuple):
    """What of a call decides which backend takes it."""

    dtype: torch.dtype
    q_width: int
    kv_width: int
    q_weight_dtype: torch.dtype
    kv_weight_dtype: torch.dtype


def check_dual_norm(
    op: str, q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, q_epsilon: float, kv_epsilon: float
) -> None:
    """What every backend needs of the two norms, checked before anything is launched.

    Raises:
        ValueError: an argument no backend could take; the message names it.
        RuntimeError: an input requires grad while grad is enabled.
    """
    check_norm(op, q, q_weight, q_epsilon, ("q", "q_weight", "q_epsilon"))
    check_norm(op, kv, kv_weight, kv_epsilon, ("kv", "kv_weight", "kv_epsilon"))
    if torch.is_grad_enabled() and (
        q.requires_grad or kv.requires_grad or q_weight.requires_grad or kv_weight.requires_grad
    ):
        raise RuntimeError(f"{op} is for inference and has no backward; use layerfuse::rms_norm twice, or no_grad()")
    for name, x in (("q", q), ("kv", kv), ("q_weight", q_weight), ("kv_weight", kv_weight)):
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
            raise ValueError(
                f"{op}: {name} has stride {x.stride(-1)} along its last dimension, and kernels read rows whose elements "
                f"lie together; pass {name}.contiguous()"
            )
    if q.device != kv.device:
        raise ValueError(f"{op}: kv is on {kv.device}, q on {q.device}; move one of them")
    if q.dtype != kv.dtype:
        raise ValueError(f"{op}: kv is {kv.dtype}, q is {q.dtype}; both come from one projection and must agree")
    if q.shape[:-1] != kv.shape[:-1]:
        raise ValueError(
            f"{op}: kv must have the leading dimensions of q {tuple(q.shape[:-1])}, got {tuple(kv.shape[:-1])}"
        )


def _check(q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, q_epsilon: float, kv_epsilon: float) -> None:
    check_dual_norm(_NAME, q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon)


def _case(
    q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, _q_epsilon: float, _kv_epsilon: float
) -> DualNormCase:
    return DualNormCase(q.dtype, q.shape[-1], kv.shape[-1], q_weight.dtype, kv_weight.dtype)


def _reference(
    q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, q_epsilon: float, kv_epsilon: float
) -> tuple[Tensor, Tensor]:
    return normalise(q, q_weight, q_epsilon), normalise(kv, kv_weight, kv_epsilon)


def _fake(
    q: Tensor, kv: Tensor, _q_weight: Tensor, _kv_weight: Tensor, _q_epsilon: float, _kv_epsilon: float
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(kv.shape, dtype=kv.dtype, device=kv.device),
    )


_op = define(
    "mla_dual_rms_norm(Tensor q, Tensor kv, Tensor q_weight, Tensor kv_weight, float q_epsilon, float kv_epsilon)"
    " -> (Tensor, Tensor)",
    reference=_reference,
    check=_check,
    fake=_fake,
    case=_case,
)


def mla_dual_rms_norm(
    q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, q_epsilon: float, kv_epsilon: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the query latent and of the key/value latent (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Args:
        q: (..., q_lora_rank), any floating dtype, last stride 1: a split view goes in as it is.
        kv: (..., kv_lora_rank), of q's leading dimensions, dtype and device.
        q_weight: (q_lora_rank,).
        kv_weight: (kv_lora_rank,).
        q_epsilon: added to q's mean square; the two sides may differ.
        kv_epsilon: added to kv's mean square.

    Returns:
        Two contiguous tensors of the shapes of q and kv, accumulated in float32 and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; the message names the argument.
        RuntimeError: an input requires grad while grad is enabled.
    """
    result: tuple[Tensor, Tensor] = _op(q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon)
    return result
