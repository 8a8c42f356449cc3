"""Which head counts the MLA decode of a release supports natively, as a table of rules.

Other multiples of 16 are folded: the query is viewed as groups of 16 heads. Read from
`mla_decode_fwd` in `aiter/mla.py` and the head counts of its reduction (`csrc/kernels/mla/reduce.cu`), tag by tag.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from ..backends.aiter.releases import NEWEST, OLDEST, RELEASES, ReleaseRange, is_after
from .dtypes import Dtype
from .errors import UnknownReleaseError

FOLD = 16
"""Heads of the kernel that every release has, and of the groups into which other counts are folded."""

MOST_HEADS = 128
"""The widest kernel, and the widest count that is folded."""


@frozen
class Native:
    """Head counts that need no folding."""

    heads: tuple[int, ...]
    "Empty: any."
    arch: str | None
    "None: both."
    q: Dtype | None
    "None: either."
    kv: Dtype | None
    since: str = OLDEST
    until: str = NEWEST
    when: Callable[[int, int], bool] | None = None
    "From heads and queries per sequence to whether it holds; None: always."

    def takes(self, heads: int, queries: int, arch: str, q: Dtype, kv: Dtype, release: str) -> bool:
        """Whether this line holds for a call."""
        return (
            (not self.heads or heads in self.heads)
            and self.arch in (None, arch)
            and self.q in (None, q)
            and self.kv in (None, kv)
            and release in ReleaseRange(self.since, self.until)
            and (self.when is None or self.when(heads, queries))
        )


def _queries(*counts: int) -> Callable[[int, int], bool]:
    return lambda _, queries: queries in counts


MOST_QUERIES = 4
"""Queries per sequence that the kernel for 16 heads takes, folded or not, but for what `_takes_more_queries` says."""

N = Native
NATIVE: tuple[Native, ...] = (
    N((16,), None, None, None),
    # ---- fp8
    N((128,), "gfx942", "fp8", "fp8"),
    N((64, 128), "gfx950", "fp8", "fp8"),
    N((32,), "gfx950", "fp8", "fp8", until="v0.1.17", when=_queries(4)),
    N((32,), "gfx950", "fp8", "fp8", "v0.1.17-longctx", "v0.1.19.post2", lambda _, queries: queries >= 4),
    N((32,), "gfx950", "fp8", "fp8", until="v0.1.19.post2", when=_queries(2)),
    N((32,), "gfx950", "fp8", "fp8", "v0.1.17-rc0", "v0.1.19.post2", _queries(1)),
    N((32,), "gfx950", "fp8", "fp8", "v0.1.20"),
    N((64,), "gfx942", "fp8", "fp8", "v0.1.17-longctx", when=_queries(1)),
    # ---- 8 heads, for one number of queries only
    N((8,), "gfx950", "fp8", "fp8", when=_queries(4)),
    N((8,), "gfx942", "bf16", "bf16", when=_queries(2)),
    # ---- gfx950 in bf16: the kernels for 32 and 64 heads serve other counts; what limits them is the reduction
    N((), "gfx950", "bf16", "bf16"),
)
"""A count that some line takes is native."""

REDUCES = (
    (OLDEST, (8, 16, 32, 48, 64, 80, 96, 112, 128)),
    ("v0.1.20", (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)),
)
"""Head counts that the reduction of partial results supports at a value width of 512, and since when."""


def releases_named(release: str | ReleaseRange | None) -> ReleaseRange:
    """The interval of one release by its name, with or without the v; the newest for None.

    Raises:
        UnknownReleaseError: no such release.
    """
    if isinstance(release, ReleaseRange):
        return release
    if release is not None and not isinstance(release, str):
        raise UnknownReleaseError(release, RELEASES)
    name = NEWEST if release is None else release if release.startswith("v") else f"v{release}"
    if name not in RELEASES:
        raise UnknownReleaseError(name, RELEASES)
    return ReleaseRange(name, name)


def is_native(heads: int, queries: int, arch: str, q: Dtype, kv: Dtype, release: str) -> bool:
    """Whether the decode of a release takes this many heads without folding them."""
    return any(line.takes(heads, queries, arch, q, kv, release) for line in NATIVE)


def reduces(heads: int, release: str) -> bool:
    """Whether the reduction of a release supports this many heads."""
    known = [counts for since, counts in REDUCES if not is_after(since, release)]
    return heads in known[-1]


def cannot(heads: int, queries: int, arch: str, q: Dtype, kv: Dtype, release: str) -> str | None:
    """Why a release cannot decode with this many heads, padded as they are, in a clause; None where it can."""
    if is_native(heads, queries, arch, q, kv, release):
        if not reduces(heads, release):
            return f"its reduction does not support {heads} heads"
        wide = heads != FOLD
    elif heads % FOLD:
        return f"it has no kernel for {heads} heads"
    else:
        wide = False
    if queries > MOST_QUERIES and not wide and not _takes_more_queries(heads, queries, arch, q, kv, release):
        return f"its kernel for {FOLD} heads takes at most {MOST_QUERIES} queries per sequence"
    return None


def _takes_more_queries(heads: int, queries: int, arch: str, q: Dtype, kv: Dtype, release: str) -> bool:
    """gfx950 sends more than four queries to a wider kernel (`csrc/py_itfs_cu/asm_mla.cu`).

    In bf16 the kernel of 64 rows is used before v0.1.17-rc0 too, but the sizes count its tiles only from there on.
    """
    if arch != "gfx950" or q != kv:
        return False
    if q == "fp8":
        return not is_after("v0.1.17-longctx", release)
    return heads * queries >= 128 or not is_after("v0.1.17-rc0", release)
