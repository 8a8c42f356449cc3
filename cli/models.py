"""Finding declared models: one by its name, quickly, or all of them with files and plugins."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from ..adapters.errors import LayerfuseError, cut, shown
from ..registry.entries import Entries
from ..registry.errors import UnknownModelError

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry
    from ..registry.inspect import Inspection
    from ..registry.lookup import Registry


DEFAULTS = "write what is missing into the config, or install transformers (pip install 'layerfuse[hf]'), whose defaults are taken for what it leaves out"
"""What to do about a config that leaves something out, where transformers is not installed."""


class NoConfigError(UnknownModelError):
    """A path that leads to no config.json."""

    def __str__(self) -> str:
        named = f"the name or Hugging Face id of a declared model (`layerfuse models` lists all {len(self.known)})"
        return f"{no_config(self.name)}, or {named}"


def no_config(path: str) -> str:
    """That this leads to none, and what would."""
    if os.path.exists(path) and not os.path.isdir(path):
        there = f"{shown(path, 400)} is there, but its name does not end in .json"
    else:
        there = f"there is no config.json {'in' if os.path.isdir(path) else 'at'} {shown(path, 400)}"
    return f"{there}: expected the path of a config.json or of the folder that holds it"


def _is_path(name: str) -> bool:
    """Whether this means a file and no model: names have no slash, and Hugging Face's ids have one."""
    return (
        os.path.exists(name)
        or name.startswith(("/", "./", "../", "~"))
        or name.endswith(".json")
        or name.count("/") > 1
    )


def registry_with(files: Sequence[Path]) -> Registry:
    """The built-in models and plugins, and those of `files`.

    Raises:
        CatalogError: a file holds mistakes; all are listed.
        ConflictError: a file redeclares something differently.
    """
    from ..registry.defaults import fresh

    registry = fresh()
    for answer in loaded(registry, files):
        if isinstance(answer, LayerfuseError):
            raise answer
    return registry


def loaded(registry: Registry, files: Sequence[Path]) -> list[Mapping[str, ModelEntry] | LayerfuseError]:
    """The entries of each file, which are registered, or what is wrong with it. A file may use what another one declares, in any order."""
    found: dict[int, Mapping[str, ModelEntry] | LayerfuseError] = {}
    left = [*enumerate(files)]
    while left:
        for number, file in left:
            try:
                found[number] = registry.load(file)
            except LayerfuseError as error:
                found[number] = error
        wrong = [each for each in left if isinstance(found[each[0]], LayerfuseError)]
        if len(wrong) == len(left):
            break
        left = wrong
    return [found[number] for number in range(len(files))]


def inspected(path: Path, registry: Registry, name: str | None = None) -> Inspection:
    """What a config.json says, or the one in a folder; called by its folder where it has no name.

    Where it leaves out what an entry follows from, that is transformers' default, if it is installed, as a note says. The note, and one on a
    model_type that may be misspelt, are printed on stderr.

    Raises:
        ConfigError: it does not say enough; everything missing is listed.
    """
    from ..registry.hf_config import MEANT
    from ..registry.inspect import ConfigError, inspect, read_config, read_modelopt

    config = read_config(path)
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    named = path.stem if path.stem != "config" and not path.is_dir() else folder.name
    unnamed = None if config.get("_name_or_path") else named or None
    modelopt = read_modelopt(path)
    ask = partial(inspect, registry=registry, name=name, file=str(path), folder=unnamed, modelopt=modelopt)
    odd = _odd_type(config, registry)
    try:
        found = ask(config)
        whole = _completed(path, config, found, ask)
    except ConfigError as error:
        misspelt = any(MEANT in problem for problem in error.problems)  # a default would hide it
        whole = None if misspelt else _completed(path, config, None, ask)
        if whole is None:
            more = [] if odd is None else [odd]
            if find_spec("transformers") is None and any("missing" in problem for problem in error.problems):
                more.append(DEFAULTS)
            raise ConfigError(error.file, [*error.problems, *more], error.recognised, error.instead) from None
        found = whole
    said = [*filter(None, [odd]), *(() if whole is None else whole.notes[:1])]
    for note in said:
        print(f"layerfuse: {path}: {note}", file=sys.stderr)
    found = whole or found
    return found if odd is None else attrs.evolve(found, notes=(odd, *found.notes))


