"""Calls that AITER answers wrongly, fails on or does not know, and the releases of which that is true: by hand, in `refusals.txt`.

A line there has a binding, what is known of a call, and behind a bar words of the reason why it is refused; behind another one the releases in
which it is, where these are not all. A word without a value stands for all that its own line says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

EVER = (("v0.1.16.post3", "v0.1.20.post1"),)


@frozen
class Case:
    """A kind of call, the releases that refuse it, and words of the reason."""

    binding: str
    call: dict[str, Any]
    words: str
    releases: tuple[tuple[str, ...], ...]


def _value(said: str) -> Any:
    dtype = getattr(torch, said, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return json.loads(said)
    except ValueError:
        return said


def _call(words: list[str], common: dict[str, dict[str, Any]]) -> dict[str, Any]:
    call: dict[str, Any] = {}
    for word in words:
        name, is_said, value = word.partition("=")
        call |= {name: _value(value)} if is_said else common[name]
    return call


def _read() -> Iterator[tuple[Case, ...]]:
    parts = (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8").strip().split("\n\n")
    first, *others = ([line.split(" | ") for line in part.splitlines()[1:]] for part in parts)
    common: dict[str, dict[str, Any]] = {}
    for (line,) in first:
        name, *words = line.split()
        common[name] = _call(words, common)
    for lines in others:
        yield tuple(
            Case(
                binding=line.split()[0],
                call=_call(line.split()[1:], common),
                words=reason[0] if reason else "",
                releases=tuple(tuple(each.split("..")) for each in reason[1].split(", "))
                if len(reason) > 1
                else EVER[: len(reason)],
            )
            for line, *reason in lines
        )


TAKEN, REFUSED = _read()
"""What no release that has the function refuses; and what is refused in these releases, and in no others that have the function."""
