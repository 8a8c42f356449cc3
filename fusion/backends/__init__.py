"""Which implementation of a fused op runs on a device: chosen once per process and device kind, visible, forceable.

Only the reference exists so far. A backend adds itself with `register`, and the order of registration is the order of
preference, latest first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from attrs import frozen

from ...adapters.errors import LayerfuseError, did_you_mean

ENVIRONMENT = "LAYERFUSE_BACKEND"
"""Environment variable that forces one backend by name for every op and device."""


class BackendError(LayerfuseError, LookupError):
    """A backend was asked for that does not exist, or that cannot run here."""


@frozen(kw_only=True)
class Backend:
    """One implementation of one op."""

    name: str
    op: str
    function: Callable[..., Any]
    runs_on: Callable[[str], tuple[bool, str]]
    "From torch's device type (cpu, cuda) to (whether it runs there, the reason in a sentence)."


_backends: dict[str, list[Backend]] = {}
_chosen: dict[tuple[str, str], Backend] = {}
_forced: list[str] = []
"""The forced backend, or empty."""
_lock = threading.Lock()


def register(backend: Backend) -> None:
    """Add an implementation; it is preferred to those added before it."""
    with _lock:
        if any(other.name == backend.name for other in _backends.setdefault(backend.op, [])):
            raise BackendError(f"{backend.op} already has a backend called {backend.name!r}")
        _backends[backend.op].insert(0, backend)
        _chosen.clear()


def force(name: str | None) -> None:
    """Use this backend for every op and device from now on; None goes back to the automatic choice.

    Raises:
        BackendError: no op has a backend of this name.
    """
    known = sorted({backend.name for several in _backends.values() for backend in several})
    if name is not None and name not in known:
        raise BackendError(
            f"no backend is called {name!r}{did_you_mean(name, known) or '.'} Known: {', '.join(known)}."
        )
    with _lock:
        _forced[:] = [] if name is None else [name]
        _chosen.clear()


def choose(op: str, device: str) -> Backend:
    """The backend of this op on this kind of device.

    Raises:
        BackendError: the forced backend does not run there; the message says why.
    """
    chosen = _chosen.get((op, device))
    return _decide(op, device) if chosen is None else chosen


def _decide(op: str, device: str) -> Backend:
    wanted = _forced[0] if _forced else os.environ.get(ENVIRONMENT)
    if wanted == "":  # set to nothing, as shells do, is not set
        wanted = None
    refusals = []
    for backend in _backends.get(op, ()):
        if wanted in (None, backend.name):
            runs, reason = backend.runs_on(device)
            if runs:
                with _lock:
                    return _chosen.setdefault((op, device), backend)
            refusals.append(f"{backend.name}: {reason}")
    known = ", ".join(backend.name for backend in _backends.get(op, ())) or "none"
    why = "; ".join(refusals) or f"no backend is called {wanted!r} (known: {known})"
    raise BackendError(f"{op} cannot run on {device}: {why}")


def chosen() -> dict[tuple[str, str], str]:
    """The choices made so far: (op, device kind) -> backend name."""
    return {key: backend.name for key, backend in _chosen.items()}


def anywhere(device: str) -> tuple[bool, str]:
    """For a reference in plain torch."""
    return True, f"plain torch runs on {device}"