def _completed(
    path: Path, config: Mapping[str, Any], found: Inspection | None, ask: Callable[[Mapping[str, Any]], Inspection]
) -> Inspection | None:
    """What a config says with transformers' defaults for what it leaves out, where that is something else: the first note says so.

    Args:
        path: of the file.
        config: as it was parsed.
        found: what it says by itself; None: not enough.
        ask: inspects one.

    Raises:
        ConfigError: a key that is left out may be there, misspelt.
    """
    from ..bisecting import smallest
    from ..registry.hf_config import MEANT, text_part
    from ..registry.inspect import ConfigError
    from ..testing.models import defaults_of, with_keys

    defaults = defaults_of(config)
    if defaults is None:
        return None

    def with_defaults(keys: Iterable[str]) -> Inspection:
        return ask(with_keys(config, {key: defaults.values[key] for key in keys}))

    try:
        whole = with_defaults(defaults.values)
    except ConfigError as error:
        note = f"it leaves out what {defaults.whose}, which does not go with the rest: {'; '.join(error.problems)}"
        return None if found is None else attrs.evolve(found, notes=(note, *found.notes))
    if found is not None and whole.entry == found.entry:
        return None

    def is_enough(keys: Iterable[str]) -> bool:
        try:
            return with_defaults(keys).entry == whole.entry
        except ConfigError:
            return False

    needed = {key: defaults.values[key] for key in smallest([*defaults.values], is_enough)}
    values, _ = text_part(config)
    problems = [
        f"{key} is missing; {MEANT} {key} by {near} = {shown(values[near])}?"
        for key, near in defaults.meant.items()
        if key in needed
    ]
    if problems:
        raise ConfigError(str(path), problems, whole.recognised)
    said = ", ".join(f"{key} = {shown(value, 30)}" for key, value in needed.items())
    return attrs.evolve(whole, notes=(f"it leaves out what {defaults.whose}: {said}", *whole.notes), defaults=needed)


def _odd_type(config: Mapping[str, Any], registry: Registry) -> str | None:
    """That nothing knows the model_type of a config's language model, where one that is known is close to it. Another number is another model."""
    import difflib

    from ..registry.hf_config import MEANT, text_part
    from ..registry.hf_hybrids import HYBRIDS

    said = text_part(config)[0].get("model_type")
    known = {entry.model_type for entry in registry.models().values() if entry.model_type} | {*HYBRIDS}
    if not isinstance(said, str) or said in known or "auto_map" in config:
        return None
    from ..testing.general import known_types

    known |= known_types()
    near = [
        each
        for each in difflib.get_close_matches(cut(said.lower()), sorted(known), n=3, cutoff=0.8)
        if _words(each) != _words(said)
    ]
    if said in known or not near:
        return None
    return f"nothing is known of a model_type {shown(said)}; {MEANT} {shown(near[0])}?"


def _words(text: str) -> str:
    return re.sub(r"[\d.]", "", text)


@frozen(kw_only=True)
class FoundModel:
    """A model that was asked for."""

    entry: ModelEntry
    read: str | None = None
    "The file that says how its checkpoint is quantised; None: no config was read."
    unread: bool = False
    "Whether what that says of it is not read."
    alike: str | None = None
    "The declared model of another model_type that has the same layers."
    inspection: Inspection | None = None
    "What the config says, where one was read."


def find_model(name: str, files: Sequence[Path] = ()) -> ModelEntry:
    """The entry that `found_model` gives."""
    return found_model(name, files).entry


def found_model(name: str, files: Sequence[Path] = ()) -> FoundModel:
    """One model by its name, an alias of it or its Hugging Face id; or that of a config.json, by its path or folder.

    A model that ships with the library is read alone: looking for plugins would take longer than everything else that
    `plan` does.

    Raises:
        UnknownModelError: with the closest names.
        ConfigError: a config.json does not say enough.
        CatalogError: one of `files` holds mistakes.
    """
    if not files:
        shipped = Entries.shipped()
        for key, head in shipped.heads.items():
            if name.lower() in head.names:
                return FoundModel(entry=shipped[key])
    name = name.removeprefix("https://huggingface.co/")  # as it is copied from a browser
    registry, config = registry_with(files), os.path.join(name, "config.json") if os.path.isdir(name) else name
    try:
        return FoundModel(entry=registry.model(name))
    except UnknownModelError as error:
        if not os.path.isfile(config) or not config.endswith(".json"):
            if _is_path(name) or not (error.closest or error.quantised):
                raise NoConfigError(name, error.known) from None
            raise
    found = inspected(Path(config), registry)
    from ..registry.inspect import MODELOPT, NOT_DECLARED

    beside = any(kind.source.startswith(MODELOPT) for kind in found.entry.quant.values())
    says = os.path.join(os.path.dirname(config), MODELOPT) if beside else config
    for note in found.lost:
        print(f"layerfuse: {config}: {note}", file=sys.stderr)
    entry, alike = found.entry, None
    if found.same_as:
        declared = registry.model(found.same_as[0])
        if found.is_of_type(declared):
            # How this copy of it is quantised, its own config says.
            entry = attrs.evolve(declared, quant=found.entry.quant)
        else:
            alike = declared.name
    else:
        undeclared = any(note.startswith(NOT_DECLARED) for note in found.notes)
        more = f"; {NOT_DECLARED}, and how an engine runs it is not known" if undeclared else ""
        if find_spec("transformers") is None:
            more += "; transformers, whose defaults are taken for what a config leaves out, is not installed"
        said = (
            f"layerfuse: {config} was read alone; `layerfuse inspect` holds what it says to the model's own code{more}"
        )
        print(said, file=sys.stderr)
    return FoundModel(entry=entry, read=says, unread=found.unread is not None, alike=alike, inspection=found)
