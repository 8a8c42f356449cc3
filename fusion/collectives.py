"""Up to how many tokens a fused all-reduce is taken, and in how many stages: from a kernel's layout, per backend and release.

Every rank computes this from the same numbers, so that all decide alike. Nothing here needs torch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .chain import Limit, TokenLimit
from .engine import Engine
from .sites import Site
from .target import Target

if TYPE_CHECKING:
    from .backends.aiter.stages import Kind

ITEM_SIZE = 2
"""Bytes of an activation: plans do not know the dtype, and models that are served over several GPUs have 16 bits."""


KINDS: dict[str, Kind] = {"plain": "plain", "token": "token", "group": "group"}
"""Format of the norm -> how AITER names it. It has no kernel for others."""


def limit_of(form: str) -> Limit:
    """What `Fusion.limit` takes. `form`: a word of `formats.FORMATS`, or `plain`."""
    return partial(_limit, KINDS.get(form))


def _limit(kind: Kind | None, site: Site, target: Target, _engine: Engine | None) -> TokenLimit | None:
    ranks, width = site.reduced, site.norms[0].width
    if target.vendor == "cpu":
        return None
    after = "the plain all-reduce, then the fused add and norm"
    if target.vendor == "nvidia":
        from .backends.symm_mem.crossovers import MEASURED, in_words, shots_of, why_never

        never = why_never(width, ITEM_SIZE, ranks)
        if never is not None:
            return TokenLimit(most=0, reason=never)
        forms = shots_of(width, ITEM_SIZE, ranks)
        return TokenLimit(
            most=forms[-1][1],
            reason=f"{after}: beyond that it is not known to be faster",
            how=in_words(forms),
            stages=tuple(most for _, most in forms),
            unless_switched_on=None if (target.arch, ranks) in MEASURED else _unmeasured(target.arch, ranks),
        )
    if kind is None:
        return TokenLimit(most=0, reason="AITER's fused all-reduces have no such form")
    from .backends.aiter.releases import NEWEST
    from .backends.aiter.stages import stages

    release = target.aiter or NEWEST
    found = stages(width, ITEM_SIZE, ranks, release, kind=kind)
    if not found.most:
        return TokenLimit(most=0, reason=f"AITER {release}: {found.reason}")
    said = [(found.one_stage, "one stage"), (found.two_stage if found.two_stage > found.one_stage else 0, "two stages")]
    how = ", ".join(f"{name} to {most} tokens" for most, name in said if most)
    return TokenLimit(
        most=found.most,
        reason=f"{after}: {found.reason} (AITER {release})",
        how=how,
        stages=tuple(most for most, _ in said if most),
    )


def _unmeasured(arch: str, ranks: int) -> str:
    from .backends.symm_mem.crossovers import MEASURED

    measured = " and ".join(f"{size} GPUs of {name}" for name, size in MEASURED)
    return f"it was measured on {measured} and not on {ranks} of {arch}"
