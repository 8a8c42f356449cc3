"""Entry points of installed packages. One whose metadata is broken takes nothing from the others, and is named.

`importlib.metadata` reads those of all packages together, so that one malformed file would hide every plugin.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from ..adapters.errors import FOREIGN, cut, said

if TYPE_CHECKING:
    from importlib import metadata

NAMELESS = "a package without metadata"
"""What messages call a package whose own name cannot be read, as a broken uninstall leaves it."""


def entry_points(*groups: str) -> list[metadata.EntryPoint]:
    """The entry points of these groups, by group and then by package. A package that cannot be read is a warning, where any names one of these."""
    if not _are_named(groups):
        return []
    from importlib import metadata

    try:
        return [point for group in groups for point in metadata.entry_points(group=group)]
    except FOREIGN:  # one package's metadata: all are read one by one, which takes longer
        found = list(_by_package())
    for _, error in found:
        if isinstance(error, str):
            warnings.warn(error, RuntimeWarning, stacklevel=2)
    points = [point for _, several in found if not isinstance(several, str) for point in several]
    return [point for group in groups for point in points if point.group == group]


def _are_named(groups: tuple[str, ...]) -> bool:
    """Whether a package may have entry points of these groups: where none has, asking `importlib.metadata` takes ten times as long.

    What it finds in another way than in the folders of `sys.path` is for it to say.
    """
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    if any(not isinstance(folder, str) or folder.lower().endswith(".egg") for folder in sys.path):
        return True
    wanted = [group.encode() for group in groups]
    for folder in dict.fromkeys(sys.path):
        try:
            names = os.listdir(folder or ".")
        except FileNotFoundError:
            continue
        except OSError:  # an archive
            return True
        for name in names:
            if name.lower().endswith((".dist-info", ".egg-info")):
                try:
                    with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                        text = file.read()
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError:
                    return True
                if any(group in text for group in wanted):
                    return True
    return False


def of_group(group: str) -> list[tuple[metadata.EntryPoint, str]]:
    """The entry points of a group with the names of their packages, in a stable order."""
    points = sorted(entry_points(group), key=lambda point: (point.name, point.value))
    return [(point, "an unnamed package" if point.dist is None else package_of(point.dist)) for point in points]


def unusable(plugin: str, package: str, problem: str) -> str:
    """What is said of an entry point that cannot be used."""
    stop = "" if problem.endswith("?") else "."
    return f"entry point {plugin!r} of {package}: {problem}{stop} Fix the package, or uninstall it."


def unreadable() -> list[tuple[str, str]]:
    """The installed packages whose entry points cannot be read: each one's name, and why, as a sentence."""
    return [(name, error) for name, error in _by_package() if isinstance(error, str)]


def package_of(dist: metadata.Distribution) -> str:
    """What messages call an installed package."""
    try:
        name = dist.name
    except FOREIGN:  # its metadata is no text
        name = None
    return cut(name) if isinstance(name, str) and name else NAMELESS


def _by_package() -> Iterator[tuple[str, metadata.EntryPoints | str]]:
    """Each installed package with its entry points, or with the sentence that says why they cannot be read."""
    from importlib import metadata

    seen = set()
    folders = [each for each in sys.path if isinstance(each, str | os.PathLike)]  # it raises an error of anything else
    for dist in metadata.distributions(path=folders):
        name = package_of(dist)
        plain = re.sub(r"[-_.]+", "-", name).lower()
        if name != NAMELESS and plain in seen:  # Python imports the first that stands on its path
            continue
        seen.add(plain)
        try:
            yield name, dist.entry_points
        except FOREIGN as error:
            where = getattr(dist, "_path", dist.locate_file(""))  # its own folder: all that tells a nameless one
            yield (
                name,
                f"the entry points of {name} in {cut(str(where), 200)} cannot be read, and its plugins, if "
                f"it has any, are not known: {said(error)}. Install it again, or remove its entry_points.txt.",
            )
