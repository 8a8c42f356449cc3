"""What is put into a model by code of its own, at seams of an engine, and what reports, keys and ranks ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import nn


class Placement(Protocol):
    """A chain at all layers of one kind of a model, or at none."""

    name: str
    "As it is asked for, and reported."
    why_not: str | None
    "Why it stands nowhere, as a sentence; None where it does."

    @property
    def key(self) -> str:
        """What the engine's cache has to know it by."""

    def put_in(self) -> None:
        """Let it stand there."""

    def look_again(self) -> bool:
        """Stand aside where something was put in the place of the engine's code since; whether it does from now on."""

    def calls(self) -> int:
        """How often its layers were called so far: each once in every step."""

    def plain_beyond(self) -> int | None:
        """The tokens behind which its ops are taken out of graphs again; None where they stand in all."""

    def left(self) -> str | None:
        """Why a layer has gone the engine's way, as a sentence, or None where none has."""

    def sites(self) -> tuple[str, ...]:
        """The names of its sites."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Path of a layer -> the module in which it stands; empty where it stands nowhere."""

    def notes(self, run: str) -> Iterable[str]:
        """What there is to say of a model's first call beside its sites, as sentences."""
