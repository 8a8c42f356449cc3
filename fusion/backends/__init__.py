"""Which implementation of a fused op runs: chosen once per kind of device and kind of call, visible, forceable.

A backend adds itself with `register`, and the order of registration is the order of preference, latest first. Whether
a backend runs on a device and what it refuses is asked once for each case; after that a call is one dictionary lookup.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from attrs import frozen

from ...adapters.errors import LayerfuseError, cut, did_you_mean, shown
from ..declare import REFERENCE, Kernel, Op

ENVIRONMENT = "LAYERFUSE_BACKEND"
"""Environment variable that forces one backend by name, on every device, for the ops that have it."""


class BackendError(LayerfuseError, LookupError):
    """A backend was asked for that does not exist, or that cannot run here."""


def _refuses_nothing(case: Any) -> str | None:  # noqa: ARG001 (the default of Backend.refuses)
    return None


def _no_steps(case: Any) -> tuple[int, ...]:  # noqa: ARG001 (the default of Backend.steps)
    return ()


def _no_settings(case: Any) -> str:  # noqa: ARG001 (the default of Backend.settings)
    return ""


def _needs_nothing(case: Any, device: Any) -> str | None:  # noqa: ARG001 (the default of Backend.prepare)
    return None


@frozen(kw_only=True)
class Backend:
    """One implementation of one op."""

    name: str
    op: str
    load: Callable[[], Callable[..., Any]]
    "Called once, when this backend is first chosen: imports what it needs and returns the plain callable."
    load_for: Callable[[Any], Callable[..., Any]] | None = None
    "Where functions differ by case: from a case that is not refused to its function. Asked once for each case."
    runs_on: Callable[[str], tuple[bool, str]]
    "From torch's device type (cpu, cuda) to (whether it runs there, the reason in a sentence)."
    only_by_name: frozenset[str] = frozenset()
    "Device types where it is taken only when it is forced by name, because it is slow there."
    refuses: Callable[[Any], str | None] = _refuses_nothing
    "From the op's case (dtypes, widths and options of a call) to why it cannot take it, or None where it can."
    prepare: Callable[[Any, Any], str | None] = _needs_nothing
    """From a case and a device to why it could not be set up, or None where it is: for an op of several ranks, which make this
    call together before the first one."""
    steps: Callable[[Any], tuple[int, ...]] = _no_steps
    "From a case to the numbers of tokens above which it is launched in another way: what a warm-up has to touch."
    settings: Callable[[Any], str] = _no_settings
    "From a case to what else decides how it runs, line by line: for an op of several ranks they must be alike on all."


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

    def choose(self, key: Hashable, op: str, case: Hashable, given: tuple[Any, ...]) -> Callable[..., Any]:
        """The function for a call with these arguments, from now on under this key."""
        before = _choices[0]
        function = choose(op, given[0].device.type, case).function
        with _lock:
            heard = [listener(op, given) for listener in _listeners]
        self.keep(key, function, before)
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
        if any(other.name == backend.name for other in _backends.setdefault(backend.op, [])):
            raise BackendError(f"{backend.op} already has a backend called {backend.name!r}")
        _backends[backend.op].insert(0, backend)
        _loaded.pop((backend.op, backend.name), None)
        _broken.pop((backend.op, backend.name), None)
        _changed()


def force(name: str | None) -> None:
    """Use this backend from now on, on every device, for the ops that have it; None: the automatic choice again.

    Raises:
        BackendError: no op has a backend of this name.
    """
    known = sorted({backend.name for several in _backends.values() for backend in several})
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
    if wanted is None or any(backend.name == wanted for backend in _backends.get(op, ())):
        return wanted
    known = sorted({backend.name for several in _backends.values() for backend in several})
    if wanted not in known:
        raise BackendError(
            f"{ENVIRONMENT}={cut(wanted)}: no op has a backend called {shown(wanted)}{did_you_mean(wanted, known) or '.'} "
            f"Known: {', '.join(known)}."
        )
    return None


def _load(backend: Backend) -> str | None:
    """Load a backend once. None when it is loaded, else why it cannot be, for good."""
    key = backend.op, backend.name
    if key not in _loaded and key not in _broken:
        try:
            _loaded[key] = Chosen(backend.name, backend.load())
        except Exception as error:  # what a backend imports may fail in any way, and another one may still run
            _broken[key] = f"it cannot be loaded: {type(error).__name__}: {error}"
    return _broken.get(key)


def _for(backend: Backend, case: Hashable) -> Chosen:
    """A loaded backend's choice for a case."""
    if case is None or backend.load_for is None:
        return _loaded[backend.op, backend.name]
    return Chosen(backend.name, backend.load_for(case))


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
    name = choose(op, device.type, case).name
    return name, next(backend.prepare(case, device) for backend in _backends[op] if backend.name == name)


def steps(op: str, device: str, case: Hashable) -> tuple[int, ...]:
    """The numbers of tokens above which what takes a case is launched in another way.

    Raises:
        BackendError: as `choose`.
    """
    name = choose(op, device, case).name
    return next(backend.steps(case) for backend in _backends[op] if backend.name == name)


def decision(op: str, device: str, case: Hashable) -> str:
    """Which backend takes a case, and how, line by line: what the ranks of a process group compare.

    Raises:
        BackendError: as `choose`.
    """
    name = choose(op, device, case).name
    settings = next(backend.settings(case) for backend in _backends[op] if backend.name == name)
    return "\n".join(filter(None, [f"backend {name}", str(case), settings]))


def chosen() -> dict[tuple[str, str], str]:
    """The choices made so far: (op, device kind) -> backend name; the names, where calls of two kinds differ."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for (op, device, _), choice in _chosen.items():
        names.setdefault((op, device), {})[choice.name] = None
    return {key: ", ".join(several) for key, several in names.items()}


def anywhere(device: str) -> tuple[bool, str]:
    """For a reference in plain torch."""
    return True, f"plain torch runs on {device}"


# ---- from declarations -----------------------------------------------------------------------------------------------


def reference(op: str, function: Callable[..., Any]) -> Backend:
    """An op's reference, which runs anywhere."""
    return Backend(name=REFERENCE, op=op, load=lambda: function, runs_on=anywhere)


def backend_of(op: Op, kernel: Kernel) -> Backend:
    """A declared kernel as a backend, with the rules of its kind: Triton's, AITER's, or none."""
    if kernel.backend == "aiter":
        from .aiter.backend import backend

        return backend(op.name)
    if kernel.backend == "triton":
        from .triton import backend as triton_backend

        return triton_backend(op, kernel)
    if kernel.backend == "symm_mem":
        from .symm_mem.backend import backend as symm_mem_backend

        return symm_mem_backend(op, kernel)
    return Backend(
        name=kernel.backend,
        op=op.name,
        load=functools.partial(loaded, op, kernel),
        runs_on=anywhere,
        refuses=refusal_of(kernel),
    )


def refusal_of(kernel: Kernel) -> Callable[[Any], str | None]:
    """What a kernel itself refuses; by default nothing."""
    if kernel.refuses is None:
        return _refuses_nothing
    path = kernel.refuses

    def refuses(case: Any) -> str | None:
        said: str | None = imported(path)(case)
        return said

    return refuses


def loaded(op: Op, kernel: Kernel) -> Callable[..., Any]:
    """A kernel's function for an op."""
    if kernel.function:
        return imported(kernel.function)
    function: Callable[..., Any] = imported(kernel.made_by)(op)
    return function


def imported(path: str) -> Callable[..., Any]:
    """The function at `module:function`."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
