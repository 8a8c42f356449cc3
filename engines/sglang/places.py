"""Where layerfuse stands in SGLang and what would happen there, read from SGLang's source without importing it: for the doctor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ..defaults import in_words
from ..hooks import check_source
from . import ASKED
from .decode_facts import HOOKS
from .hooks import LOADED, PRODUCTS
from .host import SGLANG
from .seams import LINEARS, SEAMS


def places(folder: Path) -> Iterator[tuple[str, str, str | None]]:
    """The hook, every class that a fused op can stand in, then the products and MLA's decode steps: the name, what is done there, and what is not as expected.

    Args:
        folder: of the package sglang.
    """
    yield LOADED.place, LOADED.does, check_source(LOADED, folder)
    for key in dict.fromkeys(seam.key for seam in SEAMS):
        several = [seam for seam in SEAMS if seam.key == key]
        can = f"{', '.join(seam.fusion for seam in several)} can stand there"
        yield ":".join(key), can, next(filter(None, (check_source(seam.hook, folder) for seam in several)), None)
    takes = "linears take there what such a norm has quantised"
    yield LINEARS.hook.place, takes, check_source(LINEARS.hook, folder)
    yield from ((hook.place, hook.does, check_source(hook, folder)) for hook in (*PRODUCTS, *HOOKS))


def inside(version: str, folder: Path) -> tuple[Literal["found", "absent", "broken"], str]:
    """Whether layerfuse would work inside of this SGLang, and a sentence.

    Args:
        version: of SGLang.
        folder: of the package sglang.
    """
    tested = ", ".join(SGLANG.tested)
    problem = check_source(LOADED, folder)
    if problem is not None:
        return "broken", f"SGLang {version} would be left alone (tested with {tested}): {problem}"
    allowed = os.environ.get("SGLANG_PLUGINS", "").strip()
    if allowed and "layerfuse" not in [name.strip() for name in allowed.split(",")]:
        return "absent", f"SGLANG_PLUGINS={allowed} keeps SGLang from loading it"
    known = "tested" if version in SGLANG.tested else f"not tested ({tested} is), and has what is expected"
    asked = os.environ.get(ASKED, "").strip()
    would = f"{ASKED}={asked} decides" if asked else in_words("sglang", version) or "no fusion is on by default"
    return "found", f"SGLang {version} is {known}; {would}"
