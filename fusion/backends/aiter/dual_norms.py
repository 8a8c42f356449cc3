"""The norms of an MLA layer's two latents over AITER's fused kernels, plain and with the query latent quantised.

`aiter.ops.fused_qk_norm_rope_cache_quant`, `aiter.ops.fused_qk_rmsnorm_group_quant`, and the second input of Triton's norms.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ...ops.quantisation import empty_scales
from .errors import AiterCallError
from .resolved import Resolved
from .tensors import (
    dense,
    empty_like,
    flat,
    flat_like,
    is_gemma,
    next_power_of_two,
    no_offset,
    rows,
    rows_by,
    scale_buffer,
    scales_of,
    unpermuted,
    vector,
)

Pair = tuple[Tensor, Tensor]
Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""Values and scales of q, its plain norm, kv's norm; None for what there is not."""

Core = Callable[
    [Tensor, Tensor, Tensor, Tensor, float, float, float, float, torch.dtype, int | None, bool],
    Results,
]
"""From q, kv, weights, epsilons, weight offsets, dtype, group_size (None: one scale per row), column_major."""


def mla_dual_rms_norm(
    found: Resolved,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, float, float, float, float], Pair]:
    """`mla_dual_rms_norm`: renamed, and given outputs in front, at v0.1.14-rc0.

    Raises:
        AiterCallError: a weight offset, or a weight of another dtype.
    """
    name, function = found.binding, found.function

    def into_ours(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        q_offset: float,
        kv_offset: float,
    ) -> Pair:
        no_offset(name, q_offset or kv_offset)
        q_out, kv_out = empty_like(q), empty_like(kv)
        if q.numel() and kv.numel():
            function(
                q_out=flat_like(q_out),
                q=rows(q),
                q_weight=vector(name, "q_weight", q_weight, q),
                q_eps=q_epsilon,
                k_out=flat_like(kv_out),
                k=rows(kv),
                k_weight=vector(name, "kv_weight", kv_weight, kv),
                k_eps=kv_epsilon,
            )
        return q_out, kv_out

    def into_its_own(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        q_offset: float,
        kv_offset: float,
    ) -> Pair:
        no_offset(name, q_offset or kv_offset)
        if not (q.numel() and kv.numel()):
            return empty_like(q), empty_like(kv)
        q_out, kv_out = function(
            q=rows(q),
            q_weight=vector(name, "q_weight", q_weight, q),
            q_eps=q_epsilon,
            k=rows(kv),
            k_weight=vector(name, "kv_weight", kv_weight, kv),
            k_eps=kv_epsilon,
        )
        return q_out.view(q.shape), kv_out.view(kv.shape)

    return into_ours if "q_out" in found.names else into_its_own


# ---- quantised: `(q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_weight_offset, kv_weight_offset, ...)`


def hip_per_token(found: Resolved) -> Callable[..., Any]:
    """`mla_dual_rms_norm_per_token_quant[_with_norm]`."""
    return _per_token(found, _hip(found))


def hip_group(found: Resolved) -> Callable[..., Any]:
    """`mla_dual_rms_norm_group_quant[_with_norm]`."""
    return _group(found, _hip(found))


def triton_per_token(found: Resolved) -> Callable[..., Any]:
    """`mla_dual_rms_norm_per_token_quant[_with_norm]`."""
    return _per_token(found, _triton(found))


def triton_group(found: Resolved) -> Callable[..., Any]:
    """`mla_dual_rms_norm_group_quant[_with_norm]`."""
    return _group(found, _triton(found))


