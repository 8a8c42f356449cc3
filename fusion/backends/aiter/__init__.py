"""AMD's AITER as installed, whichever release it is: found by its files, bound by the parameters of its functions.

AITER renames and reorders its functions from release to release. Nothing here trusts a version: `find_build` tells
which `aiter` is installed without importing it, `probe` reads what a function takes from its source, and `bind` gives
a callable with one convention of ours, or a sentence that says why not. Where AITER is not installed, no table of it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...._lazy import attach

if TYPE_CHECKING:
    from .binding import Bound, Probed, Refused, bind, bound, forget, installed_releases, probe, probe_all
    from .calls import Call
    from .detect import Absent, Build, find_build
    from .errors import AiterCallError, AiterUnavailableError
    from .releases import RELEASES, ReleaseRange
    from .table import BINDINGS

_BINDING = ("Bound", "Probed", "Refused", "bind", "bound", "forget", "installed_releases", "probe", "probe_all")

__all__ = [
    "BINDINGS",
    "RELEASES",
    "Absent",
    "AiterCallError",
    "AiterUnavailableError",
    "Bound",
    "Build",
    "Call",
    "Probed",
    "Refused",
    "ReleaseRange",
    "bind",
    "bound",
    "find_build",
    "forget",
    "installed_releases",
    "probe",
    "probe_all",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        **dict.fromkeys(_BINDING, ".binding"),
        **dict.fromkeys(("Absent", "Build", "find_build"), ".detect"),
        **dict.fromkeys(("AiterCallError", "AiterUnavailableError"), ".errors"),
        **dict.fromkeys(("RELEASES", "ReleaseRange"), ".releases"),
        "BINDINGS": ".table",
        "Call": ".calls",
    },
)
