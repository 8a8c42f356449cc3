"""What is refused of AITER's norms and gated activations."""

from __future__ import annotations

from . import calls
from .restriction import FLAVOUR, GEMMA, GEMMA_ONE, OFFSET, TMA, TYPE_16_BIT, UE8M0, WEIGHT
from .restriction import Restriction as R  # noqa: N817 - it stands in front of every line below
from .table import BY_NAME, calling


def _per(per: str, *makers: str) -> tuple[str, ...]:
    """Those bindings that quantise so."""
    return tuple(name for name in calling(*makers) if BY_NAME[name].per == per)


_PLAIN = calling("norms.add_rms_norm")
_HIP_MX = _per("none", "norm_quant.hip")
_HIP = tuple(name for name in calling("norm_quant.hip") if name not in _HIP_MX)
_DUAL = calling("norms.dual_rms_norm")
_LATENTS = calling("norm_quant.latents")
"""What calls the kernels of the latents, for one norm or two."""
_TWO_QUANT = tuple(name for name in _LATENTS if BY_NAME[name].is_dual)
_LATENT_GROUPS = _per("group", "norm_quant.latents")
_GATED_GROUP, _GATED_TOKEN = calling("gated.hip_group"), calling("gated.hip_per_token")
_GATED = (*_GATED_TOKEN, *_GATED_GROUP)
_SILU = calling("silu_mul.hip_group")
_ALL_HIP = (*_PLAIN, *_HIP, *_HIP_MX, *_DUAL, *_LATENTS, *_GATED)
_FP8_HIP = (*_HIP, *_LATENTS, *_GATED, *_SILU)

_T_PLAIN = calling("norms.triton_add_rms_norm", "norms.triton_add_rms_norm_pad")
_T_NORM = calling("norm_quant.triton", "norm_quant.triton_static")
_T_TWO_STATIC = tuple(name for name in _T_NORM if BY_NAME[name].is_dual and BY_NAME[name].per == "static")
_T_MXFP8, _T_MXFP4 = calling("norm_quant.triton_mxfp8"), calling("norm_quant.triton_mxfp4")
_T_GATED = calling("gated.triton_group")
_T_STATIC_SILU = calling("silu_mul.triton_static")
_T_ACT = calling("silu_mul.triton")
_T_CLAMP = calling("silu_mul.clamp")
_T_SILU = (*_T_STATIC_SILU, *_T_CLAMP, *_T_ACT)

_ROWS = "rows that are no multiple of 16 bytes: the kernel loads 16 bytes at a time and guards nothing"
_WIDE = "rows of more than 8192 columns: the kernel refuses them"
_BROKEN = "groups that do not divide the width"
_GAP = "groups in rows of 4097 to 6144 columns: a thread has 24 of them there, and no group is a multiple of 24"
_BLOCKS = "a width that is no multiple of 32, the columns of a scale"
_LIMIT = "a limit: the function has none"
_ROW_MAJOR = "column-major scales: the function writes them row by row"

