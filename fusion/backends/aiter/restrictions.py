"""Calls for which AITER's functions give wrong results, crash, or have no support: refused, each with its releases.

A restriction depends on dtypes, widths and options only, so it is asked once for each kind of call. What changes from
call to call (strides, alignment, empty tensors) is handled in the calls themselves, by a copy where it must be.
"""

from __future__ import annotations

from . import calls
from .releases import ReleaseRange
from .restriction import FLAVOUR, GEMMA, GEMMA_ONE, OFFSET, TYPE_16_BIT, WEIGHT
from .restriction import Restriction as R  # noqa: N817 - it stands in front of every line below
from .restrictions_norms import NORM_RESTRICTIONS

_DECODE = ("mla_decode",)
_SIZES = ("mla_metadata_info",)
_AR = ("all_reduce_rms_norm",)
_AR_QUANT = ("all_reduce_rms_norm_group_quant",)
_QR = ("qr_all_reduce_rms_norm",)

_NO_TRANSPOSE = "column-major scales: transpose_scale is in v0.1.17-rc0, v0.1.17, and from v0.1.19.post2 on"

RESTRICTIONS: tuple[R, ...] = (
    *NORM_RESTRICTIONS,
    # ---- MLA
    R(
        _DECODE,
        "heads",
        lambda call: call.num_heads not in (None, 16, 128),
        "head counts other than 16 and 128",
        until="v0.1.6.post1",
    ),
    R(
        _DECODE,
        "heads",
        lambda call: calls.leaves_rest(call.num_heads, 16),
        "head counts that are no multiple of 16: pad q to the next one, and the plan's count with it",
    ),
    R(
        _DECODE,
        "heads",
        lambda call: bool(call.has_plan) and calls.over(call.num_heads, 128),
        "more than 128 heads with a plan",
        since="v0.1.6.post2",
    ),
    R(
        _DECODE,
        "queries",
        lambda call: bool(call.has_plan) and call.num_heads not in (None, 16, 128) and calls.over(call.max_seqlen_q, 1),
        "several queries per sequence with a plan, where heads are folded to 16",
        since="v0.1.6.post2",
        until="v0.1.8",
    ),
    R(_DECODE, "dtype", lambda call: calls.name_of(call.dtype) == "float16", "float16: it takes bfloat16 and fp8"),
    R(_DECODE, "fp8", calls.other_flavour, FLAVOUR),
    R(
        _SIZES,
        "heads",
        lambda call: calls.leaves_rest(call.num_heads, 16),
        "head counts that are no multiple of 16",
        until="v0.1.11.post1",
    ),
    R(
        _SIZES,
        "heads",
        lambda call: calls.leaves_rest(call.num_heads, 8),
        "head counts that are no multiple of 8",
        since="v0.1.12",
    ),
    # ---- all-reduce
    R(
        (*_AR, *_AR_QUANT, *_QR),
        "world size",
        lambda call: call.world_size not in (None, 2, 4, 8),
        "a world size other than 2, 4 and 8: the fused kernels throw, or print a message and go on",
    ),
    R(_AR, "dtype", calls.not_floating, "dtypes other than float16, bfloat16 and float32"),
    R((*_AR_QUANT, *_QR), "dtype", calls.not_16_bit, TYPE_16_BIT),
    R((*_AR, *_AR_QUANT, *_QR), "weight dtype", calls.mixed, WEIGHT),
    R((*_AR, *_AR_QUANT), "rows", calls.odd_rows, "rows that are no multiple of 16 bytes"),
    R(_AR, "offset", calls.has_offset, GEMMA, since="v0.1.12", until="v0.1.16.post6"),
    R(_AR, "offset", calls.strange_offset, GEMMA_ONE),
    R((*_AR_QUANT, *_QR), "offset", calls.has_offset, OFFSET),
    R(
        _AR,
        "epsilon",
        calls.always,
        "its C++ takes epsilon for an integer, so that it becomes 0; rows that are not 1 to 32 whole KiB (2880 columns) "
        "stay unwritten",
        until="v0.1.11.post1",
    ),
    R(_AR, "width", calls.out_of_stages, "rows outside 1 to 32 KiB in two stages, or above 16 KiB in one"),
    R(_AR_QUANT, "width", lambda call: calls.over(call.width, 8192), "rows of more than 8192 columns"),
    R(_AR_QUANT, "groups", calls.broken_groups, "groups that do not divide the width"),
    R(
        _AR_QUANT,
        "groups",
        lambda call: (
            calls.not_a_power_of_two(call.group_size)
            or (call.group_size is not None and not 8 <= call.group_size <= 512)
        ),
        "groups that are not 1 to 64 packs of 16 bytes, a power of two",
    ),
    R(_AR_QUANT, "layout", lambda call: call.column_major is True, _NO_TRANSPOSE, until="v0.1.16.post6"),
    R(
        _AR_QUANT,
        "layout",
        lambda call: call.column_major is True,
        _NO_TRANSPOSE,
        since="v0.1.17-longctx",
        until="v0.1.19.post1",
    ),
    R(_AR_QUANT, "fp8", calls.other_flavour, FLAVOUR),
    R(
        _QR,
        "width",
        lambda call: call.width is not None and (call.width <= 0 or 16384 % call.width != 0),
        "rows that do not divide its tile of 32 KiB, as powers of two up to 16384 do",
    ),
)
"""The table; the first line that applies is the reason given."""


def restrictions_of(binding: str, releases: ReleaseRange) -> tuple[R, ...]:
    """Those of a binding that are true of some release the build can be."""
    return tuple(r for r in RESTRICTIONS if binding in r.bindings and r.releases.overlaps(releases))


def refused_altogether(restrictions: tuple[R, ...]) -> str | None:
    """Why a binding with these restrictions cannot be used for any call, or None."""
    return next((f"{r.reason} ({r.releases})" for r in restrictions if r.when is calls.always), None)
