"""Norms fused into AITER's all-reduce: the methods of its `CustomAllreduce`, bound from the class.

They answer None where AITER declines (switched off, too large): the caller then reduces and norms by itself. So do these,
also where AITER would be wrong without a word. Between the start of `capture()` and the capture itself AITER answers zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .errors import AiterCallError
from .releases import ReleaseRange
from .resolved import Resolved
from .tensors import empty_like, flat_like, is_gemma, no_offset, packed_rows, same_shape, scales_of, vector

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]

_BLOCKS = 80
"""kMaxBlocks of its kernels: the most tokens of a one-stage launch where it does not loop."""

_THROWS_ABOVE = ReleaseRange("v0.1.10.post2", "v0.1.16.post6")


def rms_norm(found: Resolved) -> Callable[[Any, Tensor, Tensor, Tensor, float, float, bool], Pair | None]:
    """`all_reduce_rms_norm(communicator, x, residual, weight, epsilon, weight_offset, use_1stage)`.

    x: (..., width), this rank's part of the sum; residual: like x. Returns (norm of the sum, rounded sum), or None
    where AITER declines. communicator: its `CustomAllreduce`.

    Raises:
        AiterCallError: an offset the build does not know, or a weight or residual that does not fit.
    """
    name, method = found.binding, found.function
    stages, gemma_known = "use_1stage" in found.names, "gemma_norm" in found.names
    throws = found.releases.overlaps(_THROWS_ABOVE)

    def call(
        communicator: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        weight_offset: float,
        use_1stage: bool,
    ) -> Pair | None:
        same_shape(name, "residual", residual, x)
        options: dict[str, bool] = {"gemma_norm": True} if is_gemma(name, weight_offset, gemma_known) else {}
        if not x.numel():
            return empty_like(x), empty_like(x)
        if _cannot(communicator, x):
            return None
        flat = packed_rows(x)
        if stages:
            options["use_1stage"] = use_1stage and not (throws and flat.shape[0] > _BLOCKS)
        result = method(
            communicator,
            input=flat,
            residual_inp=packed_rows(residual),
            weight=vector(name, "weight", weight, x),
            eps=epsilon,
            **options,
        )
        if result is None:
            return None
        out, residual_out = result
        return out.view(x.shape), residual_out.view(x.shape)

    return call


def rms_norm_group_quant(
    found: Resolved,
) -> Callable[[Any, Tensor, Tensor, Tensor, float, float, int, bool, bool], Triple | None]:
    """`all_reduce_rms_norm_group_quant(communicator, x, residual, weight, epsilon, weight_offset, group_size, ...)`.

    Then column_major and use_1stage. Returns (fp8 of x's shape, float32 scales, rounded sum), or None where AITER
    declines.

    Raises:
        AiterCallError: any offset, column-major scales where the build has none, or a weight or residual that does
            not fit.
    """
    name, method = found.binding, found.function
    can_transpose = "transpose_scale" in found.names
    throws = found.releases.overlaps(_THROWS_ABOVE)

    def call(
        communicator: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        weight_offset: float,
        group_size: int,
        column_major: bool,
        use_1stage: bool,
    ) -> Triple | None:
        no_offset(name, weight_offset)
        same_shape(name, "residual", residual, x)
        if column_major and not can_transpose:
            raise AiterCallError(name, "column-major scales: the installed function has no transpose_scale")
        if not x.numel() or _cannot(communicator, x):
            return None
        flat = packed_rows(x)
        options = {"transpose_scale": True} if column_major else {}
        result = method(
            communicator,
            input=flat,
            residual_inp=packed_rows(residual),
            weight=vector(name, "weight", weight, x),
            eps=epsilon,
            group_size=group_size,
            use_1stage=use_1stage and not (throws and flat.shape[0] > _BLOCKS),
            emit_bf16=False,
            **options,
        )
        if result is None:
            return None
        out, residual_out, scales = result
        # Transposed scales come as a view of (groups, tokens): their own indexing is right, only leading dimensions
        # are to be put back.
        buffer = scales.as_strided(scales.shape, (scales.shape[1], 1)) if column_major else scales
        return out.view(x.shape), scales_of(flat_like(buffer), x.shape[:-1], column_major), residual_out.view(x.shape)

    return call


def _cannot(communicator: Any, x: Tensor) -> bool:
    """Cases that AITER does not decline, and for which its result is wrong."""
    if communicator.disabled:
        return False
    # While a graph is captured it takes the input for registered, whether it registers inputs or not (not on gfx1250,
    # nor with expandable segments).
    if communicator._IS_CAPTURING and not communicator.enable_register_for_capturing:
        return True
    # Its reduce-scatter drops the 16-byte packs that do not divide among the ranks.
    packs, rest = divmod(x.numel() * x.itemsize, 16)
    return bool(rest or packs % communicator.world_size)