def triton_static(found: Resolved) -> Callable[..., Any]:
    """`mla_dual_rms_norm_static_quant[_with_norm](..., scale, dtype)`."""
    name, function, keeps_norm = found.binding, found.function, found.keeps_norm

    def call(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        q_offset: float,
        kv_offset: float,
        scale: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        no_offset(name, q_offset or kv_offset)
        if not (q.numel() and kv.numel()):
            kept = (empty_like(q),) if keeps_norm else ()
            return empty_like(q, dtype), *kept, empty_like(kv)
        out, normed, kv_out, _ = function(
            inp1=flat(q),
            inp1_weight=dense(q_weight),
            inp1_epsilon=q_epsilon,
            inp1_scale=scale,
            inp2=flat(kv),
            inp2_weight=dense(kv_weight),
            inp2_epsilon=kv_epsilon,
            dtype_quant=dtype,
            output_unquantized_inp1=keeps_norm,
        )
        kept = (normed.view(q.shape),) if keeps_norm else ()
        return out.view(q.shape), *kept, kv_out.view(kv.shape)

    return call


def _hip(found: Resolved) -> Core:
    name, function, keeps_norm = found.binding, found.function, found.keeps_norm
    gemma_known = "gemma_norm" in found.names
    rows_of = rows_by(found.releases, "v0.1.12.post1")  # v0.1.12 refuses anything that is not contiguous

    def core(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        q_offset: float,
        kv_offset: float,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
    ) -> Results:
        if q_offset != kv_offset:
            raise AiterCallError(name, f"weight offsets {q_offset} and {kv_offset}: AITER's gemma_norm is of both")
        out, kv_out, normed = empty_like(q, dtype), empty_like(kv), empty_like(q) if keeps_norm else None
        if not (q.numel() and kv.numel()):
            return out, empty_scales(q, group_size, column_major), normed, kv_out
        # A contiguous buffer is written group by group where `transpose_scale` is set, in every release.
        scale = scale_buffer(q, 1 if group_size is None else q.shape[-1] // group_size)
        options: dict[str, Any] = {"gemma_norm": True} if is_gemma(name, q_offset, gemma_known) else {}
        if group_size is not None:
            options |= {"group_size": group_size, "transpose_scale": column_major}
        if normed is not None:
            options["q_out_unquantized"] = flat_like(normed)
        function(
            q_out_quantized=flat_like(out),
            q_out_scale=scale,
            q=rows_of(q),
            q_weight=vector(name, "q_weight", q_weight, q),
            q_epsilon=q_epsilon,
            k_out=flat_like(kv_out),
            k=rows_of(kv),
            k_weight=vector(name, "kv_weight", kv_weight, kv),
            k_epsilon=kv_epsilon,
            **options,
        )
        return out, scales_of(scale, q.shape[:-1], column_major), normed, kv_out

    return core


def _triton(found: Resolved) -> Core:
    name, function, keeps_norm = found.binding, found.function, found.keeps_norm

    def core(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        q_offset: float,
        kv_offset: float,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
    ) -> Results:
        no_offset(name, q_offset or kv_offset)
        if not (q.numel() and kv.numel()):
            normed = empty_like(q) if keeps_norm else None
            return empty_like(q, dtype), empty_scales(q, group_size, column_major), normed, empty_like(kv)
        (out, scales), normed, kv_out, _ = function(
            inp1=flat(q),
            inp1_weight=dense(q_weight),
            inp1_epsilon=q_epsilon,
            inp2=flat(kv),
            inp2_weight=dense(kv_weight),
            inp2_epsilon=kv_epsilon,
            group_size=group_size or next_power_of_two(q.shape[-1]),
            dtype_quant=dtype,
            output_unquantized_inp1=keeps_norm,
            transpose_scale=column_major,
        )
        return (
            out.view(q.shape),
            unpermuted(scales, q.shape[:-1], column_major),
            None if normed is None else normed.view(q.shape),
            kv_out.view(kv.shape),
        )

    return core


def _per_token(found: Resolved, core: Core) -> Callable[..., Any]:
    """`(..., dtype, use_ue8m0)`."""
    pick = _picked(found)

    def call(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        q_offset: float,
        kv_offset: float,
        dtype: torch.dtype,
        _ue8m0: bool,
    ) -> Any:
        return pick(core(q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_offset, kv_offset, dtype, None, False))

    return call


def _group(found: Resolved, core: Core) -> Callable[..., Any]:
    """`(..., dtype, group_size, column_major, tma_aligned, use_ue8m0)`."""
    pick = _picked(found)

    def call(
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
        _tma_aligned: bool,
        _ue8m0: bool,
    ) -> Any:
        offsets = q_offset, kv_offset
        return pick(core(q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, *offsets, dtype, group_size, column_major))

    return call


def _picked(found: Resolved) -> Callable[[Results], Any]:
    pick: Callable[[Results], Any] = itemgetter(0, 1, 2, 3) if found.keeps_norm else itemgetter(0, 1, 3)
    return pick
