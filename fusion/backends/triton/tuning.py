"""How a dual norm is launched: a small table over the number of rows, scaled to the widths.

The rows of the table were measured on an H200 with DeepSeek-V3's widths (1536 and 512), bfloat16
(benchmarks/results/dual_norm_tuning.json). Not benchmarked on AMD.
"""

from __future__ import annotations

from typing import NamedTuple

WIDEST = 65536
"""The widest row that one program holds in registers."""


class Launch(NamedTuple):
    """The launch parameters of one kernel variant."""

    q_chunk: int
    "Columns that are handled at once; a power of two."
    kv_chunk: int
    split: bool
    "Two programs per row."
    warps: int


class _Step(NamedTuple):
    up_to: float
    "Rows."
    split: bool
    warps: int


_PLAIN = (_Step(1024, True, 4), _Step(3072, False, 2), _Step(float("inf"), False, 4))
_QUANT = (
    _Step(384, True, 4),
    _Step(640, False, 4),
    _Step(6144, False, 2),
    _Step(float("inf"), False, 1),
)


def regime(rows: int, quantised: bool) -> int:
    """The step of the table for this many rows."""
    for number, step in enumerate(_QUANT if quantised else _PLAIN):
        if rows <= step.up_to:
            return number
    raise AssertionError("the last step has no end")


def launch_for(step: int, q_width: int, kv_width: int, group_size: int | None, quantised: bool, wave: int) -> Launch:
    """The launch parameters of a step of the table.

    Args:
        step: from `regime`.
        q_width: columns of q.
        kv_width: columns of kv.
        group_size: columns per scale, None without groups.
        quantised: whether q comes out in fp8.
        wave: threads of a warp: 32, or 64 on AMD's data-centre GPUs.
    """
    chosen = (_QUANT if quantised else _PLAIN)[step]
    # Wider rows take more threads, so that a thread holds about as much as it does for DeepSeek's.
    factor = _power_of_two(-(-max(q_width, kv_width) // 2048))
    warps = max(1, min(chosen.warps * factor * 32 // wave, 1024 // wave))
    least = 1 if group_size is None else group_size
    return Launch(
        q_chunk=_chunk(q_width, 512 * factor, least),
        kv_chunk=_chunk(kv_width, 512 * factor, 1),
        split=chosen.split,
        warps=warps,
    )


def _chunk(width: int, most: int, least: int) -> int:
    """The power of two that covers the width with the least idle columns, as large as possible."""
    sizes = [size for size in (most, most // 2, most // 4) if size >= least]
    if width <= sizes[-1]:
        return max(_power_of_two(width), least)
    return min(sizes, key=lambda size: (-width % size, -size))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
