"""The dual norms of an MLA layer over AITER's fused kernels, as `fusion.ops` defines them.

`aiter.ops.fused_qk_norm_rope_cache_quant` and `aiter.ops.fused_qk_rmsnorm_group_quant`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...ops.quantisation import empty_scales
from .resolved import Resolved
from .tensors import empty_like, flat_like, rows, rows_by, scale_buffer, scales_of, vector

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def mla_dual_rms_norm(found: Resolved) -> Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Pair]:
    """`layerfuse::mla_dual_rms_norm`: renamed, and given outputs in front, at v0.1.14-rc0."""
    name, function = found.binding, found.function

    def into_ours(
        q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, q_epsilon: float, kv_epsilon: float
    ) -> Pair:
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
        q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, q_epsilon: float, kv_epsilon: float
    ) -> Pair:
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


def per_token_quant(
    found: Resolved,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, float, float, torch.dtype, bool], Triple]:
    """`layerfuse::mla_dual_rms_norm_per_token_quant`; `use_ue8m0` is refused before it comes here."""
    name, function = found.binding, found.function

    def call(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        dtype: torch.dtype,
        _use_ue8m0: bool,
    ) -> Triple:
        out, kv_out = empty_like(q, dtype), empty_like(kv)
        if not (q.numel() and kv.numel()):
            return out, empty_scales(q, None, False), kv_out
        scale = scale_buffer(q, 1)
        function(
            q_out_quantized=flat_like(out),
            q_out_scale=scale,
            q=rows(q),
            q_weight=vector(name, "q_weight", q_weight, q),
            q_epsilon=q_epsilon,
            k_out=flat_like(kv_out),
            k=rows(kv),
            k_weight=vector(name, "kv_weight", kv_weight, kv),
            k_epsilon=kv_epsilon,
        )
        return out, scales_of(scale, q.shape[:-1], False), kv_out

    return call


def group_quant(
    found: Resolved,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, float, float, torch.dtype, int, bool, bool], Triple]:
    """`layerfuse::mla_dual_rms_norm_group_quant`; what it cannot take is refused before it comes here."""
    name, function = found.binding, found.function
    rows_of = rows_by(found.releases, "v0.1.12.post1")  # v0.1.12 refuses anything that is not contiguous

    def call(
        q: Tensor,
        kv: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        q_epsilon: float,
        kv_epsilon: float,
        dtype: torch.dtype,
        group_size: int,
        column_major: bool,
        _use_ue8m0: bool,
    ) -> Triple:
        out, kv_out = empty_like(q, dtype), empty_like(kv)
        if not (q.numel() and kv.numel()):
            return out, empty_scales(q, group_size, column_major), kv_out
        # A contiguous buffer is written group by group where `transpose_scale` is set, in every release.
        scale = scale_buffer(q, q.shape[-1] // group_size)
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
            group_size=group_size,
            transpose_scale=column_major,
        )
        return out, scales_of(scale, q.shape[:-1], column_major), kv_out

    return call
