"""Layer classes that models.toml entries bring, made into adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..adapters.base import Adapter, Facts
from ..adapters.errors import FactsError, closest, did_you_mean
from .catalog import ModelEntry
from .errors import CatalogError
from .lookup import facts_from_words

if TYPE_CHECKING:
    from .lookup import Registry


def declared_adapters(registry: Registry, entries: Mapping[str, ModelEntry], source: str) -> list[Adapter]:
    """One adapter for each entry that brings layer classes, named as the entry.

    A class may be `like` a registered one, or like one that another of these entries declares.

    Raises:
        CatalogError: an entry names an unknown adapter, or declares classes that mean nothing; all are listed.
    """
    known_adapters = registry._adapters
    problems = [
        f"no adapter {entry.adapter!r} is registered{did_you_mean(entry.adapter, known_adapters)} "
        f"@ $.models.{name}.adapter"
        for name, entry in entries.items()
        if entry.adapter not in known_adapters and entry.adapter not in entries
    ]
    facts: dict[str, tuple[Facts, ...]] = {}
    waiting = [(name, key, table) for name, entry in entries.items() for key, table in entry.layer_classes.items()]
    found: dict[str, dict[str, tuple[Facts, ...]]] = {}

    def lookup(key: str) -> tuple[Facts, ...] | None:
        owner = registry._owners.get(key)
        return known_adapters[owner].layers[key] if owner is not None else facts.get(key)

    # A class may be like a later one: what waits for another is tried again as long as that helps.
    while waiting:
        left = []
        for name, key, table in waiting:
            if any(like not in facts and lookup(like) is None and like in _keys(waiting) for like in _likes(table)):
                left.append((name, key, table))
                continue
            try:
                found.setdefault(name, {})[key] = facts[key] = _facts(table, lookup)
            except FactsError as error:
                near = [k for like in _likes(table) if lookup(like) is None for k in closest(like, registry._owners)]
                hint = f"; the closest known are {', '.join(near)}" if near else ""
                problems.append(f"{error}{hint} @ $.models.{name}.layer_classes.{key!r}")
        if len(left) == len(waiting):
            problems += [f"like: goes in a circle @ $.models.{n}.layer_classes.{k!r}" for n, k, _ in left]
            break
        waiting = left
    adapters = []
    for name, layers in found.items():
        try:
            adapters.append(Adapter(name, layers))
        except FactsError as error:
            problems.append(f"{error} @ $.models.{name}.layer_classes")
    if problems:
        raise CatalogError(source, problems)
    return adapters


def _keys(waiting: list[tuple[str, str, Any]]) -> set[str]:
    return {key for _, key, _ in waiting}


def _likes(table: Any) -> list[str]:
    tables = table if isinstance(table, list) else [table]
    return [t["like"] for t in tables if isinstance(t, dict) and isinstance(t.get("like"), str)]


def _facts(table: Any, lookup: Any) -> tuple[Facts, ...]:
    tables = table if isinstance(table, list) else [table]
    if not tables or not all(isinstance(t, dict) for t in tables):
        raise FactsError(f"expected a table of facts, or a list of them, got {table!r}")
    return tuple(facts for t in tables for facts in facts_from_words(t, lookup))
