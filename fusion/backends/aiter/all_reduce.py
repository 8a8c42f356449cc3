"""The norm fused into AITER's all-reduce, plain, padded and quantised: methods of its `CustomAllreduce`, bound from the class.

AITER sums in the order of the ranks in float32, then rounds before it adds the residual. Its two stages of a quantised
norm round once more: they norm the rounded sum.

`custom_fused_ar_rms` and its like, which AITER puts over these, are not called: while a graph is being captured they take
the input for registered though it may not be, and between the start of `capture()` and the capture itself they give zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.groups import summed
from . import communicators
from .stages import Kind, stages
from .table import Resolved
from .tensors import flat_like, gemma, packed_rows, scales_of, vector


def norm(found: Resolved) -> Callable[..., Any]:
    """`all_reduce_add_rms_norm(x, residual, weight, epsilon, group, weight_offset) -> (normed, residual_out)`.

    x: (..., width), this rank's part of the sum; residual: like x. All ranks of the group make the call.
    """

    def given(x: Tensor, offset: float) -> Given:
        return gemma(offset), None, lambda out, summed: (out.view(x.shape), summed.view(x.shape))

    return _fused(found, "plain", given)


def norm_pad(found: Resolved) -> Callable[..., Any]:
    """`all_reduce_add_rms_norm_pad(x, residual, weight, epsilon, group, weight_offset, padded_width)`."""

    def given(x: Tensor, offset: float, padded_width: int) -> Given:
        options, shape = {**gemma(offset), "out_hidden_dim": padded_width}, (*x.shape[:-1], padded_width)
        return options, padded_width, lambda out, summed: (out.view(shape), summed.view(x.shape))

    return _fused(found, "pad", given)


def per_token(found: Resolved) -> Callable[..., Any]:
    """`all_reduce_add_rms_norm_per_token_quant[_with_norm](x, ..., weight_offset, dtype, use_ue8m0)`."""
    kept = {"post_per_token_quant": True, **({"emit_bf16": True} if found.binding.keeps_norm else {})}

    def given(x: Tensor, offset: float, *_: Any) -> Given:
        return {**gemma(offset), **kept}, None, lambda *results: _quantised(x, results, False)

    return _fused(found, "token", given)


def per_group(found: Resolved) -> Callable[..., Any]:
    """`all_reduce_add_rms_norm_group_quant[_with_norm](x, ..., weight_offset, dtype, group_size, column_major, ...)`."""

    def given(x: Tensor, _offset: float, _dtype: torch.dtype, group_size: int, column_major: bool, *_: Any) -> Given:
        options = {"group_size": group_size, "emit_bf16": found.binding.keeps_norm}
        if column_major:
            options["transpose_scale"] = True
        return options, None, lambda *results: _quantised(x, results, column_major)

    return _fused(found, "group", given)


Given = tuple[dict[str, Any], int | None, Callable[..., Any]]
"""AITER's own options, the padded width, and from its results to the op's."""


def _fused(found: Resolved, kind: Kind, given: Callable[..., Given]) -> Callable[..., Any]:
    """The op: fused where that can be, else by its pieces. `given`: from x, the weight offset and what comes behind it."""
    run, pieces = _kernel(found, kind), _pieces(found)

    def call(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str, *others: Any) -> Any:
        options, padded_width, shaped = given(x, *others)
        results = run(x, residual, weight, epsilon, group, padded_width, options)
        return pieces(x, residual, weight, epsilon, group, *others) if results is None else shaped(*results)

    return call


_Run = Callable[[Tensor, Tensor, Tensor, float, str, int | None, dict[str, Any]], tuple[Tensor, ...] | None]


def _kernel(found: Resolved, kind: Kind) -> _Run:
    """From the tensors and AITER's own options to its results; None where the op is to be done by its pieces.

    That follows from shapes, and from what the communicators of all ranks have in common: all ranks decide alike.
    """
    method, releases = found.function, found.releases

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        group: str,
        padded_width: int | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, ...] | None:
        ranks = communicators.ready(group, x.device)
        if ranks is None:
            return None
        flat = packed_rows(x)
        tokens, width = flat.shape
        sizes = stages(width, x.itemsize, ranks.world_size, releases, kind=kind, padded_width=padded_width)
        stage = sizes.of(tokens)
        if not stage or not ranks.should_custom_ar(flat):
            return None
        results: tuple[Tensor, ...] = method(
            ranks,
            inp=flat,
            res_inp=packed_rows(residual),
            w=vector(weight),
            eps=epsilon,
            registered=False,  # copied to a buffer that the other ranks know, which is right in every graph
            use_1stage=stage == 1,
            **options,
        )
        return results

    return run


def _quantised(x: Tensor, results: tuple[Tensor, ...], column_major: bool) -> tuple[Tensor, ...]:
    """AITER's results in the op's order: values, scales, the plain norm where it is kept, and the sum."""
    out, summed, scales, *kept = results
    # Transposed scales come as a view of (groups, tokens): their own indexing is right, only leading dimensions
    # are to be put back.
    buffer = scales.as_strided(scales.shape, (scales.shape[1], 1)) if column_major else scales
    return (
        out.view(x.shape),
        scales_of(flat_like(buffer), x.shape[:-1], column_major),
        *(norm.view(x.shape) for norm in kept),
        summed.view(x.shape),
    )


def _pieces(found: Resolved) -> Callable[..., Any]:
    """The op in two: the group's own all-reduce, in its order and rounded, then the op without it."""
    op = operator.attrgetter(found.binding.op.removeprefix("all_reduce_"))

    def pieces(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str, *others: Any) -> Any:
        return op(torch.ops.layerfuse)(summed(x, group), residual, weight, epsilon, *others)

    return pieces
