"""vLLM's CUDA ops as a peer, of an installed vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..fusion.ops.quantisation import empty_scales
from .cases import Case
from .inputs import Work
from .peers import needs_gpu
from .thirdparty import IN_PLACE, Function, Offer, Results, ThirdParty, halves_joined, norms_of


def _ops() -> Any:
    return torch.ops._C


def _values(work: Work, like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=work.fp8, device=like.device)


def _scales(work: Work, like: Tensor) -> Tensor:
    return empty_scales(like, work.case.group_size, work.case.column_major, work.case.tma_aligned)


def _add(work: Work) -> Function:
    ((weight, epsilon),) = norms_of(work)

    def call(x: Tensor, residual: Tensor) -> Results:
        _ops().fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual

    return call


def _static(work: Work) -> Function:
    ((weight, epsilon),) = norms_of(work)
    scale = work.weights["scale"]

    def call(x: Tensor, *residual: Tensor) -> Results:
        values = _values(work, x)
        if residual:
            _ops().fused_add_rms_norm_static_fp8_quant(values, x, residual[0], weight, scale, epsilon)
        else:
            _ops().rms_norm_static_fp8_quant(values, x, weight, scale, epsilon)
        return (values, *residual)

    return call


def _dynamic(work: Work) -> Function:
    """A scale for each token, or for each group of columns."""
    ((weight, epsilon),), size = norms_of(work), work.case.group_size
    op = _ops().rms_norm_dynamic_per_token_quant if size is None else _ops().rms_norm_per_block_quant
    more = () if size is None else (size, work.case.column_major)

    def call(x: Tensor, residual: Tensor | None = None) -> Results:
        values, scales = _values(work, x), _scales(work, x)
        op(values, x, weight, scales, epsilon, None, residual, *more)
        return (values, scales) if residual is None else (values, scales, residual)

    return call


def _silu_static(work: Work) -> Function:
    scale = work.weights["scale"]

    def call(gate: Tensor, up: Tensor) -> Results:
        values = _values(work, gate)
        _ops().silu_and_mul_quant(values, halves_joined(gate, up), scale)
        return (values,)

    return call


def _silu_group(work: Work) -> Function:
    size, turned = work.case.group_size, work.case.column_major

    def call(gate: Tensor, up: Tensor) -> Results:
        values, scales = _values(work, gate), _scales(work, gate)
        _ops().silu_and_mul_per_block_quant(values, halves_joined(gate, up), scales, size, None, turned)
        return values, scales

    return call


def _silu_per_token(work: Work) -> Function:
    def call(gate: Tensor, up: Tensor) -> Results:
        product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        values, scales = _values(work, gate), _scales(work, gate)
        _ops().silu_and_mul(product, halves_joined(gate, up))
        _ops().dynamic_per_token_scaled_fp8_quant(values, product, scales, None)
        return values, scales

    return call


def _qk_norm_rope(work: Work) -> Function:
    """It turns query and key where they lie, in the rows of one projection, and has one epsilon for both."""
    (q_weight, epsilon), (k_weight, _) = norms_of(work)
    case, cos, positions = work.case, work.weights["cos"], work.weights["positions"]
    heads, kv_heads, width = case.heads or 0, case.kv_heads or 0, q_weight.shape[0]
    table = cos.as_strided((cos.shape[0], 2 * cos.shape[1]), cos.stride())

    def call(qkv: Tensor) -> Results:
        _ops().fused_qk_norm_rope(
            qkv, heads, kv_heads, kv_heads, width, epsilon, q_weight, k_weight, table, True, positions, -1
        )
        q, k, _ = qkv.split([heads * width, kv_heads * width, kv_heads * width], -1)
        return q.unflatten(-1, (heads, width)), k.unflatten(-1, (kv_heads, width))

    return call


def _rows_of_all(work: Work, rows: tuple[Tensor, ...]) -> list[Tensor]:
    """The rows of the projection that query and key are columns of."""
    q = rows[0]
    return [q.as_strided((q.shape[0], work.case.row_width or 0), (q.stride(0), 1))]


def _other_heads(case: Case) -> str | None:
    width, epsilons = case.widths["width"], set(case.epsilons.values())
    if width not in (64, 128, 256):
        return f"vLLM's kernel has heads of 64, 128 and 256 columns, not {width}"
    return None if len(epsilons) == 1 else "vLLM's kernel has one epsilon for both norms"


def _whole_groups(case: Case) -> str | None:
    width, size = case.width_of(case.form.op.rows[0].name), case.group_size
    if size not in (64, 128):
        return f"vLLM's kernels have groups of 64 and 128 columns, not {size}"
    return f"vLLM's kernels want whole groups, and {width} columns are none of {size}" if width % size else None


def _offer(called: str, make: Callable[[Work], Function], **more: Any) -> Offer:
    return Offer(about=f"vLLM's _C.{called}", make=make, **more)


_TURNED = frozenset({"column_major", "tma_aligned"})
_SILU_TURNED = frozenset({"column_major"})

OFFERS: dict[str, Offer] = {
    "add_rms_norm": _offer(f"fused_add_rms_norm, {IN_PLACE}", _add, in_place=True),
    "qk_norm_rope": _offer(
        f"fused_qk_norm_rope, {IN_PLACE}", _qk_norm_rope, in_place=True, rows=_rows_of_all, refuses=_other_heads
    ),
    "rms_norm_static_quant": _offer("rms_norm_static_fp8_quant", _static),
    "add_rms_norm_static_quant": _offer(f"fused_add_rms_norm_static_fp8_quant, {IN_PLACE}", _static, in_place=True),
    "rms_norm_per_token_quant": _offer("rms_norm_dynamic_per_token_quant", _dynamic),
    "add_rms_norm_per_token_quant": _offer(
        f"rms_norm_dynamic_per_token_quant with a residual, {IN_PLACE}", _dynamic, in_place=True
    ),
    "rms_norm_group_quant": _offer("rms_norm_per_block_quant", _dynamic, takes=_TURNED, refuses=_whole_groups),
    "add_rms_norm_group_quant": _offer(
        f"rms_norm_per_block_quant with a residual, {IN_PLACE}", _dynamic, in_place=True, takes=_TURNED,
        refuses=_whole_groups,
    ),
    "silu_mul_static_quant": _offer("silu_and_mul_quant", _silu_static),
    "silu_mul_per_token_quant": _offer("silu_and_mul and dynamic_per_token_scaled_fp8_quant", _silu_per_token),
    "silu_mul_group_quant": _offer(
        "silu_and_mul_per_block_quant", _silu_group, takes=_SILU_TURNED, refuses=_whole_groups
    ),
}  # fmt: skip
"""By op."""

VLLM_OPS = ThirdParty(
    name="vllm", package="vllm", module="vllm._custom_ops", needs=needs_gpu, offers=OFFERS, dtypes=("bf16", "fp16")
)
