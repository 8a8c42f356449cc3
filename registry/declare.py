"""Layer classes that models.toml entries bring, made into adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from ..adapters.base import Adapter, Facts, check_key, words_of
from ..adapters.errors import FactsError, closest, did_you_mean, shown
from ..adapters.specs import FAMILIES
from .catalog import ModelEntry
from .errors import MOST_PROBLEMS, TOO_MANY_PROBLEMS, CatalogError
from .kinds import ENGINES

if TYPE_CHECKING:
    from .tables import Tables


def declared_adapters(tables: Tables, entries: Mapping[str, ModelEntry], source: str) -> list[Adapter]:
    """One adapter for each entry that brings layer classes, named as the entry.

    A class may be `like` a registered one, or like one that another of these entries declares.

    Raises:
        CatalogError: an entry names an unknown adapter, or declares classes that mean nothing; all are listed.
    """
    known_adapters = tables.adapters
    problems = [*_unknown_names(tables, entries)]
    facts: dict[str, tuple[Facts, ...]] = {}
    found: dict[str, dict[str, tuple[Facts, ...]]] = {}

    def lookup(key: str) -> tuple[Facts, ...] | None:
        owner = tables.owners.get(key)
        return known_adapters[owner].layers[key] if owner is not None else facts.get(key)

    # A class may be like a later one: those that others wait for come first.
    by_key: dict[str, list[tuple[str, Any]]] = {}
    for name, entry in entries.items():
        for key, table in entry.layer_classes.items():
            by_key.setdefault(key, []).append((name, table))
    order: TopologicalSorter[str] = TopologicalSorter()
    for key, declared in by_key.items():
        order.add(
            key, *(like for _, table in declared for like in _likes(table) if like in by_key and lookup(like) is None)
        )
    with suppress(CycleError):  # what is not in a circle is done all the same
        order.prepare()
    done: set[str] = set()
    while ready := order.get_ready():
        for key in ready:
            for name, table in by_key[key]:
                try:
                    found.setdefault(name, {})[key] = facts[key] = _facts(table, lookup)
                except FactsError as error:
                    # Looking for what is near takes far longer than reading the file: only for what will be shown.
                    unknown = [like for like in _likes(table) if lookup(like) is None][: MOST_PROBLEMS - len(problems)]
                    near = [k for like in unknown[:3] for k in closest(like, tables.owners)]
                    hint = f"; the closest known are {', '.join(near)}" if near else ""
                    problems.append(f"{error}{hint} @ $.models.{name}.layer_classes.{key!r}")
            if len(problems) >= TOO_MANY_PROBLEMS:
                raise CatalogError(source, problems)
        order.done(*ready)
        done.update(ready)
    problems += [
        f"like: goes in a circle @ $.models.{name}.layer_classes.{key!r}"
        for key, declared in by_key.items()
        if key not in done
        for name, _ in declared
    ]
    adapters = []
    for name, layers in found.items():
        try:
            adapters.append(Adapter(name, layers))
        except FactsError as error:
            problems.append(f"{error} @ $.models.{name}.layer_classes")
    if problems:
        raise CatalogError(source, problems)
    return adapters


def _unknown_names(tables: Tables, entries: Mapping[str, ModelEntry]) -> Iterator[str]:
    """Adapters and engines that nobody knows. An engine is known by its name here, or by a layer class of its package."""
    adapters = tables.adapters
    engines = dict.fromkeys(ENGINES)
    for keys in (tables.owners, *(entry.layer_classes for entry in entries.values())):
        engines |= dict.fromkeys(re.split("[.:]", key, maxsplit=1)[0] for key in keys)
    shown_so_far = 0
    for name, entry in entries.items():
        unknown = [("adapter", entry.adapter)] if entry.adapter not in adapters and entry.adapter not in entries else []
        unknown += [("engine", engine) for engine in entry.engines if engine not in engines]
        for what, wrong in unknown:
            shown_so_far += 1
            near = (
                did_you_mean(wrong, adapters if what == "adapter" else engines) if shown_so_far <= MOST_PROBLEMS else ""
            )
            if what == "adapter":
                yield f"no adapter {shown(wrong)} is registered{near} @ $.models.{name}.adapter"
            else:
                yield f"engines: no layer class of {shown(wrong)} is known{near} @ $.models.{name}.engines"


def _likes(table: Any) -> list[str]:
    tables = table if isinstance(table, list) else [table]
    return [t["like"] for t in tables if isinstance(t, dict) and isinstance(t.get("like"), str)]


def _facts(table: Any, lookup: Any) -> tuple[Facts, ...]:
    tables = table if isinstance(table, list) else [table]
    if not tables or not all(isinstance(t, dict) for t in tables):
        raise FactsError(f"expected a table of facts, or a list of them, got {shown(table)}")
    return tuple(facts for t in tables for facts in facts_from_words(t, lookup))


def facts_from_words(words: Mapping[str, Any], known: Callable[[str], tuple[Facts, ...] | None]) -> tuple[Facts, ...]:
    """Facts from one declared table: `like` another class or of a `family`, then the words that differ.

    Args:
        words: the table. Beside the spec's fields: `like` (a known class), `family`, and `without` (fields to drop).
        known: facts of a class by key.

    Raises:
        FactsError: neither or unknown `like` or `family`, or words that mean nothing.
    """
    like, family = words.get("like"), words.get("family")
    changes = {name: word for name, word in words.items() if name not in ("like", "family", "without")}
    dropped = words.get("without", [])
    if not isinstance(dropped, list) or not all(isinstance(name, str) for name in dropped):
        raise FactsError(f"without: expected a list of field names, got {shown(dropped)}")
    if family is not None and (not isinstance(family, str) or family not in FAMILIES):
        raise FactsError(
            f"family: expected one of {', '.join(FAMILIES)}, got {shown(family)}{did_you_mean(str(family), FAMILIES)}"
        )
    if like is None:
        if family is None:
            raise FactsError('expected like = "<a known class>" or family = "<a kind of layer>"')
        return (Facts(FAMILIES[family], changes),)
    facts = known(check_key(like))
    if facts is None:
        raise FactsError(f"like: no class {shown(like)} is known")
    if family is not None:
        facts = tuple(several for several in facts if several.spec is FAMILIES[family])
        if not facts:
            raise FactsError(f"like: {like} is not known as {family}")
    if not changes and not dropped:
        return tuple(several.liked() for several in facts)
    if len(facts) > 1:
        raise FactsError(f"like: {like} is several kinds of layer; say which family the words are about")
    known_words = words_of(facts[0].spec)
    absent = next((name for name in dropped if name not in known_words), None)
    if absent is not None:
        raise FactsError(
            f"without: {facts[0].spec.__name__} has no field {shown(absent)}{did_you_mean(absent, known_words)}"
        )
    return (facts[0].but(**dict.fromkeys(dropped), **changes).liked(changes),)
