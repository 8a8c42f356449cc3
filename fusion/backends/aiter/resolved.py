"""What a binding found, handed to the function that puts our convention over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from .releases import ReleaseRange


@frozen(kw_only=True)
class Resolved:
    """A function of AITER's, imported, with what is known of it. Everything here is asked once, when binding."""

    binding: str
    function: Callable[..., Any]
    names: frozenset[str]
    "The parameters of the convention that it follows; what else it may take has no known meaning."
    releases: ReleaseRange
    "What the build can be."
    adds: bool = False
    "Whether a residual is added first."
    keeps_norm: bool = False
    "Whether the norm is returned unquantised too."
