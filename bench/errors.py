"""What can be wrong with a question to `bench`."""

from __future__ import annotations

from ..adapters.errors import LayerfuseError, UnknownNameError, did_you_mean, shown
from ..fusion.catalog import UnknownFusionError as UnknownFusionError


class BenchError(LayerfuseError, ValueError):
    """A benchmark that cannot be run as asked; the text says why and what to ask instead."""


class CannotMeasureError(LayerfuseError, RuntimeError):
    """Something that measuring needs is not here: torch, a device, any peer, a folder to write to."""


class UnknownPeerError(UnknownNameError):
    """No peer has this name. `known` holds the names that exist."""

    def __str__(self) -> str:
        return (
            f"no peer is called {shown(self.name)}{did_you_mean(self.name, self.known) or '.'} "
            f"Known: {', '.join(self.known)}."
        )
