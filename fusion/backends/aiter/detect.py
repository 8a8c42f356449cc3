"""Which `aiter` is installed, if any: read from files, once per process, importing nothing of it.

Importing AMD's AITER may build C++ code for minutes or raise anything, and PyPI has an unrelated project of the same
import name, so neither an import nor a version proves anything. What is looked at is the folder.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

from attrs import frozen

from .releases import TOO_OLD, ReleaseRange, release_range

IMPORT_NAME = "aiter"

DISTRIBUTIONS = ("amd-aiter", "aiter")
"""AMD's wheel, and PyPI's helper; AMD's oldest wheels were called so too."""

INSTALL = "install amd-aiter from a wheel of ROCm/aiter's releases, or from source"


@frozen(kw_only=True)
class Build:
    """An AITER of AMD's that is there to be imported."""

    folder: Path
    "The package's folder."
    distribution: str | None
    "The name of the distribution that owns it, or None: a source checkout, or files put there by hand."
    version: str | None
    "What its metadata says: local builds call themselves 0.1.0, so nothing is decided by it."
    mode: str | None
    "`install` or `develop`, as its build wrote it down, or None."
    releases: ReleaseRange
    "The supported releases that its files agree with."
    triton_only: str | None
    "Why only its Triton functions can be used, or None where all can."

    @property
    def origin(self) -> str:
        """Where it comes from, in a few words."""
        owner = "a source checkout" if self.distribution is None else f"AMD's {self.distribution} {self.version}"
        return owner + (f", {self.mode} build" if self.mode else "")


@frozen(kw_only=True)
class Absent:
    """There is no usable AITER of AMD's."""

    reason: str
    "One sentence."
    broken: bool
    "Whether something else is installed under this name, or cannot work."


@functools.cache
def find_build() -> Build | Absent:
    """The AITER that `import aiter` would get, or why there is none. Looked for once; `forget` looks again."""
    try:
        spec = importlib.util.find_spec(IMPORT_NAME)
    except (ImportError, ValueError) as error:  # a module put into sys.modules by hand has no spec
        return Absent(reason=f"`aiter` cannot be looked for: {error}", broken=True)
    versions = {name: version for name in DISTRIBUTIONS if (version := _version(name)) is not None}
    if spec is None:
        if versions:
            named = ", ".join(f"{name} {version}" for name, version in versions.items())
            return Absent(reason=f"{named} is installed, but `aiter` cannot be found", broken=True)
        return Absent(reason="not installed", broken=False)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    folder = next((folder for folder in folders if (folder / "ops").is_dir()), None)
    if folder is None and spec.origin is None and not versions:
        return Absent(reason="not installed", broken=False)  # a mere folder of that name on the path
    if folder is None:
        return Absent(reason=_not_amds(versions, folders, spec.origin), broken=True)
    if len(versions) > 1:
        reason = (
            f"amd-aiter {versions['amd-aiter']} and an `aiter` {versions['aiter']} are both installed, into one "
            "folder; uninstall both, then install amd-aiter again"
        )
        return Absent(reason=reason, broken=True)
    if not (folder / "__init__.py").is_file():
        return Absent(reason=f"{folder} has no __init__.py; {INSTALL}", broken=True)
    releases = release_range(folder)
    if releases is None:
        return Absent(reason=TOO_OLD, broken=True)
    name, version = next(iter(versions.items()), (None, None))
    return Build(
        folder=folder,
        distribution=name,
        version=version,
        mode=_mode(folder),
        releases=releases,
        triton_only=_triton_only(folder),
    )


def forget() -> None:
    """Look again when next asked: something was installed, or the environment changed."""
    find_build.cache_clear()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _not_amds(versions: dict[str, str], folders: list[Path], origin: str | None) -> str:
    if "amd-aiter" in versions:
        return f"amd-aiter {versions['amd-aiter']} is installed, but `aiter` has no folder `ops`; install it again"
    if "aiter" in versions or any((folder / "join_aiters.py").is_file() for folder in folders):
        return (
            f"this is PyPI's `aiter` {versions.get('aiter', 'of unknown version')}, an unrelated asyncio helper, not "
            f"AMD's AITER; pip uninstall aiter, then {INSTALL}"
        )
    where = folders[0] if folders else origin
    return f"`aiter` is {where}, which is not AMD's AITER: it has no folder `ops`"


def _mode(folder: Path) -> str | None:
    file = folder / "install_mode"
    return file.read_text(errors="replace").strip()[:40] or None if file.is_file() else None


def _triton_only(folder: Path) -> str | None:
    if not (folder / "jit").is_dir():
        return "this installation has no C++ parts (there is no folder `jit`)"
    if os.environ.get("AITER_TRITON_ONLY", "0") == "1":
        return "AITER_TRITON_ONLY=1 is set"
    return "on Windows AITER has its Triton functions only" if sys.platform == "win32" else None
