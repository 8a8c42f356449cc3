"""What can go wrong between a spec and its buffers: refused heads, a group of unequal layers, buffers that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.errors import LayerfuseError


class HeadsRefusedError(LayerfuseError, ValueError):
    """No kernel of the release takes this layer. `layer` and `reason` are sentences' parts, `release` a name."""

    def __init__(self, layer: str, release: str, reason: str) -> None:
        self.layer = layer
        self.release = release
        self.reason = reason
        super().__init__(layer, release, reason)

    def __str__(self) -> str:
        return f"{self.layer}, AITER {self.release}: {self.reason}"


class HeadCountError(LayerfuseError, ValueError):
    """A tensor that is not of the head count that was planned for."""

    def __init__(self, what: str, expected: int, found: Sequence[int]) -> None:
        self.what = what
        self.expected = expected
        self.found = tuple(found)
        super().__init__(what, expected, self.found)

    def __str__(self) -> str:
        return f"{self.what}: expected (tokens, {self.expected}, ...) as planned, got {self.found}"
