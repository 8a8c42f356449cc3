"""The recorded signatures of AITER, release by release: what the stand-ins are generated from.

The data lies in `tests/data/aiter_signatures.json`; its `source` says where it comes from.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "data" / "aiter_signatures.json"


@functools.cache
def _data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DATA.read_text())
    return loaded


EVERY_REF: tuple[str, ...] = tuple(_data()["releases"])
"""A tag that is not supported any more, the supported ones, oldest first, and main at the recorded commit."""

TOO_OLD, *_SUPPORTED, _MAIN = EVERY_REF
RELEASES: tuple[str, ...] = tuple(_SUPPORTED)
"""The supported tags; `v0.1.17-longctx` is after `v0.1.17`."""


def position(release: str) -> int:
    """Where a release stands among all.

    Raises:
        KeyError: no such release was recorded.
    """
    if release not in EVERY_REF:
        raise KeyError(f"{release!r} is no recorded release of AITER; the last ones are {', '.join(EVERY_REF[-4:])}")
    return EVERY_REF.index(release)


def between(release: str, first: str | None, last: str | None) -> bool:
    """Whether a release is one of first..last, both included; None leaves that end open."""
    here = position(release)
    return (first is None or position(first) <= here) and (last is None or here <= position(last))


def version(release: str) -> str:
    """The version that setuptools_scm gives to a release: `v0.1.17-rc0` is 0.1.17rc0, `v0.1.17-longctx` is 0.1.17."""
    if release == "HEAD":
        return "0.1.20.post2.dev7+ge4048607a5"
    return release.removeprefix("v").replace("-longctx", "").replace("-rc", "rc")


PARAMETER = re.compile(r"(\*|\w+)(?:: (.+?))?(?: ?= ?(.+))?")


def parts(parameter: str) -> tuple[str, str | None, str | None]:
    """Name, annotation and default of a parameter as it is written."""
    found = PARAMETER.fullmatch(parameter)
    assert found, parameter
    name, annotation, default = found.groups()
    return name, annotation, default


@dataclass(frozen=True)
class Definition:
    """One function of one release.

    Attributes:
        key: `module:function` or `module:Class.method`, where it is defined.
        parameters: as they are written, in order, with `self` and the star behind which they are passed by name.
        returns: the annotation of its result, as source, or None.
        hidden_by: `compile_ops` or `torch_compile_guard` where the name is bound to a `(*args, **kwargs)` closure;
            None where the plain function can be inspected.
        torch_free: whether tensors are handed to C++ without torch: a dtype it does not know is then an AssertionError.
    """

    key: str
    parameters: tuple[str, ...]
    returns: str | None
    hidden_by: str | None
    torch_free: bool

    @property
    def names(self) -> list[str]:
        """What its parameters are called."""
        return [parts(parameter)[0] for parameter in self.parameters if parameter != "*"]

    @property
    def module(self) -> str:
        """The module of the definition."""
        return self.key.split(":")[0]

    @property
    def name(self) -> str:
        """The function's own name, without a class."""
        return self.key.split(":")[1].split(".")[-1]

    @property
    def owner(self) -> str | None:
        """The class it is a method of, or None."""
        path = self.key.split(":")[1]
        return path.split(".")[0] if "." in path else None


@functools.cache
def definitions(release: str) -> dict[str, Definition]:
    """Every recorded function that a release defines, by key."""
    found = {}
    for key, entries in _data()["definitions"].items():
        for entry in entries:
            if between(release, entry["from"], entry["to"]):
                found[key] = Definition(
                    key,
                    tuple(entry["parameters"]),
                    entry["returns"],
                    entry.get("hidden_by"),
                    entry.get("torch_free", False),
                )
    return found


@functools.cache
def aliases(release: str) -> dict[str, str]:
    """Every other address at which a recorded function is found: `aiter:rms_norm` -> the key of its definition."""
    return {
        key: entry["of"]
        for key, entries in _data()["aliases"].items()
        for entry in entries
        if between(release, entry["from"], entry["to"])
    }
