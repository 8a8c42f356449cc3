"""The environment variables of this library, and those that are set and are none of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .errors import cut, did_you_mean

PREFIX = "LAYERFUSE_"
VARIABLES = (
    "LAYERFUSE_FUSIONS",
    "LAYERFUSE_BACKEND",
    "LAYERFUSE_STRICT",
    "LAYERFUSE_REPORT",
    "LAYERFUSE_SHADOW",
    "LAYERFUSE_PDL",
    "LAYERFUSE_TRACEBACK",
)
"""What `layerfuse --help` lists."""

OF_TESTS = ("AITER_", "FUZZ_", "HYPOTHESIS", "REGENERATE", "TEST_")
"""How those of the tests go on."""


def unknown_variables() -> Iterator[str]:
    """A sentence on each variable that is set, begins like this library's, and is read by nothing."""
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES and not name[len(PREFIX) :].startswith(OF_TESTS):
            meant = did_you_mean(name, VARIABLES) or f". Known: {', '.join(VARIABLES)}"
            yield f"{cut(name)} is set, and no variable is called that{meant}"
