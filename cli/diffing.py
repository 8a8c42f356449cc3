"""`layerfuse diff`: what two plans, or two reports, say differently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..adapters.errors import shown
from ..registry.inspect import ConfigError, read_config
from .console import print_json

_KINDS = {
    "a plan (plan --json)": {"model", "target", "kinds"},
    "plans of many sizes (plan --all-tp --json)": {"target", "degrees", "models"},
    "specs (specs --json)": {"model", "version", "layers"},
    "an engine's report (layerfuse-report.json)": {"layerfuse", "modules"},
    "a report of fusion.compile (its to_dict() as JSON)": {"target", "fusions", "records"},
}
"""What is compared, and the keys by which each is known."""

_NAMES = ("kind", "fusion", "model", "path", "name")
"""What tells the objects of a list apart; without one, their places do."""


def answer_diff(before: Path, after: Path, *, json: bool) -> None:
    """Print what is new, gone and changed.

    Raises:
        ConfigError: a file cannot be read, or holds nothing that is compared; or the two hold different things.
        SystemExit: with 1, where they differ.
    """
    (kind, old), (other, new) = _read(before), _read(after)
    if kind != other:
        raise ConfigError(str(after), [f"expected {kind}, as {before} is, got {other}"])
    gone = {place: old[place] for place in old if place not in new}
    fresh = {place: new[place] for place in new if place not in old}
    changed = {place: [old[place], new[place]] for place in old if place in new and old[place] != new[place]}
    if json:
        print_json({"new": fresh, "gone": gone, "changed": changed})
    else:
        for word, found in (("new", fresh), ("gone", gone)):
            for place, value in found.items():
                print(f"{word:8} {place}: {shown(value, 200)}")
        for place, (was, now) in changed.items():
            print(f"changed  {place}: {shown(was, 200)} -> {shown(now, 200)}")
        print(f"{len(fresh)} new, {len(gone)} gone, {len(changed)} changed")
    if fresh or gone or changed:
        raise SystemExit(1)


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    data = read_config(file)
    kind = next((kind for kind, keys in _KINDS.items() if keys <= data.keys()), None)
    if kind is None:
        has = f"the keys {', '.join(map(shown, list(data)[:6]))}" if data else "no keys"
        raise ConfigError(str(file), [f"expected {'; or '.join(_KINDS)}; got an object with {has}"])
    try:
        # What was decided comes before why.
        return kind, dict(sorted(_leaves(data), key=lambda leaf: leaf[0].endswith(".reason")))
    except RecursionError:
        raise ConfigError(str(file), ["is nested too deeply to be a plan or a report"]) from None


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its place. A list of plain values is one value."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{place}.{name}" if place else name)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        seen: dict[str, int] = {}
        for inner in value:
            names = [str(inner[key]) for key in _NAMES if isinstance(inner, dict) and key in inner]
            name = names[0] if names else "item"
            seen[name] = seen.get(name, 0) + 1
            yield from _leaves(inner, f"{place}[{name}{f'#{seen[name]}' if seen[name] > 1 else ''}]")
    else:
        yield place, value
