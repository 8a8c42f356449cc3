"""Errors of AITER: it cannot be used at all, or not for this call."""

from __future__ import annotations

from ....adapters.errors import LayerfuseError
from .. import BackendError


class AiterUnavailableError(BackendError):
    """A binding was needed that this installation cannot give. `binding` is its name, `reason` the sentence."""

    def __init__(self, binding: str, reason: str) -> None:
        self.binding = binding
        self.reason = reason
        super().__init__(f"aiter, {binding}: {reason}")


class AiterCallError(LayerfuseError, ValueError):
    """A call for which the installed function gives a wrong result, or fails. `binding` is the binding's name."""

    def __init__(self, binding: str, reason: str) -> None:
        self.binding = binding
        self.reason = reason
        super().__init__(f"aiter, {binding}: {reason}")
