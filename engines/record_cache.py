"""Records kept beside what an engine's compiler keeps, so that a start from a cache has a report too. JSON files, written whole.

A record that cannot be written or read is no error: the engine runs, and the report says what it does not know.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import cattrs

from .pieces import PieceRecord

FORMAT = 2
"""Raised when the files change their form: older ones are then not read."""

BESIDE = "layerfuse.json"
"""The name of the file in the folder of a compiled model, one for each rank."""


def write(path: Path, data: dict[str, Any]) -> str | None:
    """Write a file as a whole. None, or why it could not be written."""
    try:
        text = json.dumps({"format": FORMAT, **data}, indent=1, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror or error}"
    except ValueError as error:  # a number that JSON has not
        return f"{path} cannot be written: {error}"
    return None


def read(path: Path, key: str) -> dict[str, Any] | None:
    """A file's content, if it was written under this key; None where there is none, or it is damaged or another's."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("key") != key:
        return None
    return data


TRITON_CACHE = "TRITON_CACHE_DIR"
"""Where Triton keeps what it has compiled; asked at each kernel's first launch."""


def name_tritons_folder(device: int) -> None:
    """Let Triton keep its kernels beside the compiled model, cold and warm, unless somebody has said where.

    Inductor names that folder as it compiles its first kernel, and kernels that are launched later go there, ours too. A start from
    a cache compiles none: it looked for ours elsewhere, and compiled them again.
    """
    if os.environ.get(TRITON_CACHE) is None:
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        os.environ[TRITON_CACHE] = triton_cache_dir(device)


def written_by(path: Path) -> int | None:
    """The process that wrote a report, or None where the file is none."""
    try:
        pid = json.loads(path.read_text())["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if type(pid) is int else None


def _piece(key: str, digest: str, tokens: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # Beside Inductor's own cache: whoever is served a piece from there finds its record there too.
    return Path(cache_dir()) / "layerfuse" / f"{key[-16:]}-{digest[:32]}-{tokens}.json"


def start_of(key: str, digest: str, tokens: str) -> str:
    """By what Inductor's cache knows a piece beside the key: nothing, or where one was distrusted since, what the next one is kept under."""
    data = read(_piece(key, digest, tokens), key)
    return "" if data is None else str(data.get("start", ""))


def distrust_piece(key: str, digest: str, tokens: str) -> None:
    """Let nobody be served a piece from Inductor's cache of which it is not known what is in it."""
    write(_piece(key, digest, tokens), {"key": key, "start": uuid.uuid4().hex})


def keep_piece(key: str, digest: str, tokens: str, start: str, record: PieceRecord) -> None:
    """Keep a piece's record for whoever gets the piece from Inductor's cache."""
    write(_piece(key, digest, tokens), {"key": key, "start": start, "record": cattrs.unstructure(record)})


def find_piece(key: str, digest: str, tokens: str) -> PieceRecord | None:
    """The record of an equal piece that was compiled elsewhere: by another rank, or at an earlier start."""
    data = read(_piece(key, digest, tokens), key)
    try:
        return None if data is None else cattrs.structure(data["record"], PieceRecord)
    except (KeyError, TypeError, cattrs.BaseValidationError):
        return None
