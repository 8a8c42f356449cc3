"""The norms of an MLA layer's two latents over AITER's fused kernels, plain and with the query latent quantised.

`aiter.ops.fused_qk_norm_rope_cache_quant`, `aiter.ops.fused_qk_rmsnorm_group_quant`, and the second input of Triton's norms. All take
`q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_weight_offset, kv_weight_offset` and the options of their quantisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...ops.quantisation import empty_scales
from .errors import AiterCallError
from .resolved import Resolved
from .signatures import Results, two_norms
from .tensors import (
    dense,
    empty_like,
    flat,
    flat_like,
    is_gemma,
    next_power_of_two,
    no_offset,
    rows,
    scale_buffer,
    scales_of,
    shaped,
    unpermuted,
    vector,
)


def plain(found: Resolved) -> Callable[..., tuple[Tensor, Tensor]]:
    """`mla_dual_rms_norm`.

    Raises:
        AiterCallError: a weight offset, or a weight of another dtype.
    """
    name, function = found.name, found.function

    def call(*given: Any) -> tuple[Tensor, Tensor]:
        q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_offset, kv_offset = given
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

    return call


def hip(found: Resolved) -> Callable[..., Any]:
    """`mla_dual_rms_norm_{per_token,group}_quant[_with_norm]`."""
    name, function, keeps_norm = found.name, found.function, found.binding.keeps_norm
    gemma_known = "gemma_norm" in found.names

    def core(*given: Any) -> Results:
        q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_offset, kv_offset, *quantisation = given
        dtype, group_size, column_major, *_ = quantisation
        if q_offset != kv_offset:
            raise AiterCallError(name, f"weight offsets {q_offset} and {kv_offset}: AITER's gemma_norm is of both")
        out, kv_out, normed = empty_like(q, dtype), empty_like(kv), empty_like(q) if keeps_norm else None
        if not (q.numel() and kv.numel()):
            return out, empty_scales(q, group_size, column_major), normed, kv_out
        # A contiguous buffer is written group by group where `transpose_scale` is set.
        scale = scale_buffer(q, 1 if group_size is None else q.shape[-1] // group_size)
        options: dict[str, Any] = {"gemma_norm": True} if is_gemma(name, q_offset, gemma_known) else {}
        if group_size is not None:
            options |= {"group_size": group_size, "transpose_scale": column_major}
        if normed is not None:
            options["q_out_unquantized"] = flat_like(normed)
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
            **options,
        )
        return out, scales_of(scale, q.shape[:-1], column_major), normed, kv_out

    return two_norms(found, core)


def triton(found: Resolved) -> Callable[..., Any]:
    """`mla_dual_rms_norm_{per_token,group}_quant[_with_norm]`: one scale per row as for one norm."""
    name, function, keeps_norm = found.name, found.function, found.binding.keeps_norm

    def core(*given: Any) -> Results:
        q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_offset, kv_offset, *quantisation = given
        dtype, group_size, column_major, *_ = quantisation
        no_offset(name, q_offset or kv_offset)
        if not (q.numel() and kv.numel()):
            normed = empty_like(q) if keeps_norm else None
            return empty_like(q, dtype), empty_scales(q, group_size, column_major), normed, empty_like(kv)
        (out, scales), normed, kv_out, _sum = function(
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
        scales = unpermuted(scales, q.shape[:-1], column_major)
        return out.view(q.shape), scales, shaped(normed, q), kv_out.view(kv.shape)

    return two_norms(found, core)


def triton_static(found: Resolved) -> Callable[..., Any]:
    """`mla_dual_rms_norm_static_quant[_with_norm](..., scale, dtype)`."""
    name, function, keeps_norm = found.name, found.function, found.binding.keeps_norm

    def core(*given: Any) -> Results:
        q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_offset, kv_offset, scale, dtype = given
        no_offset(name, q_offset or kv_offset)
        if not (q.numel() and kv.numel()):
            return empty_like(q, dtype), None, empty_like(q) if keeps_norm else None, empty_like(kv)
        out, normed, kv_out, _sum = function(
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
        return out.view(q.shape), None, shaped(normed, q), kv_out.view(kv.shape)

    return two_norms(found, core)
