"""Up to how many tokens a fused all-reduce is taken, and in how many shots, as data: plans read it without torch.

Beyond that, the group's own all-reduce stays, with the fused add and norm behind it.
"""

from __future__ import annotations

WORLD_SIZES = range(2, 9)
"""The group sizes that the kernel is for: the GPUs of one host."""

WIDEST_BYTES = 32768
"""Of a row: a program holds it in registers beside its peers' (16384 columns of 16 bits)."""

ONE_SHOT_BYTES = {2: 56 << 20, 4: 272 << 10, 8: 128 << 10}
"""World size -> the largest `tokens * hidden * itemsize` of a rank that is pushed to every peer. Two and four ranks: measured on
H200s (bench/results/all_reduce_tuning-*-ranks.json); with two, one shot is ahead as far as it was tried. Eight are not measured
here: SGLang 0.5.23's figure for pushes in one shot on H200 in a CUDA graph (its CustomAllReduceV2). A size between two of
them has the figure of the larger one."""

TWO_SHOT_BYTES = {2: 0, 4: 56 << 20, 8: 0}
"""The same for two shots, as far as they were tried. With two ranks they move more than one shot, and were never ahead. With eight
they were not measured: NCCL takes over beyond one shot."""

MEASURED = (("sm90", 2), ("sm90", 4))
"""Architectures and group sizes whose figures were measured here: on H200s with NVLink between them."""

PIECE_BYTES = 16 << 20
"""Of the rows of one launch, at most: a call of more is several, so that buffers stay small."""

_GRID = 16
"""Rows: any number of them that is a multiple of this starts on 16 bytes."""


def rows_at_once(tokens: int, row_bytes: int) -> int:
    """The most rows of a launch, of calls of so many tokens."""
    piece = max(PIECE_BYTES // row_bytes // _GRID, 1) * _GRID
    return tokens if tokens <= piece else piece


def why_never(hidden: int, itemsize: int, world_size: int) -> str | None:
    """Why the kernel is never taken for rows of so many columns, or None; arguments as `shots_of` has them."""
    if world_size not in WORLD_SIZES:
        return f"the kernel is for {WORLD_SIZES[0]} to {WORLD_SIZES[-1]} GPUs of one host, not for {world_size}"
    if hidden * itemsize > WIDEST_BYTES:
        return f"a row of {hidden} columns has {hidden * itemsize} bytes, and the kernel takes rows of up to {WIDEST_BYTES}"
    return None


def shots_of(hidden: int, itemsize: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """In how many shots, and up to how many tokens, fewest first; nothing where the kernel is never taken.

    Args:
        hidden: columns of a row.
        itemsize: bytes of an element.
        world_size: ranks of the group.
    """
    if why_never(hidden, itemsize, world_size) is not None:
        return ()
    size = min(size for size in ONE_SHOT_BYTES if size >= world_size)
    most = [table[size] // (hidden * itemsize) for table in (ONE_SHOT_BYTES, TWO_SHOT_BYTES)]
    return tuple((shots, tokens) for shots, tokens in enumerate(most, 1) if tokens > max([0, *most[: shots - 1]]))


def in_words(forms: tuple[tuple[int, int], ...]) -> str:
    """`one shot to 18 tokens, two shots to 146`."""
    return ", ".join(f"{('one shot', 'two shots')[shots - 1]} to {most} tokens" for shots, most in forms)
