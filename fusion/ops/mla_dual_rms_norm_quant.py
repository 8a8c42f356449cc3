"""`layerfuse::mla_dual_rms_norm_per_token_quant` and `..._group_quant`: the dual norm whose query side comes out in fp8.

The query latent is normed and quantised without a rounding in between (`quantisation` says how); the key/value latent
is normed as in `mla_dual_rms_norm`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .library import define
from .mla_dual_rms_norm import check_dual_norm
from .quantisation import check_quant, empty_scales, quantise
from .rms_norm import normalise, normalise_wide

_PER_TOKEN = "layerfuse::mla_dual_rms_norm_per_token_quant"
_GROUP = "layerfuse::mla_dual_rms_norm_group_quant"
_NORMS = "Tensor q, Tensor kv, Tensor q_weight, Tensor kv_weight, float q_epsilon, float kv_epsilon"
_RESULTS = "(Tensor, Tensor, Tensor)"

Results = tuple[Tensor, Tensor, Tensor]


class DualNormQuantCase(NamedTuple):
    """What of a call decides which backend takes it. `group_size` None: one scale per token."""

    dtype: torch.dtype
    q_width: int
    kv_width: int
    q_weight_dtype: torch.dtype
    kv_weight_dtype: torch.dtype
    quant_dtype: torch.dtype
    group_size: int | None
    column_major: bool
    use_ue8m0: bool


def _check(op: str, q: Tensor, kv: Tensor, weights: tuple[Tensor, Tensor], epsilons: tuple[float, float]) -> None:
    check_dual_norm(op, q, kv, *weights, *epsilons)
    if q.dtype == torch.float64:
        raise ValueError(f"{op}: q must be float32, bfloat16 or float16 to be quantised, got {q.dtype}")


def _check_per_token(
    q: Tensor, kv: Tensor, qw: Tensor, kvw: Tensor, qe: float, kve: float, dtype: torch.dtype, _use_ue8m0: bool
) -> None:
    _check(_PER_TOKEN, q, kv, (qw, kvw), (qe, kve))
    check_quant(_PER_TOKEN, dtype, None)


def _check_group(
    q: Tensor,
    kv: Tensor,
    qw: Tensor,
    kvw: Tensor,
    qe: float,
    kve: float,
    dtype: torch.dtype,
    group_size: int,
    _column_major: bool,
    _use_ue8m0: bool,
) -> None:
    _check(_GROUP, q, kv, (qw, kvw), (qe, kve))
    check_quant(_GROUP, dtype, group_size)


def _reference_per_token(
    q: Tensor, kv: Tensor, qw: Tensor, kvw: Tensor, qe: float, kve: float, dtype: torch.dtype, use_ue8m0: bool
) -> Results:
    return (*quantise(normalise_wide(q, qw, qe), dtype, None, False, use_ue8m0), normalise(kv, kvw, kve))


def _reference_group(
    q: Tensor,
    kv: Tensor,
    qw: Tensor,
    kvw: Tensor,
    qe: float,
    kve: float,
    dtype: torch.dtype,
    group_size: int,
    column_major: bool,
    use_ue8m0: bool,
) -> Results:
    wide = normalise_wide(q, qw, qe)
    return (*quantise(wide, dtype, group_size, column_major, use_ue8m0), normalise(kv, kvw, kve))


def _empty(q: Tensor, kv: Tensor, dtype: torch.dtype, group_size: int | None, column_major: bool) -> Results:
    return (
        torch.empty(q.shape, dtype=dtype, device=q.device),
        empty_scales(q, group_size, column_major),
        torch.empty(kv.shape, dtype=kv.dtype, device=kv.device),
    )


_per_token = define(
    f"mla_dual_rms_norm_per_token_quant({_NORMS}, ScalarType dtype, bool use_ue8m0) -> {_RESULTS}",
    reference=_reference_per_token,
    check=_check_per_token,
    fake=lambda q, kv, _qw, _kvw, _qe, _kve, dtype, _ue8m0: _empty(q, kv, dtype, None, False),
    case=lambda q, kv, qw, kvw, _qe, _kve, dtype, use_ue8m0: DualNormQuantCase(
        q.dtype, q.shape[-1], kv.shape[-1], qw.dtype, kvw.dtype, dtype, None, False, use_ue8m0
    ),
)
_group = define(
    f"mla_dual_rms_norm_group_quant({_NORMS}, ScalarType dtype, int group_size, bool column_major, bool use_ue8m0)"
    f" -> {_RESULTS}",
    reference=_reference_group,
    check=_check_group,
    fake=lambda q, kv, _qw, _kvw, _qe, _kve, dtype, size, column_major, _ue8m0: _empty(
        q, kv, dtype, size, column_major
    ),
    case=lambda q, kv, qw, kvw, _qe, _kve, dtype, size, column_major, use_ue8m0: DualNormQuantCase(
        q.dtype, q.shape[-1], kv.shape[-1], qw.dtype, kvw.dtype, dtype, size, column_major, use_ue8m0
    ),
)


def mla_dual_rms_norm_per_token_quant(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    dtype: torch.dtype = torch.float8_e4m3fn,
    use_ue8m0: bool = False,
) -> Results:
    """The dual norm, the query latent quantised to fp8 with one scale per token.

    Args:
        q: (..., q_lora_rank), bfloat16, float16 or float32, last stride 1: a split view goes in as it is.
        kv: (..., kv_lora_rank), of q's leading dimensions, dtype and device.
        q_weight: (q_lora_rank,).
        kv_weight: (kv_lora_rank,).
        q_epsilon: added to q's mean square.
        kv_epsilon: added to kv's mean square.
        dtype: torch.float8_e4m3fn, or torch.float8_e4m3fnuz for gfx942.
        use_ue8m0: round the scales up to powers of two.

    Returns:
        q as contiguous fp8; its float32 scales, (..., 1); kv normed, contiguous, in its own dtype.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit; the message names the argument.
        RuntimeError: an input requires grad while grad is enabled.
    """
    result: Results = _per_token(q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, dtype, use_ue8m0)
    return result


def mla_dual_rms_norm_group_quant(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_size: int = 128,
    column_major: bool = False,
    use_ue8m0: bool = False,
) -> Results:
    """The dual norm, the query latent quantised to fp8 with one scale per `group_size` columns.

    Args:
        q: (..., q_lora_rank), bfloat16, float16 or float32, last stride 1: a split view goes in as it is.
        kv: (..., kv_lora_rank), of q's leading dimensions, dtype and device.
        q_weight: (q_lora_rank,).
        kv_weight: (kv_lora_rank,).
        q_epsilon: added to q's mean square.
        kv_epsilon: added to kv's mean square.
        dtype: torch.float8_e4m3fn, or torch.float8_e4m3fnuz for gfx942.
        group_size: 32, 64 or 128; the last group may be short.
        column_major: the scales' strides, (1, M) for M rows instead of (groups, 1); indexing means the same in both.
        use_ue8m0: round the scales up to powers of two.

    Returns:
        q as contiguous fp8; its float32 scales, (..., groups); kv normed, contiguous, in its own dtype.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit; the message names the argument.
        RuntimeError: an input requires grad while grad is enabled.
    """
    result: Results = _group(
        q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, dtype, group_size, column_major, use_ue8m0
    )
    return result
