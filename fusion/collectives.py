"""Up to how many tokens a fused all-reduce is taken, and in how many stages: from a kernel's layout, per backend and release.

Every rank computes this from the same numbers, so that all decide alike. Nothing here needs torch.
"""

from __future__ import annotations

from typing import Any

from .limits import TokenLimit
from .sites import Site


def limit(site: Site, target: Any, engine: Any = None) -> TokenLimit | None:
    """The range of a fused all-reduce at a site."""
    return None
