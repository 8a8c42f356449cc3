"""Which implementation of a fused op runs: chosen once per kind of device and kind of call, visible, forceable.

A backend adds itself with `register`, and the order of registration is the order of preference, latest first. Whether
a backend runs on a device and what it refuses is asked once for each case; after that a call is one dictionary lookup.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

from attrs import frozen

from ...adapters.errors import LayerfuseError, did_you_mean

ENVIRONMENT = "LAYERFUSE_BACKEND"
"""Environment variable that forces one backend by name for every op and device."""


class BackendError(LayerfuseError, LookupError):
    """A backend was asked for that does not exist, or that cannot run here."""


def _refuses_nothing(case: Any) -> str | None:  # noqa: ARG001 (the default of Backend.refuses)
    return None


@frozen(kw_only=True)
class Backend:
    """One implementation of one op."""

    name: str
    op: str
    load: Callable[[], Callable[..., Any]]
    "Called once, when this backend is first chosen: imports what it needs and returns the plain callable."
    runs_on: Callable[[str], tuple[bool, str]]
    "From torch's device type (cpu, cuda) to (whether it runs there, the reason in a sentence)."
    only_by_name: frozenset[str] = frozenset()
    "Device types where it is taken only when it is forced by name: a slow stand-in for the real thing."
    refuses: Callable[[Any], str | None] = _refuses_nothing
    "From the op's case (dtypes, widths and options of a call) to why it cannot take it, or None where it can."


@frozen
class Chosen:
    """A backend that was chosen: its name and its callable."""

    name: str
    function: Callable[..., Any]


_Key = tuple[str, str, Hashable]
_backends: dict[str, list[Backend]] = {}
_chosen: dict[_Key, Chosen] = {}
_loaded: dict[tuple[str, str], Chosen] = {}
_broken: dict[tuple[str, str], str] = {}
_forced: list[str] = []
"""The forced backend, or empty."""
_lock = threading.RLock()
"""Held while a backend loads, too; loading may register another one."""


def register(backend: Backend) -> None:
    """Add an implementation; it is preferred to those added before it."""
    with _lock:
        if any(other.name == backend.name for other in _backends.setdefault(backend.op, [])):
            raise BackendError(f"{backend.op} already has a backend called {backend.name!r}")
        _backends[backend.op].insert(0, backend)
        _loaded.pop((backend.op, backend.name), None)
        _broken.pop((backend.op, backend.name), None)
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


def choose(op: str, device: str, case: Hashable = None) -> Chosen:
    """The backend of this op on this kind of device for this kind of call.

    Args:
        op: the op's name without namespace.
        device: torch's device type.
        case: what of a call decides whether a backend takes it (the ops' own case types); None asks for the device
            alone.

    Raises:
        BackendError: no backend takes it, or the forced one does not; the message says why.
    """
    chosen = _chosen.get((op, device, case))
    return _decide(op, device, case) if chosen is None else chosen


def _decide(op: str, device: str, case: Hashable) -> Chosen:
    wanted = _wanted()
    refusals = []
    for backend in _backends.get(op, ()):
        if wanted in (None, backend.name):
            reason = _why_not(backend, device, case, wanted)
            if reason is None:
                with _lock:
                    reason = _load(backend)
                    if reason is None:
                        return _chosen.setdefault((op, device, case), _loaded[op, backend.name])
            refusals.append(f"{backend.name}: {reason}")
    known = ", ".join(backend.name for backend in _backends.get(op, ())) or "none"
    why = "; ".join(refusals) or f"it has no backend called {wanted!r}, which was asked for by name (it has: {known})"
    raise BackendError(f"{op} cannot run on {device}: {why}")


def _wanted() -> str | None:
    # A variable that is set to nothing, as shells do, is not set.
    return _forced[0] if _forced else os.environ.get(ENVIRONMENT) or None


def _load(backend: Backend) -> str | None:
    """Load a backend once. None when it is loaded, else why it cannot be, for good."""
    key = backend.op, backend.name
    if key not in _loaded and key not in _broken:
        try:
            _loaded[key] = Chosen(backend.name, backend.load())
        except Exception as error:  # what a backend imports may fail in any way, and another one may still run
            _broken[key] = f"it cannot be loaded: {type(error).__name__}: {error}"
    return _broken.get(key)


def _why_not(backend: Backend, device: str, case: Hashable, wanted: str | None) -> str | None:
    runs, reason = backend.runs_on(device)
    if not runs:
        return reason
    if device in backend.only_by_name and wanted != backend.name:
        return f"on {device} only when asked for by name ({ENVIRONMENT}={backend.name})"
    return None if case is None else backend.refuses(case)


def survey(op: str, device: str, case: Hashable = None) -> tuple[tuple[str, str | None], ...]:
    """Every backend of an op in order of preference: (name, why it is not taken here, or None where it could be)."""
    wanted = _wanted()
    return tuple((backend.name, _why_not(backend, device, case, wanted)) for backend in _backends.get(op, ()))


def chosen() -> dict[tuple[str, str], str]:
    """The choices made so far: (op, device kind) -> backend name; the names, where calls of two kinds differ."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for (op, device, _), choice in _chosen.items():
        names.setdefault((op, device), {})[choice.name] = None
    return {key: ", ".join(several) for key, several in names.items()}


def anywhere(device: str) -> tuple[bool, str]:
    """For a reference in plain torch."""
    return True, f"plain torch runs on {device}"
