"""Which implementation of a fused op runs: chosen once per kind of device and kind of call, visible, forceable.

Each kernel of an op is registered with its backend (`backend.Backend`), and the order of registration is the order of preference,
latest first. Whether a backend runs on a device and what it refuses is asked once for each case; after that a call is one
dictionary lookup.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from attrs import frozen

from ...adapters.errors import cut, did_you_mean, shown
from .backend import Backend as Backend
from .backend import BackendError as BackendError

ENVIRONMENT = "LAYERFUSE_BACKEND"
"""Environment variable that forces one backend by name, on every device, for the ops that have it."""


@frozen
class Chosen:
    """A backend that was chosen, and its callable."""

    backend: Backend
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """The backend's."""
        return self.backend.name


_Key = tuple[str, str, Hashable]
_backends: dict[str, list[Backend]] = {}
_chosen: dict[_Key, Chosen] = {}
_loaded: dict[Backend, Chosen] = {}
_broken: dict[Backend, str] = {}
_forced: list[str] = []
"""The forced backend, or empty."""
_choices = [0]
"""Counts registrations and changes of `force`: what was decided before one of them is not kept."""
_lock = threading.RLock()
"""Held while a backend loads, too; loading may register another one."""
_memories: list[Memory] = []
repeatable: dict[Callable[..., Any], Callable[[], Callable[..., Any]]] = {}
"""A backend's function -> what gives one for calls that are alike in everything but where their tensors lie, if there is such a thing."""
Listener: TypeAlias = Callable[[str, tuple[Any, ...]], Callable[[Any], None] | None]
"""Told of a call, its op and its arguments, before it is made. What it gives back is told the result, if it gives anything."""
_listeners: list[Listener] = []
"""While somebody listens, no choice is remembered, so that every call comes by."""