NORM_RESTRICTIONS: tuple[R, ...] = (
    # ---- CK and HIP
    R(tuple(name for name in (*_ALL_HIP, *_SILU) if name not in _PLAIN), "dtype", calls.not_16_bit, TYPE_16_BIT),
    R(_PLAIN, "dtype", calls.not_16_bit, TYPE_16_BIT, until="v0.1.17"),
    R(_PLAIN, "dtype", calls.not_floating, "dtypes other than float16, bfloat16, float32", since="v0.1.17-longctx"),
    R(_ALL_HIP, "weight dtype", calls.mixed, WEIGHT),
    R((*_PLAIN, *_HIP, *_DUAL, *_LATENTS), "rows", calls.odd_rows, _ROWS),
    R((*_HIP, *_HIP_MX, *_DUAL, *_LATENTS, *_SILU), "width", calls.wide, _WIDE),
    R((*_PLAIN, *_HIP), "offset", calls.has_offset, GEMMA, lacks="gemma_norm"),
    R(_TWO_QUANT, "offset", calls.two_offsets, "two weight offsets that differ: gemma_norm is of both norms"),
    R((*_PLAIN, *_HIP, *_HIP_MX, *_LATENTS), "offset", calls.strange_offset, GEMMA_ONE),
    R(
        ("add_rms_norm",),
        "offset",
        lambda call: calls.has_offset(call) and calls.wide(call),
        "a weight offset in rows of more than 8192 columns: gemma_norm is dropped without a word there",
        until="v0.1.17",
    ),
    R((*_DUAL, *_GATED), "offset", calls.has_offset, OFFSET),
    R(
        _LATENTS,
        "arch",
        calls.is_rdna,
        "RDNA GPUs: the kernel is written in CDNA instructions and has no other path",
    ),
    R((*_HIP, *_LATENT_GROUPS, *_SILU), "groups", calls.broken_groups, f"{_BROKEN}: the kernel does not look"),
    R(
        (*_HIP, *_LATENT_GROUPS, *_SILU),
        "groups",
        calls.strange_groups,
        "groups of other than 32, 64 or 128 columns",
    ),
    R(_HIP, "groups", calls.groups_in_the_gap, _GAP),
    R(_HIP_MX, "groups", calls.in_the_gap, f"blocks with an exponent in such rows: {_GAP}"),
    R(_SILU, "groups", calls.groups_in_the_gap, f"{_GAP}; the kernel does not look, and reduces over other columns"),
    # ---- gated norms
    R(_GATED, "width", lambda call: call.width not in (None, 128), "heads that are not 128 wide"),
    R(_GATED_GROUP, "groups", lambda call: call.group_size not in (None, 128), "groups of other than 128 columns"),
    R(_GATED_TOKEN, "heads", lambda call: calls.over(call.num_heads, 128), "more than 128 heads"),
    R(
        _GATED,
        "activation",
        lambda call: call.activation not in (None, "silu"),
        "a gate other than silu: it is built in",
    ),
    R(
        _GATED,
        "order",
        lambda call: call.norm_before_gate is False,
        "a gate before the norm: it is built in behind it",
    ),
    R(
        _T_GATED,
        "activation",
        lambda call: call.activation not in (None, "silu", "sigmoid"),
        "a gate other than silu and sigmoid: the kernel would leave it out without a word",
    ),
    R(_T_GATED, "groups", calls.broken_groups, _BROKEN),
    R(
        _T_GATED,
        "width",
        lambda call: call.width is not None and call.width * calls.item_size(call) > 65536,
        "rows of more than 64 KiB",
    ),
    # ---- quantisation
    R((*_FP8_HIP, *_T_NORM, *_T_SILU), "ue8m0", calls.has_ue8m0, UE8M0),
    R((*_FP8_HIP, *_T_NORM, *_T_GATED, *_T_SILU), "layout", calls.is_tma_aligned, TMA),
    R((*_T_GATED, *_T_ACT), "layout", calls.is_column_major, _ROW_MAJOR),
    R((*_FP8_HIP, *_T_NORM, *_T_GATED, *_T_SILU), "fp8", calls.other_flavour, FLAVOUR),
    R(
        (*_HIP_MX, *_T_MXFP8),
        "fp8",
        lambda call: calls.is_not(call.fp8, "float8_e4m3fn"),
        "a GPU whose fp8 is not e4m3fn, the format of MXFP8",
    ),
    R(
        _HIP_MX,
        "bytes",
        calls.always,
        "it writes no bytes for scales, and floats into a buffer of bytes",
        until="v0.1.17",
    ),
    R((*_HIP_MX, *_T_MXFP8, *_T_MXFP4), "width", lambda call: calls.leaves_rest(call.width, 32), _BLOCKS),
    # ---- Triton
    R(
        (*_T_PLAIN, *_T_NORM, *_T_MXFP8, *_T_MXFP4, *_T_GATED, *_T_SILU),
        "dtype",
        calls.not_floating,
        "dtypes other than float16, bfloat16 and float32: it computes in float32",
    ),
    R((*_T_PLAIN, *_T_NORM, *_T_MXFP8, *_T_MXFP4, *_T_GATED), "offset", calls.has_offset, OFFSET),
    R(
        (*_T_NORM, *_T_SILU),
        "groups",
        lambda call: calls.not_a_power_of_two(call.group_size),
        "groups of no power of two columns",
    ),
    R(
        _T_TWO_STATIC,
        "width",
        calls.narrower_kv,
        "a kv whose next power of two does not cover q: the block is chosen by kv alone, and columns of q are left out",
    ),
    # ---- gated activations
    R((*_T_STATIC_SILU, *_T_ACT), "limit", calls.has_limit, _LIMIT),
    R(
        (*_SILU, *_T_CLAMP),
        "limit",
        lambda call: call.limit is not None and not call.limit > 0,
        "a limit that is not above 0, which means none to AITER",
    ),
    R(
        _SILU,
        "limit",
        calls.rounded_limit,
        "a limit that the dtype of the activations does not hold: the kernel cuts the gate at the limit rounded to it",
    ),
    R(
        _T_ACT,
        "groups",
        lambda call: calls.broken_groups(call) or (call.group_size is None and calls.not_a_power_of_two(call.width)),
        "groups that do not divide the width, the whole row among them: columns that were never loaded count for their scale",
    ),
    R(_T_CLAMP, "width", lambda call: calls.leaves_rest(call.width, 128), "a width that is no multiple of 128"),
)
