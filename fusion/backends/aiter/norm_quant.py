"""Norms that quantise over AITER's kernels: HIP's for one norm, HIP's for two latents with both or one of them, Triton's.

Each quantises the norm before any rounding, but for Triton's static form, which is told. Each norms the sum with the residual before its rounding.

In blocks of 32 columns with a byte for each scale Triton's round the scales as `ops.quantisation` does. HIP's MXFP8 differs in one thing: a
block whose largest magnitude is exactly 448 times a power of two keeps the scale with which that is 448, and a block of zeros has the scale
of 1e-10. HIP's MXFP4, which rounds up, is not called.

All ops take `x, weight, epsilon, weight_offset`, a residual behind x where they add one, twice the norm for an MLA layer's latents, and the
options of their quantisation. All return the values, the scales unless they were given, the plain norm where it is kept, and the sum,
or the norm of the second latent. `norms` puts that over one function of all their arguments, once, when binding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ...ops.quantisation import MX_COLUMNS
from .table import Resolved
from .tensors import (
    dense,
    empty_like,
    flat,
    flat_like,
    gemma,
    next_power_of_two,
    rows,
    scale_buffer,
    scales_of,
    shaped,
    unpermuted,
    vector,
)

Norm = tuple[Tensor, Tensor, float, float]
"""x, weight, epsilon and weight offset."""

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Values, scales, plain norm, sum with the residual (of two latents: the norm of kv); None for what there is not."""

Core = Callable[..., Results]
"""From a norm, a residual or None, a second norm or None, and the options: a scale and the dtype; or `dtype, group_size, column_major`,
with no size for one scale per token; or none."""


def norms(found: Resolved, core: Core) -> Callable[..., Any]:
    """The op of one norm, `(x, [residual,] weight, epsilon, weight_offset, ...)`, or of an MLA layer's latents, `(q, kv, ...)`."""
    per, adds = found.binding.per, found.binding.adds
    kept = (True, per != "static", found.binding.keeps_norm, adds or found.binding.is_dual)
    pick: Callable[[Results], Any] = itemgetter(*(place for place, is_kept in enumerate(kept) if is_kept))

    def options(given: Sequence[Any]) -> Sequence[Any]:
        return (given[0], None, False) if per == "token" else given[:3]

    def two(*given: Any) -> Any:
        q, kv, q_weight, kv_weight, q_epsilon, kv_epsilon, q_offset, kv_offset, *others = given
        second = (kv, kv_weight, kv_epsilon, kv_offset)
        return pick(core((q, q_weight, q_epsilon, q_offset), None, second, *options(others)))

    def added(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float, *others: Any) -> Any:
        return pick(core((x, weight, epsilon, offset), residual, None, *options(others)))

    def one(x: Tensor, weight: Tensor, epsilon: float, offset: float, *others: Any) -> Any:
        return pick(core((x, weight, epsilon, offset), None, None, *options(others)))

    return two if found.binding.is_dual else added if adds else one


