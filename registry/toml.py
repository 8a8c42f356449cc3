"""A document as TOML text, for entries that are printed. Python reads TOML, and writes none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def written(document: Mapping[str, Any]) -> str:
    """TOML text that `tomllib.loads` reads back into the same document.

    Args:
        document: of texts, numbers, booleans, and lists and tables of these.

    Raises:
        TypeError: it holds something else.
    """
    return "\n".join(_tables((), document))


def _tables(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    """A table and those inside of it, each as a block of lines."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in table.items() if key not in inner]
    if lines or (path and not inner):
        header = [f"[{'.'.join(map(_key, path))}]\n"] if path else []
        yield "".join([*header, *lines])
    for key, value in inner.items():
        yield from _tables((*path, key), value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in value.items())}}}"
    raise TypeError(f"TOML holds no {type(value).__name__}")
