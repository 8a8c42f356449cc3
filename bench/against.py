"""What a fused all-reduce is held against, from the times of one run: the fastest unfused way, NCCL's, and torch's one-shot alone.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable

from .result import Row

LIBRARIES = {"cuda": "nccl", "cpu": "gloo"}
"""From the kind of device to the library of torch.distributed's process group."""
ONE_SHOT, TWO_SHOT, VLLM = "torch one-shot", "torch two-shot", "vllm"
"""The other all-reduces of others, as peers' names begin."""
BEHIND, ALONE = " + ", " alone"
"""What stands behind an all-reduce's name: before what does the add and norm, and where nothing does."""


def best_unfused(row: Row) -> tuple[str, float] | None:
    """The fastest of all all-reduces with an add and norm behind, and its microseconds; None where none was right."""
    found = [(one.us, one.peer) for one in row.measured if BEHIND in one.peer and one.us is not None]
    return (min(found)[1], min(found)[0]) if found else None


def of_library(row: Row) -> float | None:
    """Microseconds of NCCL's (on a CPU gloo's) with the better add and norm behind."""
    starts = tuple(f"{name}{BEHIND}" for name in LIBRARIES.values())
    return min((one.us for one in row.measured if one.peer.startswith(starts) and one.us is not None), default=None)


def one_shot_alone(row: Row) -> float | None:
    """Microseconds of torch's one-shot all-reduce with nothing behind it."""
    return row.us(ONE_SHOT + ALONE)


def _best(row: Row) -> float | None:
    found = best_unfused(row)
    return None if found is None else found[1]


AGAINST: dict[str, Callable[[Row], float | None]] = {
    "best unfused": _best,
    "library, add and norm": of_library,
    "torch one-shot alone": one_shot_alone,
}
"""By a word: from the times of one number of tokens to those that ours is divided by."""


def ratio(row: Row, ours: str | None, against: str) -> float | None:
    """Our time divided by another; None where one of them is not there."""
    mine, theirs = None if ours is None else row.us(ours), AGAINST[against](row)
    return None if mine is None or theirs is None else mine / theirs
