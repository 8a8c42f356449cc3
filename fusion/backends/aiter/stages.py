"""Up to how many tokens AITER's fused all-reduce runs in one stage, and up to how many in two: from its kernels' layout.

Read off `csrc/include/custom_all_reduce.cuh` and its callers, release by release. Pure numbers, without torch, so that a
plan says the same as the ranks decide, and all ranks decide alike.

In one stage every rank reads all parts of every row. In two, each sums its share of the rows for all, and reads the sums.
"""

from __future__ import annotations

import functools
from typing import Literal

from attrs import frozen

from .releases import NEWEST, OLDEST, RELEASES, ReleaseRange, is_after

Kind = Literal["plain", "pad", "token", "group"]
"""What is made of the norm: nothing, columns of zeros behind it, fp8 with one scale per token, or per group of columns."""

PACK = 16
"""Bytes that a thread loads at once."""

WORLD_SIZES = (2, 4, 8)
"""Others throw, though the plain all-reduce takes 6 too."""

_KIB, _MIB = 1024, 1024 * 1024
_THREADS = 1024
"""Of a block, each with one pack of a row."""

_ENDS_SINCE = "v0.1.19.post1"
"""From here on ranks wait for one another at the end of one stage."""


@frozen(kw_only=True)
class Stages:
    """Up to how many tokens which kernel is taken."""

    one_stage: int
    "One stage from the first token to this one; 0: never."
    two_stage: int
    "Two stages behind those, up to this one; 0: never. Above: the all-reduce by itself."
    reason: str
    "What ends the two, as a sentence without a capital."

    @property
    def most(self) -> int:
        """The most tokens for which there is a kernel."""
        return max(self.one_stage, self.two_stage)

    def of(self, tokens: int) -> int:
        """1 or 2, or 0 where no kernel is taken."""
        return 1 if tokens <= self.one_stage else 2 if tokens <= self.two_stage else 0


@functools.lru_cache(maxsize=1024)
def stages(
    width: int,
    itemsize: int,
    world_size: int,
    releases: str | ReleaseRange,
    *,
    kind: Kind = "plain",
    padded_width: int | None = None,
) -> Stages:
    """The kernels of a fused all-reduce.

    Args:
        width: columns of x, (tokens, width).
        itemsize: bytes of an element: 2, or 4 where nothing is quantised.
        world_size: ranks of the group.
        releases: one of AITER's, as `"v0.1.20"`, or what the installed build can be: then what is true of all of them.
        kind: what is made of the norm.
        padded_width: columns of the padded norm, for the kind `pad`.

    Raises:
        ValueError: no release of that name is known.
    """
    known = tuple(releases) if isinstance(releases, ReleaseRange) else (releases,)
    if known[0] not in RELEASES:
        raise ValueError(f"nothing is recorded of a release {releases!r} of AITER; give one from {OLDEST} to {NEWEST}")
    out = width if padded_width is None else padded_width
    refusal = _refused(width, out, itemsize, world_size, kind)
    if refusal is not None:
        return Stages(one_stage=0, two_stage=0, reason=refusal)
    one = min(_one_stage(width, out, itemsize, world_size, each, kind) for each in known)
    two = _two_stage(width, itemsize, world_size, kind)
    reason = one[1] if one[1] == two[1] else f"one stage: {one[1]}; two stages: {two[1]}"
    return Stages(one_stage=one[0], two_stage=two[0], reason=reason)


_Limit = tuple[int, str]
"""Tokens, and what ends there."""


def _refused(width: int, out: int, itemsize: int, world_size: int, kind: Kind) -> str | None:
    """What no release takes."""
    if world_size not in WORLD_SIZES:
        return f"the kernels take 2, 4 and 8 ranks, not {world_size}"
    if itemsize != 2 and (itemsize != 4 or kind in ("token", "group")):
        return f"elements of {itemsize} bytes: the kernels take float16 and bfloat16, and float32 unquantised"
    if width <= 0 or width * itemsize % PACK or out * itemsize % PACK:
        return f"rows of {width} elements are no whole packs of {PACK} bytes"
    return f"{out} columns are fewer than {width}" if out < width else None


def _one_stage(width: int, out: int, itemsize: int, world_size: int, release: str, kind: Kind) -> _Limit:
    if max(width, out) * itemsize // PACK > _THREADS:
        return 0, f"a row is more than {_THREADS} packs of {PACK} bytes, one for each thread"
    if is_after(_ENDS_SINCE, release):
        return 0, f"before {_ENDS_SINCE} a rank may overwrite its input while another still reads it"
    # `CudaCommunicator.fused_allreduce_rmsnorm` and its neighbours: 128 tokens of 7168 in 16 bits for all ranks.
    size = 128 * 7168 * 2 // world_size if kind in ("plain", "pad") else 128 * _KIB
    return size // (width * itemsize), f"AITER's limit of {_bytes(size)}"


def _two_stage(width: int, itemsize: int, world_size: int, kind: Kind) -> _Limit:
    size, packs = width * itemsize, width * itemsize // PACK
    if kind in ("token", "group"):
        if packs > _THREADS:
            return 0, f"a row is more than {_THREADS} packs of {PACK} bytes, one for each thread"
        if packs % 32:
            return (
                0,
                f"a row is {packs} packs of {PACK} bytes, and those that fill no warp of 32 are left out of its norm",
            )
    elif not 64 <= packs <= 2048:
        return 0, f"a row is {packs} packs of {PACK} bytes, and 64 to 2048 are taken"
    if packs % world_size:
        return 0, f"{packs} packs of {PACK} bytes do not divide among {world_size} ranks, and the rest would be dropped"
    most = 4 * _MIB if kind == "token" else 64 * _MIB - 1
    return most // size, f"AITER's limit of {_bytes(most)}"


def _bytes(size: int) -> str:
    """`128 KiB`, `under 64 MiB`, or the bytes themselves."""
    for unit, name in ((_MIB, "MiB"), (_KIB, "KiB")):
        for less, words in ((0, ""), (1, "under ")):
            if (size + less) % unit == 0:
                return f"{words}{(size + less) // unit} {name}"
    return f"{size} bytes"
