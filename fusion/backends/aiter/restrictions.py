"""Calls for which AITER's functions give wrong results, crash, or have no support: refused, each with its releases.

A restriction depends on dtypes, widths and options only, so it is asked once for each kind of call. What changes from
call to call (strides, alignment, empty tensors) is handled in the calls themselves, by a copy where it must be.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from . import calls
from .calls import Call
from .releases import NEWEST, OLDEST, ReleaseRange


@frozen
class Restriction:
    """One thing that a function of AITER's must not be asked for."""

    bindings: tuple[str, ...]
    kind: str
    "What is wrong, in a word or two: the docs and the tests sort by it."
    when: Callable[[Call], bool]
    reason: str
    since: str = OLDEST
    until: str = NEWEST

    @property
    def releases(self) -> ReleaseRange:
        """The releases it is true of."""
        return ReleaseRange(self.since, self.until)


_DUAL_QUANT = ("mla_dual_rms_norm_per_token_quant", "mla_dual_rms_norm_group_quant")
_DUAL = ("mla_dual_rms_norm", *_DUAL_QUANT)
_PLAIN = ("rms_norm", "add_rms_norm")
_QUANT = ("rms_norm_quant", "add_rms_norm_quant")
_GATED_GROUP = ("gated_rms_norm_group_quant",)
_GATED_TOKEN = ("gated_rms_norm_per_token_quant",)
_GATED = (*_GATED_GROUP, *_GATED_TOKEN)
_T_GATED = ("triton_gated_rms_norm_quant",)
_T_NORM_QUANT = ("triton_rms_norm_group_quant",)
_T_ACT = ("triton_act_mul_group_quant",)
_T_QUANT = (*_T_NORM_QUANT, *_T_ACT)
_DECODE = ("mla_decode",)
_SIZES = ("mla_metadata_info",)
_AR = ("all_reduce_rms_norm",)
_AR_QUANT = ("all_reduce_rms_norm_group_quant",)
_QR = ("qr_all_reduce_rms_norm",)

_16_BIT = "its kernel takes float16 and bfloat16 only"
_WEIGHT = "weights of another dtype than the activations: the kernel reads both as one dtype"
_ROWS = "rows that are no multiple of 16 bytes: the kernel loads 16 bytes at a time and guards nothing"
_UE8M0 = "power-of-two scales in float32: the function has none"
_FLAVOUR = "the fp8 dtype of another GPU: it writes the flavour of this one only"
_OFFSET = "a weight offset: the function knows none"
_GEMMA = "a weight offset: gemma_norm came with v0.1.17-rc0"
_GEMMA_ONE = "a weight offset other than 1, which is all that gemma_norm adds"
_GROUPS = "groups that do not divide the width: the kernel does not look"
_NO_TRANSPOSE = "column-major scales: transpose_scale is in v0.1.17-rc0, v0.1.17, and from v0.1.19.post2 on"

R = Restriction

