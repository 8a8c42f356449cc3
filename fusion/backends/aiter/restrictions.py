"""Calls for which AITER's functions give wrong results, crash, or have no support: refused, each with its releases.

A restriction depends on dtypes, widths and options only, so it is asked once for each kind of call. What changes from
call to call (strides, alignment, empty tensors) is handled in the calls themselves, by a copy where it must be.
"""

from __future__ import annotations

from . import calls
from .releases import ReleaseRange
from .restriction import FLAVOUR, GEMMA, GEMMA_ONE, OFFSET, TMA, TYPE_16_BIT, UE8M0, WEIGHT
from .restriction import Restriction as R  # noqa: N817 - it stands in front of every line below
from .restrictions_norms import NORM_RESTRICTIONS
from .stages import WORLD_SIZES
from .table import calling

_DECODE = ("mla_decode",)
_SIZES = ("mla_metadata_info",)
_AR_PLAIN = calling("all_reduce.norm", "all_reduce.norm_pad")
_AR_TOKEN = calling("all_reduce.per_token")
_AR_GROUP = calling("all_reduce.per_group")
_AR_QUANT = (*_AR_TOKEN, *_AR_GROUP)
_AR = (*_AR_PLAIN, *_AR_QUANT)

_DIVIDED = "that divide among the ranks in packs of 16 bytes (the rest would be dropped)"
_RACE = "one stage is not used, since a rank may overwrite its input there while another still reads it"
_NO_TRANSPOSE = "column-major scales: transpose_scale is in v0.1.17-rc0, v0.1.17, and from v0.1.19.post2 on"

RESTRICTIONS: tuple[R, ...] = (
    *NORM_RESTRICTIONS,
    # ---- MLA
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
    ),
    R(_DECODE, "dtype", lambda call: calls.name_of(call.dtype) == "float16", "float16: it takes bfloat16 and fp8"),
    R(_DECODE, "fp8", calls.other_flavour, FLAVOUR),
    R(
        _SIZES,
        "heads",
        lambda call: calls.leaves_rest(call.num_heads, 8),
        "head counts that are no multiple of 8",
    ),
    # ---- all-reduce
    R(
        _AR,
        "world size",
        lambda call: call.world_size not in (None, *WORLD_SIZES),
        "a world size other than 2, 4 and 8: the kernels throw",
    ),
    R(_AR_PLAIN, "dtype", calls.not_floating, "dtypes other than float16, bfloat16 and float32"),
    R(_AR_QUANT, "dtype", calls.not_16_bit, f"where it quantises: {TYPE_16_BIT}"),
    R(_AR, "weight dtype", calls.mixed, WEIGHT),
    R(_AR, "rows", calls.odd_rows, "rows, or padded ones, that are no multiple of 16 bytes"),
    R((*_AR_PLAIN, *_AR_TOKEN), "offset", calls.has_offset, GEMMA, lacks="gemma_norm"),
    R((*_AR_PLAIN, *_AR_TOKEN), "offset", calls.strange_offset, GEMMA_ONE),
    R(_AR_GROUP, "offset", calls.has_offset, OFFSET),
    R(
        ("all_reduce_add_rms_norm_per_token_quant_with_norm",),
        "norm",
        calls.always,
        "it does not return the plain norm beside: emit_bf16 came with v0.1.17-longctx",
        lacks="emit_bf16",
    ),
    R(
        _AR_PLAIN,
        "width",
        calls.without_stage("v0.1.19", quantises=False),
        f"rows that two stages do not take, which are 1 to 32 KiB {_DIVIDED}; {_RACE}",
        until="v0.1.19",
    ),
    R(
        _AR_PLAIN,
        "width",
        calls.without_stage("v0.1.19.post1", quantises=False),
        f"rows that neither one stage takes, up to 16 KiB with their padding, nor two, 1 to 32 KiB {_DIVIDED}",
        since="v0.1.19.post1",
    ),
    R(
        _AR_QUANT,
        "width",
        calls.without_stage("v0.1.19", quantises=True),
        "where it quantises: rows that two stages do not take, which are up to 16 KiB, multiples of 512 bytes (what fills "
        f"no warp is left out of the norm) {_DIVIDED}; {_RACE}",
        until="v0.1.19",
    ),
    R(
        _AR_QUANT,
        "width",
        calls.without_stage("v0.1.19.post1", quantises=True),
        "where it quantises: rows of more than 16 KiB",
        since="v0.1.19.post1",
    ),
    R(_AR_GROUP, "groups", calls.broken_groups, "groups that do not divide the width"),
    R(
        _AR_GROUP,
        "groups",
        lambda call: (
            calls.not_a_power_of_two(call.group_size)
            or (call.group_size is not None and not 8 <= call.group_size <= 512)
        ),
        "groups that are not 1 to 64 packs of 16 bytes, a power of two",
    ),
    R(_AR_GROUP, "layout", calls.is_column_major, _NO_TRANSPOSE, lacks="transpose_scale"),
    R(_AR_GROUP, "layout", calls.is_tma_aligned, TMA),
    R(_AR_QUANT, "ue8m0", calls.has_ue8m0, UE8M0),
    R(_AR_QUANT, "fp8", calls.other_flavour, FLAVOUR),
)
"""The table; the first line that applies is the reason given."""


def restrictions_of(binding: str, releases: ReleaseRange, names: frozenset[str]) -> tuple[R, ...]:
    """Those of a binding that are true of some release the build can be, with the parameters that its function has."""
    return tuple(r for r in RESTRICTIONS if binding in r.bindings and r.is_of(releases, names))


def refused_altogether(restrictions: tuple[R, ...]) -> str | None:
    """Why a binding with these restrictions cannot be used for any call, or None."""
    return next((f"{r.reason} ({r.where})" for r in restrictions if r.when is calls.always), None)
