"""A layer that is asked: what it is called in messages, and what the places say where its facts look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .compiled_facts import CompiledFacts, Convert
from .conversions import whole
from .errors import FOREIGN, LayerfuseError, MissingAttributeError, UnreadableError, cut, said, shown
from .sources import ABSENT, Named, Source
from .values import same


class Asked:
    """One layer, with everything an error message needs."""

    def __init__(self, reader: CompiledFacts, layer: Any, path: str) -> None:
        self.reader = reader
        self.layer = layer
        self.path = path
        self.facts = reader.facts

    def name(self) -> str:
        """The layer in words: its path if known, else its class and the index it claims; and who, of other packages, declares it."""
        plugin = self.reader.plugin
        return f"{self.itself()}, declared by {plugin}," if plugin else self.itself()

    def itself(self) -> str:
        """The layer in words, whoever declares it."""
        if self.path:
            return f"{cut(self.path, 200)} ({self.reader.key})"
        try:
            _, index = self.first(self.facts.parsed["layer_index"], convert=whole)
        except (LayerfuseError, UnreadableError, KeyError):
            index = None
        return f"a {self.reader.key} layer" if index is None else f"{self.reader.key} layer {shown(index)}"

    def answered(self, name: str, places: tuple[Source, ...], convert: Convert) -> tuple[Source, Any]:
        """The place that answered for a field, and its answer."""
        try:
            return self.first(places, convert=convert)
        except UnreadableError as error:
            raise self.missing(name, list(error.args)) from error.__cause__

    def first(self, places: Any, start: Any = None, convert: Convert = same) -> tuple[Source, Any]:
        """The first place that says something. Whatever the layer's own code raises on the way is a reason why one does not."""
        start = self.layer if start is None else start
        for source in places:
            try:
                found = source.find(self.path if type(source) is Named else start)
                if found is not ABSENT:
                    return source, convert(found)
            except FOREIGN:
                continue
        return self.silent(places, start, convert)

    def silent(self, places: Any, start: Any, convert: Convert) -> tuple[Source, Any]:
        """The same in full, for what is to be said of each place that says nothing."""
        tried: list[str] = []
        cause: BaseException | None = None
        for source in places:
            try:
                return source, convert(source.read(self.path if type(source) is Named else start))
            except UnreadableError as error:
                tried.append(str(error))
                cause = error.__cause__
            except FOREIGN as error:
                tried.append(f"{source}: reading it raised {said(error)}")
                cause = error
        raise UnreadableError(*tried) from cause

    def missing(self, field: str, tried: list[str]) -> MissingAttributeError:
        """The error of a field that no place says."""
        return MissingAttributeError(
            layer=self.name(),
            adapter=self.reader.owner,
            field=field,
            tried=tried,
            existing=existing_names(self.layer),
        )


def existing_names(layer: Any, most: int = 60) -> list[str]:
    """The public names a layer really holds, for messages: attributes, child modules, parameters."""
    names: set[str] = set()
    try:
        for name, value in vars(layer).items():
            if name in ("_modules", "_parameters", "_buffers") and isinstance(value, Mapping):
                names.update(value)
            elif not name.startswith("_") and name != "training":
                names.add(name)
        listed = [cut(name) for name in sorted(names)]
    except FOREIGN:  # it has no names, or what it has for them is none
        return []
    return listed if len(listed) <= most else [*listed[:most], f"and {len(listed) - most} more"]
