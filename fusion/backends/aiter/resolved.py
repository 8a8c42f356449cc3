"""What a binding found, handed to the function that puts our convention over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from .releases import ReleaseRange
from .table import Binding


@frozen(kw_only=True)
class Resolved:
    """A function of AITER's, imported, with what is known of it. Everything here is asked once, when binding."""

    binding: Binding
    function: Callable[..., Any]
    names: frozenset[str]
    "The recorded parameters that it has; what else it may take has no known meaning."
    releases: ReleaseRange
    "What the build can be."

    @property
    def name(self) -> str:
        """The binding's."""
        return self.binding.name
