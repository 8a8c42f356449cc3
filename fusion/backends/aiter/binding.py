"""From a binding's name to a callable with our convention, once: look at the source, import, check, wrap.

After that a call looks nothing up: no import, no `hasattr`, no `try`. Before it, nothing of AITER is imported.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from ....adapters.errors import did_you_mean
from .. import BackendError
from . import detect, source
from .calls import Call
from .errors import AiterCallError, AiterUnavailableError
from .matching import Match, match
from .releases import ReleaseRange
from .restriction import Restriction
from .restrictions import refused_altogether, restrictions_of
from .table import BINDINGS, BY_NAME, Binding, Resolved


@frozen(kw_only=True)
class Probed:
    """What the installed source says of a binding: nothing has been imported."""

    binding: Binding
    main: Match
    releases: ReleaseRange

    @property
    def convention(self) -> str:
        """What was found, as a sentence."""
        return str(self.main)

    @property
    def summary(self) -> str:
        """The same in short."""
        return self.main.summary

    @property
    def recorded(self) -> bool:
        """Whether this is what was read off a release: the recorded parameters, in a build that looks like one."""
        return not self.releases.contradictory and self.main.recorded


@frozen(kw_only=True)
class Refused:
    """A binding that cannot be used here."""

    name: str
    reason: str
    "One sentence."


@frozen(kw_only=True)
class Bound:
    """A binding that is ready: calling it calls `call`."""

    name: str
    call: Callable[..., Any]
    "The plain callable with our convention; what AITER must not be asked for is for `refuses` to say, beforehand."
    probed: Probed
    restrictions: tuple[Restriction, ...]
    "Those true of some release that the build can be."
    fp8: Any
    "The fp8 dtype that AITER has chosen for this GPU, or None where it does not say."

    @property
    def convention(self) -> str:
        """The function and the parameters that were found, as a sentence."""
        return self.probed.convention

    @property
    def path(self) -> str:
        """`module:function` of AITER's."""
        return self.probed.main.function.path

    def refuses(self, call: Call) -> str | None:
        """Why this kind of call must not be made, or None where it can be."""
        asked = evolve(call, fp8=self.fp8) if call.fp8 is None else call
        return next((f"{r.reason} ({r.where})" for r in self.restrictions if r.when(asked)), None)

    def check(self, call: Call) -> None:
        """Raise what `refuses` says.

        Raises:
            AiterCallError: this kind of call must not be made.
        """
        reason = self.refuses(call)
        if reason is not None:
            raise AiterCallError(self.name, reason)


_lock = threading.RLock()


def probe(name: str) -> Probed | Refused:
    """What the installed source says of a binding. Reads files only, once.

    Raises:
        BackendError: no binding has this name.
    """
    if name not in BY_NAME:
        raise BackendError(f"no AITER binding is called {name!r}{did_you_mean(name, BY_NAME)}")
    with _lock:
        return _probe(name)


def bind(name: str) -> Bound | Refused:
    """The binding, ready to be called, or why not. Imports AITER the first time, which may build C++ code for minutes.

    Raises:
        BackendError: no binding has this name.
    """
    found = probe(name)
    if isinstance(found, Refused):
        return found
    with _lock:
        return _bind(name)


def bound(name: str) -> Bound:
    """The same, for callers that need it.

    Raises:
        BackendError: no binding has this name.
        AiterUnavailableError: it cannot be used here; the message says why.
    """
    found = bind(name)
    if isinstance(found, Refused):
        raise AiterUnavailableError(name, found.reason)
    return found


def probe_all() -> tuple[Probed | Refused, ...]:
    """Every binding, in the order of the table."""
    return tuple(probe(binding.name) for binding in BINDINGS)


def installed_releases() -> ReleaseRange | None:
    """The releases that the installed build can be, or None without one."""
    build = detect.find_build()
    return build.releases if isinstance(build, detect.Build) else None


def forget() -> None:
    """Look, probe and bind again when next asked. What Python has imported stays imported."""
    with _lock:
        for cached in (_probe, _bind, source.definitions):
            cached.cache_clear()
        detect.forget()


@functools.cache
def _probe(name: str) -> Probed | Refused:
    binding = BY_NAME[name]
    build = detect.find_build()
    if isinstance(build, detect.Absent):
        return Refused(name=name, reason=build.reason)
    if build.triton_only is not None and not binding.function.is_triton:
        return Refused(name=name, reason=f"Triton-only: {build.triton_only}")
    main = match(build.folder, binding.function)
    if isinstance(main, str):
        return Refused(name=name, reason=main)
    never = refused_altogether(restrictions_of(name, build.releases, main.names))
    if never is not None:
        doubt = f"this build looks like {build.releases}, and may be one of these: "
        return Refused(name=name, reason=f"{doubt if build.releases.contradictory else ''}{never}")
    return Probed(binding=binding, main=main, releases=build.releases)


@functools.cache
def _bind(name: str) -> Bound | Refused:
    probed = _probe(name)
    if isinstance(probed, Refused):
        return probed
    function = _imported(probed.main.function.path)
    if isinstance(function, str):
        return Refused(name=name, reason=function)
    names = probed.main.names
    resolved = Resolved(binding=probed.binding, function=function, names=names, releases=probed.releases)
    module, _, maker = probed.binding.calls.partition(".")
    make = getattr(importlib.import_module(f".{module}", __package__), maker)
    restrictions = restrictions_of(name, probed.releases, names)
    call = _unless_empty(probed.binding.op, make(resolved))
    return Bound(name=name, call=call, probed=probed, restrictions=restrictions, fp8=_fp8())


def _unless_empty(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of an op that launches nothing where there are no rows: AITER's kernels do not look."""
    from ...ops import FUNCTIONS
    from ...ops.library import declared, fake_of

    if op not in FUNCTIONS:
        return call
    empty = fake_of(declared(op))

    def call_or_empty(x: Any, *others: Any) -> Any:
        return call(x, *others) if x.numel() else empty(x, *others)

    return call_or_empty


def _imported(path: str) -> Callable[..., Any] | str:
    """The function itself, or why it is not there once its module is imported."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # AITER raises RuntimeError, KeyError, OSError and others when imported
        return f"importing {module_name} raised {type(error).__name__}: {error}"
    build = detect.find_build()
    if isinstance(build, detect.Build) and not _is_below(module, build.folder):
        return f"{module_name} was imported from {module.__file__}, not from {build.folder}"
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        return (
            f"{path} is declared but not there after the import: AITER swallowed an error on the way"
            if found is None
            else f"{path} is a {type(found).__name__}, which cannot be called"
        )
    function: Callable[..., Any] = found
    return function


def _is_below(module: Any, folder: Path) -> bool:
    return module.__file__ is None or Path(module.__file__).resolve().is_relative_to(folder.resolve())


def _fp8() -> Any:
    """`aiter.dtypes.fp8`, where AITER has bound it: in Triton-only mode, and after an error it swallowed, it has not."""
    dtypes = getattr(sys.modules.get("aiter"), "dtypes", None)
    return getattr(dtypes, "fp8", None)
