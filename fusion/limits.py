"""Up to how many tokens a fusion is taken."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class TokenLimit:
    """Up to how many tokens a fusion is taken at a site."""

    most: int
    reason: str
    "A sentence."
