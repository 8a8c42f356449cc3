"""Specs as JSON for engines in other languages, the way back, and the JSON Schema of it, all from the spec classes.

    python -m layerfuse.registry.spec_json > specs.schema.json

Each object says in `type` which class it is of, because a field may be of several.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from ..adapters.errors import LayerfuseError, shown
from ..adapters.specs import AnySpec, LayerSpec
from .schema import docs_of

VERSION = 1
"""Of the JSON: a field that goes or changes its meaning makes a new one, a new field does not."""


class SpecJsonError(LayerfuseError, ValueError):
    """JSON that holds no specs of this version."""


def _parts(hint: Any) -> tuple[Any, ...]:
    """The types that a hint names, alone or in a union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _classes(hint: Any, found: dict[str, type[Any]]) -> dict[str, type[Any]]:
    """The attrs classes that values of this type are made of, by their names."""
    for part in _parts(hint):
        if attrs.has(part) and part.__name__ not in found:
            found[part.__name__] = part
            for field in get_type_hints(part).values():
                _classes(field, found)
        elif get_origin(part) is tuple:
            for inner in get_args(part):
                _classes(inner, found)
    return found


CLASSES = _classes(AnySpec, {})
"""All of them, by what `type` says."""


def _of_types(hint: Any) -> bool:
    return any(attrs.has(part) for part in _parts(hint))


def make_converter() -> cattrs.Converter:
    """A converter between specs and JSON."""
    converter = cattrs.Converter(forbid_extra_keys=False)
    readers: dict[str, Any] = {}

    def read(value: Any, hint: Any) -> Any:
        if isinstance(value, dict):
            name = value.get("type")
            if name not in {part.__name__ for part in _parts(hint) if attrs.has(part)}:
                raise ValueError(f"type: {shown(name)} is none of {hint}")
            if name not in readers:
                readers[name] = make_dict_structure_fn(CLASSES[name], converter)
            return readers[name](value, CLASSES[name])
        if type(value) not in _parts(hint):
            raise ValueError(f"expected {hint}, got {shown(value)}")
        return value

    writers: dict[type[Any], Any] = {}

    def write(spec: Any) -> dict[str, Any]:
        cls = type(spec)
        if cls not in writers:
            writers[cls] = make_dict_unstructure_fn(cls, converter)
        return {"type": cls.__name__, **writers[cls](spec)}

    converter.register_structure_hook_func(_of_types, read)
    converter.register_unstructure_hook_func(attrs.has, write)
    return converter


def to_json(specs: Iterable[tuple[str, LayerSpec]]) -> dict[str, Any]:
    """Named specs as values that JSON has."""
    converter = make_converter()
    return {
        "version": VERSION,
        "layers": [{"path": path, "spec": converter.unstructure(spec)} for path, spec in specs],
    }


def from_json(said: Any) -> list[tuple[str, Any]]:
    """The way back.

    Raises:
        SpecJsonError: it is of another version, or holds what is no spec.
    """
    try:
        if said["version"] != VERSION:
            raise SpecJsonError(f"version: expected {VERSION}, got {shown(said['version'])}")
        converter, any_spec = make_converter(), cast("Any", AnySpec)
        return [(str(layer["path"]), converter.structure(layer["spec"], any_spec)) for layer in said["layers"]]
    except SpecJsonError:
        raise
    except (cattrs.BaseValidationError, LayerfuseError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SpecJsonError(f"these are no specs: {shown(error, 200)}") from error


def schema() -> dict[str, Any]:
    """The JSON Schema of what `layerfuse specs --json` prints."""
    layer = {
        "type": "object",
        "required": ["path", "spec"],
        "properties": {"path": {"type": "string"}, "spec": _type(AnySpec)},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"layerfuse specs, version {VERSION}",
        "type": "object",
        "required": ["version", "layers"],
        "properties": {"version": {"const": VERSION}, "layers": {"type": "array", "items": layer}},
        "$defs": {name: _object(cls) for name, cls in CLASSES.items()},
    }


def _object(cls: type[Any]) -> dict[str, Any]:
    hints, said = get_type_hints(cls), docs_of(cls)
    fields = {a.name: {"description": said[a.name], **_type(hints[a.name])} for a in attrs.fields(cls)}
    return {
        "type": "object",
        "required": ["type", *fields],
        "properties": {"type": {"const": cls.__name__}, **fields},
    }


_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}


def _type(hint: Any) -> dict[str, Any]:
    parts = _parts(hint)
    if len(parts) > 1:
        return {"anyOf": [_type(part) for part in parts]}
    if attrs.has(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if get_origin(hint) is tuple:
        items, *rest = get_args(hint)
        return {"type": "array", "items": _type(items)} | ({} if rest == [...] else {"minItems": 2, "maxItems": 2})
    return {"type": _PLAIN[hint]} if hint in _PLAIN else {}


def text() -> str:
    """The schema as it is checked in."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
