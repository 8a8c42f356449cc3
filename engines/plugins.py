"""What the plugins of all engines do where something goes wrong, and when the run that is looked at is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..adapters.errors import LayerfuseError
from . import process
from .host import here
from .process import troubled

if TYPE_CHECKING:
    from .compiled_module import CompiledModule


class NotHereError(LayerfuseError, RuntimeError):
    """`strict` is set, and this engine is not what this version of layerfuse knows."""


def stop_if(strict: bool) -> None:
    """Where the engine is left alone.

    Raises:
        NotHereError: strict.
    """
    if strict:
        raise NotHereError(
            f"layerfuse is strict, and leaves {here().name} {here().version()} alone: {process.this.off}"
        )


@contextmanager
def quietly(doing: str, strict: bool = False) -> Iterator[None]:
    """Whatever goes wrong meanwhile is one warning, and the engine runs on as it would without; in `strict` it is raised."""
    try:
        yield
    except Exception as error:
        if strict:
            raise
        troubled(doing, error)


def finish(compiled: CompiledModule) -> None:
    """After the run that is looked at: say what became of a plan, and in `strict` raise where that is not what it should be."""
    if process.this.off is not None:
        stop_if(compiled.strict)
        return
    with quietly("reporting", compiled.strict):
        from .reporting import publish

        publish(compiled)