class Memory(dict[Any, Callable[..., Any]]):
    """What was chosen for calls that are alike in everything. Empty again after each registration and change of `force`."""

    MOST = 4096
    "Entries: a server meets as many numbers of tokens."

    def __init__(self) -> None:
        super().__init__()
        with _lock:
            _memories.append(self)

    def choose(
        self,
        key: Hashable,
        op: str,
        case: Hashable,
        given: tuple[Any, ...],
        later: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """The function for a call with these arguments, from now on under this key; `later`: what calls after this one go to in its place."""
        before = _choices[0]
        function = choose(op, given[0].device.type, case).function
        with _lock:
            heard = [listener(op, given) for listener in _listeners]
        self.keep(key, function if later is None else later, before)
        told = [tell for tell in heard if tell is not None]
        return _telling(function, told) if told else function

    def keep(self, key: Hashable, function: Callable[..., Any], chosen_at: int) -> None:
        """Remember a choice, unless it may be another one by now, or somebody listens."""
        with _lock:
            if chosen_at == _choices[0] and not _listeners:
                if len(self) >= self.MOST:
                    self.clear()
                self[key] = function


def _telling(function: Callable[..., Any], told: list[Callable[[Any], None]]) -> Callable[..., Any]:
    """The same function, for one call whose result somebody waits for."""

    def call(*given: Any) -> Any:
        result = function(*given)
        for tell in told:
            tell(result)
        return result

    return call


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Be told of every call of every op in this process while this lasts: its name and its arguments. Calls are slower meanwhile, not after."""
    with _lock:
        _listeners.append(listener)
        for memory in _memories:
            memory.clear()
    try:
        yield
    finally:
        with _lock:
            _listeners[:] = [other for other in _listeners if other is not listener]


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of every op in this process while this lasts, by the op's name."""
    counter: Counter[str] = Counter()
    with listening(lambda op, given: counter.update((op,))):  # noqa: ARG005 (what was given counts for nothing)
        yield counter


def choices() -> int:
    """A number that grows whenever what was chosen may be chosen otherwise: for `Memory.keep`."""
    return _choices[0]


def _changed() -> None:
    _choices[0] += 1
    _chosen.clear()
    for memory in _memories:
        memory.clear()


def register(backend: Backend) -> None:
    """Add an implementation; it is preferred to those added before it."""
    with _lock:
        if backend.name in names(backend.op.name):
            raise BackendError(f"{backend.op.name} already has a backend called {backend.name!r}")
        _backends.setdefault(backend.op.name, []).insert(0, backend)
        _changed()


def names(op: str) -> tuple[str, ...]:
    """The backends of an op, in order of preference; asks none of them anything."""
    return tuple(backend.name for backend in _backends.get(op, ()))


def _known() -> list[str]:
    return sorted({backend.name for several in _backends.values() for backend in several})


def force(name: str | None) -> None:
    """Use this backend from now on, on every device, for the ops that have it; None: the automatic choice again.

    Raises:
        BackendError: no op has a backend of this name.
    """
    known = _known()
    if name is not None and (not isinstance(name, str) or name not in known):
        raise BackendError(
            f"no backend is called {shown(name)}{did_you_mean(name, known) or '.'} Known: {', '.join(known)}."
        )
    with _lock:
        _forced[:] = [] if name is None else [name]
        _changed()


def decide_again() -> None:
    """Choose anew at the next call of each kind: what a backend refuses has changed."""
    with _lock:
        _changed()


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
    while True:
        before, wanted = _choices[0], wanted_for(op)
        refusals = []
        for backend in _backends.get(op, ()):
            if wanted not in (None, backend.name):
                continue
            # Asked without the lock: a question may import AITER, which takes minutes.
            reason = _why_not(backend, device, case, wanted)
            if reason is None:
                with _lock:
                    reason = _load(backend)
                    if reason is None and before == _choices[0]:
                        return _chosen.setdefault((op, device, case), _for(backend, case))
            if reason is None:
                break  # another thread has forced or registered a backend meanwhile
            refusals.append(f"{backend.name}: {reason}")
        else:
            raise BackendError(f"{op} cannot run on {device}: {'; '.join(refusals) or 'it has no backend'}")


def forced() -> str | None:
    """The name of the backend that is forced, by `force` or by the environment, or None."""
    # A variable that is set to nothing, as shells do, is not set.
    return _forced[0] if _forced else os.environ.get(ENVIRONMENT) or None


def wanted_for(op: str) -> str | None:
    """The backend that is forced for this op; None where none is, or where the op has no backend of that name.

    Raises:
        BackendError: no op at all has a backend of the forced name.
    """
    wanted = forced()
    if wanted is None or wanted in names(op):
        return wanted
    check_forced()
    return None


def check_forced(declared: Iterable[str] = ()) -> None:
    """Check that some op has the backend that is forced.

    Args:
        declared: further names, for a process without torch, in which no op is registered.

    Raises:
        BackendError: none has; the message names those that there are.
    """
    wanted, known = forced(), sorted({*_known(), *declared})
    if wanted is not None and wanted not in known:
        raise BackendError(
            f"{ENVIRONMENT}={cut(wanted)}: no op has a backend called {shown(wanted)}{did_you_mean(wanted, known) or '.'} "
            f"Known: {', '.join(known)}."
        )


def check_declared() -> None:
    """As `check_forced`, by what is declared: it needs no torch, without which no op is registered.

    Raises:
        BackendError: no op has the backend that is forced.
    """
    from ..catalog import FUSIONS
    from ..declare import BACKENDS, REFERENCE
    from .backend import installed

    declared = {REFERENCE, *BACKENDS, *(kernel.backend for fusion in FUSIONS.values() for kernel in fusion.backends)}
    if forced() not in (None, *declared):  # packages' code is imported where it may matter
        declared.update(name for name, found in installed().items() if isinstance(found, type))
        check_forced(declared)


def _load(backend: Backend) -> str | None:
    """Load a backend once. None when it is loaded, else why it cannot be, for good."""
    if backend not in _loaded and backend not in _broken:
        try:
            _loaded[backend] = Chosen(backend, backend.load())
        except Exception as error:  # what a backend imports may fail in any way, and another one may still run
            _broken[backend] = f"it cannot be loaded: {type(error).__name__}: {error}"
    return _broken.get(backend)


def _for(backend: Backend, case: Hashable) -> Chosen:
    """A loaded backend's choice for a case."""
    function = None if case is None else backend.load_for(case)
    return _loaded[backend] if function is None else Chosen(backend, function)


def _why_not(backend: Backend, device: str, case: Hashable, wanted: str | None) -> str | None:
    runs, reason = backend.runs_on(device)
    if not runs:
        return reason
    if device in backend.only_by_name and wanted != backend.name:
        return f"on {device} only when asked for by name ({ENVIRONMENT}={backend.name})"
    return None if case is None else backend.refuses(case)


def survey(op: str, device: str, case: Hashable = None) -> tuple[tuple[str, str | None], ...]:
    """Every backend of an op in order of preference: (name, why it is not taken here, or None where it could be)."""
    wanted = wanted_for(op)
    return tuple((backend.name, _why_not(backend, device, case, wanted)) for backend in _backends.get(op, ()))


def prepare(op: str, device: Any, case: Hashable) -> tuple[str, str | None]:
    """Set up what takes a case on a device: its name, and why it could not be set up, or None where it is.

    Args:
        op: the op's name without namespace.
        device: a torch.device.
        case: the op's own case type.

    Raises:
        BackendError: as `choose`.
    """
    backend = choose(op, device.type, case).backend
    return backend.name, backend.prepare(case, device)


def steps(op: str, device: str, case: Hashable) -> tuple[int, ...]:
    """The numbers of tokens above which what takes a case is launched in another way.

    Raises:
        BackendError: as `choose`.
    """
    return choose(op, device, case).backend.steps(case)


def decision(op: str, device: str, case: Hashable) -> str:
    """Which backend takes a case, and how, line by line: what the ranks of a process group compare.

    Raises:
        BackendError: as `choose`.
    """
    backend = choose(op, device, case).backend
    return "\n".join(filter(None, [f"backend {backend.name}", str(case), backend.settings(case)]))


def chosen() -> dict[tuple[str, str], str]:
    """The choices made so far: (op, device kind) -> backend name; the names, where calls of two kinds differ."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for (op, device, _), choice in _chosen.items():
        names.setdefault((op, device), {})[choice.name] = None
    return {key: ", ".join(several) for key, several in names.items()}
