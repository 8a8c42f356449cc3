"""Finding declared models: one by its name, quickly, or all of them with files and plugins."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
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
    model_type that may be misspelt or contradicts the architectures, are printed on stderr.

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
    odd, found, refusal = _odd_type(config, registry) or _contradicted_type(config, registry), None, None
    try:
        found = ask(config)
    except ConfigError as error:
        refusal = error
    misspelt = refusal is not None and any(MEANT in problem for problem in refusal.problems)
    note, whole = (None, None) if misspelt else _completed(path, config, found, ask)  # a default would hide it
    said = [*filter(None, [odd, note])]
    found = whole or found
    if found is None:
        assert refusal is not None
        more = [*said, *([DEFAULTS] if find_spec("transformers") is None and "missing" in str(refusal) else [])]
        raise ConfigError(refusal.file, [*refusal.problems, *more], refusal.recognised, refusal.instead)
    for each in said:
        print(f"layerfuse: {path}: {each}", file=sys.stderr)
    return attrs.evolve(found, notes=(*said, *found.notes))


def _completed(
    path: Path, config: Mapping[str, Any], found: Inspection | None, ask: Callable[[Mapping[str, Any]], Inspection]
) -> tuple[str | None, Inspection | None]:
    """What there is to say of what a config leaves out, and what it says with transformers' defaults, where that is something else.

    Args:
        path: of the file.
        config: as it was parsed.
        found: what it says by itself; None: not enough.
        ask: inspects one.

    Raises:
        ConfigError: a key that is left out may be there, misspelt.
    """
    from ..registry.hf_config import MEANT, NOT_DESCRIBED
    from ..registry.inspect import ConfigError
    from ..testing.models import defaults_of, with_keys

    if find_spec("transformers") is None:
        said = "transformers, whose defaults are taken for what a config leaves out, is not installed"
        return said if found else None, None
    defaults = defaults_of(config)
    if defaults is None:
        return None, None
    if defaults.refused is not None:
        return f"what it leaves out was not looked for, as transformers does not take it: {defaults.refused}", None

    def with_defaults(values: Mapping[str, Any]) -> Inspection | ConfigError:
        try:
            return ask(with_keys(config, values))
        except ConfigError as error:
            return error

    whole, needed = with_defaults(defaults.values), dict(defaults.values)
    if isinstance(whole, ConfigError):
        if found is None:
            return None, None  # it is refused for what it says itself
        if any(key in NOT_DESCRIBED and value for key, value in defaults.values.items()):
            raise whole  # the model has what no entry could say, whether its config says so or not
        does_not_go = "; ".join(whole.problems)
        return f"it leaves out what {defaults.whose}, which does not go with the rest: {does_not_go}", None
    if found is not None and whole.entry == found.entry:
        return None, None
    for key in defaults.values:
        fewer = {each: value for each, value in needed.items() if each != key}
        less = with_defaults(fewer)
        if not isinstance(less, ConfigError) and less.entry == whole.entry:
            needed = fewer
    problems = [
        f"{key} is missing; {MEANT} {key} by {near} = {shown(defaults.unknown[near])}?"
        for key in needed
        if (near := defaults.meant(key)) is not None
    ]
    if problems:
        raise ConfigError(str(path), problems, whole.recognised)
    values = ", ".join(f"{key} = {shown(value, 30)}" for key, value in needed.items())
    return f"it leaves out what {defaults.whose}: {values}", attrs.evolve(whole, defaults=needed)


def _odd_type(config: Mapping[str, Any], registry: Registry) -> str | None:
    """That nothing knows the model_type of a config's language model, where one that is known is close to it. Another number is another model."""
    import difflib

    from ..registry.hf_config import MEANT, text_part
    from ..registry.hf_hybrids import HYBRIDS

    said = text_part(config)[0].get("model_type")
    known = {entry.model_type for entry in registry.models().values() if entry.model_type} | {*HYBRIDS}
    if not isinstance(said, str) or said in known or config.get("auto_map"):
        return None
    from ..testing.general import known_types

    known |= known_types()
    near = [
        each
        for each in difflib.get_close_matches(cut(said.lower()), sorted(known), n=3, cutoff=0.85)
        if each == said.lower() or _words(each) != _words(said.lower())
    ]
    if said in known or not near:
        return None
    return f"nothing is known of a model_type {shown(said)}; {MEANT} {shown(near[0])}?"


def _contradicted_type(config: Mapping[str, Any], registry: Registry) -> str | None:
    """That a config's model_type and its architectures are of two known models, and which of them was taken."""
    from ..registry.hf_config import text_part
    from ..registry.hf_hybrids import HYBRIDS

    parts = (config, text_part(config)[0])
    types = [said for part in parts if isinstance(said := part.get("model_type"), str)]
    names = config.get("architectures")
    if not types or not isinstance(names, list) or config.get("auto_map"):
        return None
    known = {each.model_type for each in registry.models().values()} | {*HYBRIDS}
    for name in names:
        own = sorted(
            {each.model_type for each in registry.models().values() if name in each.architectures and each.model_type}
        )
        if not own or not {*own}.isdisjoint(types):
            continue
        if of := [said for said in types if said in known]:
            taken = of[0]
        else:
            from ..testing.general import known_types

            if known_types().isdisjoint(types):  # code of its own, which may hold layers of this class
                continue
            taken = name
        return (
            f"model_type {shown(of[0] if of else types[-1])} and architectures contradict each other, as {cut(name)} is of model_type "
            f"{' or '.join(own)}: {cut(taken)} was taken. transformers goes by model_type, vLLM and SGLang by architectures"
        )
    return None


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


def find_model(name: str, files: Sequence[Path] = (), registry: Registry | None = None) -> ModelEntry:
    """The entry that `found_model` gives."""
    return found_model(name, files, registry).entry


def found_model(name: str, files: Sequence[Path] = (), registry: Registry | None = None) -> FoundModel:
    """One model by its name, an alias of it or its Hugging Face id; or that of a config.json, by its path or folder.

    A model that ships with the library is read alone: looking for plugins would take longer than everything else that
    `plan` does.

    Args:
        name: what was asked for.
        files: models files that are known too.
        registry: what `registry_with(files)` gave, where it is there already.

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
    registry = registry_with(files) if registry is None else registry
    config = os.path.join(name, "config.json") if os.path.isdir(name) else name
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
    entry, declared = found.entry, registry.model(found.same_as[0]) if found.same_as else None
    if declared is not None and found.is_of_type(declared):
        # How this copy of it is quantised, its own config says.
        entry, declared = attrs.evolve(declared, quant=found.entry.quant), None
    else:
        undeclared = any(note.startswith(NOT_DECLARED) for note in found.notes)
        more = f"; {NOT_DECLARED}, and how an engine runs it is not known" if undeclared else ""
        said = (
            f"layerfuse: {config} was read alone; `layerfuse inspect` holds what it says to the model's own code{more}"
        )
        print(said, file=sys.stderr)
    alike = None if declared is None else declared.name
    return FoundModel(entry=entry, read=says, unread=found.unread is not None, alike=alike, inspection=found)
