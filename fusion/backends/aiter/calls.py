"""What decides whether AITER takes a kind of call, and the questions that the table of restrictions asks about it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from attrs import frozen

from .stages import WORLD_SIZES, Kind, stages


@frozen(kw_only=True)
class Call:
    """What is known of a kind of call. None: not known, or of no meaning for the binding; nothing follows from it."""

    dtype: Any = None
    "torch dtype of the activations; of q for the decode."
    weight_dtype: Any = None
    width: int | None = None
    "Columns; of the query latent for the dual norms."
    kv_width: int | None = None
    weight_offset: float | None = None
    "Of the query latent for the dual norms."
    kv_weight_offset: float | None = None
    quant_dtype: Any = None
    group_size: int | None = None
    column_major: bool | None = None
    tma_aligned: bool | None = None
    use_ue8m0: bool | None = None
    activation: str | None = None
    norm_before_gate: bool | None = None
    limit: float | None = None
    "What a gated activation is cut at, infinity for none."
    num_heads: int | None = None
    has_plan: bool | None = None
    "Whether the decode follows a plan (AITER's persistent mode)."
    world_size: int | None = None
    padded_width: int | None = None
    fp8: Any = None
    "The fp8 dtype that AITER has chosen for this GPU: filled in when binding."
    arch: str | None = None
    "As gfx950: filled in where torch knows it."


def name_of(dtype: Any) -> str | None:
    """bfloat16, from torch.bfloat16: this module does without torch."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def is_not(dtype: Any, *allowed: str) -> bool:
    """Whether the dtype is known and none of these."""
    return dtype is not None and name_of(dtype) not in allowed


def over(value: int | None, most: int) -> bool:
    """Whether the value is known and above."""
    return value is not None and value > most


def leaves_rest(value: int | None, divisor: int | None) -> bool:
    """Whether both are known and the division does not come out even."""
    return value is not None and divisor is not None and divisor > 0 and value % divisor != 0


def not_16_bit(call: Call) -> bool:
    """Activations in another dtype than float16 and bfloat16."""
    return is_not(call.dtype, "float16", "bfloat16")


def not_floating(call: Call) -> bool:
    """Activations in another dtype than float16, bfloat16 and float32."""
    return is_not(call.dtype, "float16", "bfloat16", "float32")


def mixed(call: Call) -> bool:
    """A weight of another dtype than the activations."""
    return call.weight_dtype is not None and call.dtype is not None and call.weight_dtype != call.dtype


def item_size(call: Call) -> int:
    """Bytes of an activation: these functions take 16 and 32 bits."""
    return 4 if name_of(call.dtype) == "float32" else 2


def odd_rows(call: Call) -> bool:
    """Rows that are no multiple of 16 bytes."""
    pack = 16 // item_size(call)
    return any(leaves_rest(width, pack) for width in (call.width, call.kv_width, call.padded_width))


def wide(call: Call) -> bool:
    """Rows of more than 8192 columns."""
    return over(call.width, 8192) or over(call.kv_width, 8192)


def has_offset(call: Call) -> bool:
    """A weight offset other than 0."""
    return bool(call.weight_offset or call.kv_weight_offset)


def strange_offset(call: Call) -> bool:
    """A weight offset other than 0 and 1."""
    return call.weight_offset not in (None, 0, 1) or call.kv_weight_offset not in (None, 0, 1)


def two_offsets(call: Call) -> bool:
    """Weight offsets of the two norms that differ."""
    return None not in (call.weight_offset, call.kv_weight_offset) and call.weight_offset != call.kv_weight_offset


def has_limit(call: Call) -> bool:
    """An activation that is cut."""
    return call.limit is not None and call.limit != float("inf")


def rounded_limit(call: Call) -> bool:
    """A limit that the dtype of the activations does not hold."""
    if call.limit is None or not has_limit(call) or not call.limit > 0:
        return False
    if name_of(call.dtype) == "bfloat16":
        return bool(struct.unpack("<I", struct.pack("<f", call.limit))[0] & 0xFFFF)
    if name_of(call.dtype) == "float16":
        return bool(call.limit > 65504 or struct.unpack("<e", struct.pack("<e", call.limit))[0] != call.limit)
    return False


def has_ue8m0(call: Call) -> bool:
    """Power-of-two scales."""
    return call.use_ue8m0 is True


def other_flavour(call: Call) -> bool:
    """An fp8 dtype that is not the one of this GPU."""
    wanted = call.quant_dtype
    if wanted is None and call.dtype is not None and "float8" in str(call.dtype):
        wanted = call.dtype
    return wanted is not None and call.fp8 is not None and wanted != call.fp8


def broken_groups(call: Call) -> bool:
    """Groups that do not divide the width."""
    return leaves_rest(call.width, call.group_size)


def strange_groups(call: Call) -> bool:
    """Groups of other than 32, 64 and 128 columns."""
    return call.group_size not in (None, 32, 64, 128)


def in_the_gap(call: Call) -> bool:
    """Rows of 4097 to 6144 columns, where a thread has 24 columns and no group of a power of two is a multiple of 24."""
    return call.width is not None and 4096 < call.width <= 6144


def groups_in_the_gap(call: Call) -> bool:
    """The same, quantised in groups."""
    return call.group_size is not None and in_the_gap(call)


def is_column_major(call: Call) -> bool:
    """Column-major scales."""
    return call.column_major is True


def is_tma_aligned(call: Call) -> bool:
    """Column-major scales whose columns are padded."""
    return call.tma_aligned is True


def narrower_kv(call: Call) -> bool:
    """A kv whose next power of two does not cover q."""
    return call.width is not None and call.kv_width is not None and 1 << (call.kv_width - 1).bit_length() < call.width


def not_a_power_of_two(value: int | None) -> bool:
    """Whether the value is known and no power of two."""
    return value is not None and (value <= 0 or value & (value - 1) != 0)


def is_rdna(call: Call) -> bool:
    """An RDNA GPU."""
    return call.arch is not None and call.arch.startswith(("gfx10", "gfx11", "gfx12"))


def without_stage(release: str, *, quantises: bool) -> Callable[[Call], bool]:
    """Rows that an all-reduce takes neither in one stage nor in two. Of an unknown world size: whatever it is."""

    def when(call: Call) -> bool:
        if call.width is None or call.world_size not in (None, *WORLD_SIZES) or odd_rows(call):
            return False
        kind: Kind = "group" if quantises else "plain" if call.padded_width is None else "pad"
        size = 2 if quantises else item_size(call)
        found = stages(call.width, size, call.world_size or 2, release, kind=kind, padded_width=call.padded_width)
        return not found.most

    return when


def always(_: Call) -> bool:
    """Every call: the binding itself is refused."""
    return True