RESTRICTIONS: tuple[Restriction, ...] = (
    # ---- norms of CK and HIP
    R((*_DUAL, *_QUANT, *_GATED), "dtype", calls.not_16_bit, _16_BIT),
    R(_PLAIN, "dtype", calls.not_16_bit, _16_BIT, until="v0.1.17"),
    R(_PLAIN, "dtype", calls.not_floating, "dtypes other than float16, bfloat16, float32", since="v0.1.17-longctx"),
    R((*_DUAL, *_PLAIN, *_QUANT, *_GATED), "weight dtype", calls.mixed, _WEIGHT),
    R((*_DUAL, *_PLAIN, *_QUANT), "rows", calls.odd_rows, _ROWS),
    R((*_DUAL, *_QUANT), "width", calls.wide, "rows of more than 8192 columns: the kernel refuses them"),
    R(
        ("rms_norm",),
        "width",
        calls.wide,
        "rows of more than 8192 columns: there rmsnorm2d_fwd calls a function of four parameters with five",
        since="v0.1.10.post1",
        until="v0.1.10.post1",
    ),
    R((*_PLAIN, *_QUANT), "offset", calls.has_offset, _GEMMA, until="v0.1.16.post6"),
    R((*_PLAIN, *_QUANT), "offset", calls.strange_offset, _GEMMA_ONE),
    R(
        ("add_rms_norm",),
        "offset",
        lambda call: calls.has_offset(call) and calls.wide(call),
        "a weight offset in rows of more than 8192 columns: gemma_norm is dropped without a word there",
        since="v0.1.17-rc0",
        until="v0.1.17",
    ),
    R(
        ("rms_norm",),
        "offset",
        lambda call: calls.has_offset(call) and (calls.wide(call) or calls.not_16_bit(call)),
        "a weight offset above 8192 columns or in float32: only the kernel for 16 bits up to 8192 has gemma_norm",
    ),
    R((*_DUAL_QUANT, *_QUANT, *_GATED), "ue8m0", calls.has_ue8m0, _UE8M0),
    R((*_DUAL_QUANT, *_QUANT, *_GATED), "fp8", calls.other_flavour, _FLAVOUR),
    R(
        _DUAL_QUANT,
        "arch",
        calls.is_rdna,
        "RDNA GPUs: the kernel is written in CDNA instructions and has no other path",
    ),
    R((_DUAL_QUANT[1], *_QUANT), "groups", calls.broken_groups, _GROUPS),
    R((_DUAL_QUANT[1], *_QUANT), "groups", calls.strange_groups, "groups of other than 32, 64 or 128 columns"),
    R(
        _QUANT,
        "groups",
        calls.in_the_hole,
        "groups in rows of 4097 to 6144 columns: a thread has 24 of them there, and no group is a multiple of 24",
    ),
    # ---- gated norms
    R(_GATED, "width", lambda call: call.head_dim not in (None, 128), "heads that are not 128 wide"),
    R(_GATED_GROUP, "groups", lambda call: call.group_size not in (None, 128), "groups of other than 128 columns"),
    R(_GATED_TOKEN, "heads", lambda call: calls.over(call.num_heads, 128), "more than 128 heads"),
    R(
        _GATED,
        "activation",
        lambda call: call.activation not in (None, "silu"),
        "a gate other than silu: it is built in",
    ),
    R(
        _T_GATED,
        "activation",
        lambda call: call.activation not in (None, "silu", "sigmoid"),
        "a gate other than silu and sigmoid: the kernel would leave it out without a word",
    ),
    R(_T_GATED, "groups", calls.broken_groups, "groups that do not divide the width"),
    R(
        _T_GATED,
        "width",
        lambda call: call.width is not None and call.width * calls.item_size(call) > 65536,
        "rows of more than 64 KiB",
    ),
    # ---- Triton
    R(("triton_rms_norm", *_T_NORM_QUANT), "offset", calls.has_offset, _OFFSET),
    R((*_T_QUANT, *_T_GATED), "fp8", calls.other_flavour, _FLAVOUR),
    R(_T_QUANT, "groups", lambda call: calls.not_a_power_of_two(call.group_size), "groups of no power of two columns"),
    R(_T_QUANT, "ue8m0", calls.has_ue8m0, _UE8M0),
    R(_T_ACT, "width", lambda call: calls.leaves_rest(call.width, 2), "an odd width, which has no two halves"),
    R(
        _T_ACT,
        "activation",
        lambda call: call.activation not in (None, "silu", "gelu", "gelu_tanh"),
        "an activation other than silu, gelu and gelu_tanh",
    ),
    R(
        ("triton_add_rms_norm_pad",),
        "residual",
        lambda call: call.has_residual is False,
        "no residual: the kernel then assumes of a stride of zero that it is positive",
    ),
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
    R(_DECODE, "fp8", calls.other_flavour, _FLAVOUR),
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
    R((*_AR_QUANT, *_QR), "dtype", calls.not_16_bit, _16_BIT),
    R((*_AR, *_AR_QUANT, *_QR), "weight dtype", calls.mixed, _WEIGHT),
    R((*_AR, *_AR_QUANT), "rows", calls.odd_rows, "rows that are no multiple of 16 bytes"),
    R(_AR, "offset", calls.has_offset, _GEMMA, since="v0.1.12", until="v0.1.16.post6"),
    R(_AR, "offset", calls.strange_offset, _GEMMA_ONE),
    R((*_AR_QUANT, *_QR), "offset", calls.has_offset, _OFFSET),
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
    R(_AR_QUANT, "fp8", calls.other_flavour, _FLAVOUR),
    R(
        _QR,
        "width",
        lambda call: call.width is not None and (call.width <= 0 or 16384 % call.width != 0),
        "rows that do not divide its tile of 32 KiB, as powers of two up to 16384 do",
    ),
)
"""The table; the first line that applies is the reason given."""


def restrictions_of(binding: str, releases: ReleaseRange) -> tuple[Restriction, ...]:
    """Those of a binding that are true of some release the build can be."""
    return tuple(r for r in RESTRICTIONS if binding in r.bindings and r.releases.overlaps(releases))


def refused_altogether(restrictions: tuple[Restriction, ...]) -> str | None:
    """Why a binding with these restrictions cannot be used for any call, or None."""
    return next((f"{r.reason} ({r.releases})" for r in restrictions if r.when is calls.always), None)