def hip(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_{per_token,group,mxfp8}_quant`, over `[add_]rmsnorm_quant`, which writes bytes where it is given a buffer of bytes."""
    function = found.function
    kind = torch.uint8 if found.binding.per == "none" else torch.float32

    def core(
        norm: Norm,
        residual: Tensor | None,
        _: None,
        dtype: torch.dtype = torch.float8_e4m3fn,
        group_size: int | None = MX_COLUMNS,
        column_major: bool = False,
    ) -> Results:
        x, weight, epsilon, offset = norm
        out, summed, options = empty_like(x, dtype), None, gemma(offset)
        scale = scale_buffer(x, 1 if group_size is None else x.shape[-1] // group_size, kind)
        if residual is not None:
            summed = empty_like(x)
            options |= {"residual_in": rows(residual), "residual_out": flat_like(summed)}
        function(
            out=flat_like(out),
            input=rows(x),
            scale=scale,
            weight=vector(weight),
            epsilon=epsilon,
            group_size=group_size or 0,
            shuffle_scale=column_major,
            **options,
        )
        return out, scales_of(scale, x.shape[:-1], column_major), None, summed

    return norms(found, core)


def latents(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_{per_token,group}_quant[_with_norm]` and `mla_dual_rms_norm_...`, by the kernels of two latents."""
    function, keeps_norm = found.function, found.binding.keeps_norm

    def core(
        norm: Norm,
        residual: Tensor | None,
        second: Norm | None,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
    ) -> Results:
        x, weight, epsilon, offset = norm
        out, normed, other, options = empty_like(x, dtype), None, None, gemma(offset)
        # A contiguous buffer is written group by group where `transpose_scale` is set.
        scale = scale_buffer(x, 1 if group_size is None else x.shape[-1] // group_size)
        if group_size is not None:
            options |= {"group_size": group_size, "transpose_scale": column_major}
        if keeps_norm:
            normed = empty_like(x)
            options["q_out_unquantized"] = flat_like(normed)
        if residual is not None:
            other = empty_like(x)
            options |= {"q_residual": rows(residual), "q_res_out": flat_like(other)}
        if second is not None:
            kv, kv_weight, kv_epsilon, _same_offset = second
            other = empty_like(kv)
            options |= {
                "k_out": flat_like(other),
                "k": rows(kv),
                "k_weight": vector(kv_weight),
                "k_epsilon": kv_epsilon,
            }
        function(
            q_out_quantized=flat_like(out),
            q_out_scale=scale,
            q=rows(x),
            q_weight=vector(weight),
            q_epsilon=epsilon,
            **options,
        )
        return out, scales_of(scale, x.shape[:-1], column_major), normed, other

    return norms(found, core)


def triton(found: Resolved) -> Callable[..., Any]:
    """The same over `fused_rms_fp8_group_quant`, for any width.

    One scale per row is one group of a power of two, behind whose columns are zeros.
    """
    run = _triton(found)

    def core(
        norm: Norm,
        residual: Tensor | None,
        second: Norm | None,
        dtype: torch.dtype,
        group_size: int | None,
        column_major: bool,
    ) -> Results:
        x = norm[0]
        size = group_size or next_power_of_two(x.shape[-1])
        (out, scales), *others = run(
            norm, residual, second, group_size=size, dtype_quant=dtype, transpose_scale=column_major
        )
        return out.view(x.shape), unpermuted(scales, x.shape[:-1], column_major), *others

    return norms(found, core)


def triton_static(found: Resolved) -> Callable[..., Any]:
    """`{[add_]rms_norm,mla_dual_rms_norm}_static_quant[_with_norm]`, over `fused_rms_fp8_per_tensor_static_quant`."""
    run = _triton(found)

    def core(norm: Norm, residual: Tensor | None, second: Norm | None, scale: Tensor, dtype: torch.dtype) -> Results:
        options = {"inp1_scale": scale, "dtype_quant": dtype, "rmsnorm_convert_to_inp1_type": True}
        out, *others = run(norm, residual, second, **options)
        return out.view(norm[0].shape), None, *others

    return norms(found, core)


def _triton(found: Resolved) -> Callable[..., tuple[Any, Tensor | None, Tensor | None]]:
    """What Triton's two functions have in common: they give the quantised norm, the norm, the second norm, and the sum."""
    function, keeps_norm = found.function, found.binding.keeps_norm

    def run(norm: Norm, residual: Tensor | None, second: Norm | None, **options: Any) -> Any:
        x, weight, epsilon, _ = norm
        other = x
        if second is not None:
            other, kv_weight, kv_epsilon, _ = second
            options |= {"inp2": flat(other), "inp2_weight": dense(kv_weight), "inp2_epsilon": kv_epsilon}
        if residual is not None:
            options["res1"] = flat(residual)
        out, normed, kv_out, summed = function(
            inp1=flat(x),
            inp1_weight=dense(weight),
            inp1_epsilon=epsilon,
            output_unquantized_inp1=keeps_norm,
            **options,
        )
        return out, shaped(normed, x), shaped(summed if second is None else kv_out, other)

    return run


def triton_mxfp8(found: Resolved) -> Callable[..., Any]:
    """`rms_norm_mxfp8_quant`, over `fused_rms_mxfp8_quant`."""
    function = found.function

    def core(norm: Norm, *_: None) -> Results:
        x, weight, epsilon, _offset = norm
        out, scale = function(x=flat(x), weight=dense(weight), eps=epsilon)
        return out.view(x.shape), scale.view(*x.shape[:-1], -1), None, None

    return norms(found, core)


def triton_mxfp4(found: Resolved) -> Callable[..., Any]:
    """`[add_]rms_norm_mxfp4_quant[_with_norm]`, over `fused_rms_mxfp4_quant`."""
    function, keeps_norm = found.function, found.binding.keeps_norm

    def core(norm: Norm, residual: Tensor | None, _second: None) -> Results:
        x, weight, epsilon, _offset = norm
        (out, scale), normed, _, summed = function(
            x1=rows(x),
            x1_weight=dense(weight),
            x1_epsilon=epsilon,
            res1=None if residual is None else rows(residual),
            output_unquantized_inp1=keeps_norm,
        )
        leading = x.shape[:-1]
        return out.view(*leading, -1), scale.view(*leading, -1), shaped(normed, x), shaped(summed, x)

    return norms(found, core)
