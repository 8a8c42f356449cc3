"""Up to how many tokens a fusion is taken at a site, and how."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class TokenLimit:
    """Up to how many tokens a fusion is taken at a site."""

    most: int
    "0: for no number of tokens, and `reason` says why."
    reason: str
    "Why not above that, as a sentence."
    how: str = ""
    "How it is done up to that, where that depends on the number of tokens: `one stage to 18 tokens, two stages to 146`."
    stages: tuple[int, ...] = ()
    "The same in numbers: up to how many tokens each kernel is taken, the first of them from one token on."
    unless_switched_on: str | None = None
    "Why it is off unless it is switched on by name, as a sentence; None where it is on."
