"""A JSON Schema of models.toml for editors, made from the same classes that the file is read into.

    python -m layerfuse.registry.schema > models.schema.json

It knows what can be said of one value; what contradicts something elsewhere in the file is found by `layerfuse check`.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from ..adapters.base import LAYER_WORDS, RESIDUAL_WORDS, fields_of
from ..adapters.conversions import CONVERSIONS
from ..adapters.rope_source import ROPE_WORDS
from ..adapters.specs import FAMILIES, LARGEST, ExpertsSpec, NormSpec, kind_of
from .catalog import MOST_LAYERS, ModelEntry
from .kind_words import At, Every, GateWords, RopeWords, Yarn
from .kinds import KINDS, EngineFacts, ExpertsKind, LayerKind, MLPKind
from .published import QuantKind

_COUNT = {"minimum": 1, "maximum": LARGEST}
_BOUNDS: dict[str, dict[str, int]] = {
    "optional_positive": {"exclusiveMinimum": 0},
    "count": _COUNT,
    "optional_count": _COUNT,
    "window": _COUNT,
    "width_or_zero": {"minimum": 0, "maximum": LARGEST},
}
_OWN_BOUNDS = {
    "num_hidden_layers": {"minimum": 1, "maximum": MOST_LAYERS},
    "attentions_per_layer": {"minimum": 1, "maximum": 8},
    "step": {"minimum": 1},
    "start": {"minimum": 0},
    "factor": {"minimum": 1},
    "attention_scaling": {"exclusiveMinimum": 0},
    "mscale_all_dim": {"minimum": 0},
}
"""Of the numbers that no spec has a field for."""


_CLASSES: tuple[type[Any], ...] = (
    ModelEntry,
    *KINDS.values(),
    MLPKind,
    ExpertsKind,
    QuantKind,
    EngineFacts,
    Every,
    GateWords,
    RopeWords,
    Yarn,
)


def schema() -> dict[str, Any]:
    """The schema, ready to be written as JSON."""
    models = {
        "description": "Models by name: lower-case, without blanks.",
        "type": "object",
        "propertyNames": {"pattern": r"^[^\sA-Z]+$"},
        "additionalProperties": _ref("ModelEntry"),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "layerfuse models.toml",
        "description": "Models, their published dimensions, and the layer classes they bring.",
        **_object({"models": models}),
        "$defs": {
            **{cls.__name__: _table(cls) for cls in _CLASSES},
            "facts": _facts(),
            "place": _place(),
            "norm": _norm(),
            "rope": _rope(),
        },
    }


def _object(properties: Mapping[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """A table of these keys and no others."""
    needed = {} if required is None else {"required": [*required]}
    return {"type": "object", "additionalProperties": False, **needed, "properties": {**properties}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def _listed(items: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", **more, "items": items}


def _table(cls: type[Any]) -> dict[str, Any]:
    said, hints = docs_of(cls), get_type_hints(cls)
    attributes = [a for a in attrs.fields(cls) if a.name not in getattr(cls, "UNSTRUCTURED", ())]
    required = [a.name for a in attributes if a.default is attrs.NOTHING]
    properties = {a.name: {"description": said[a.name], **_field(a.name, hints[a.name])} for a in attributes}
    return {"description": (inspect.getdoc(cls) or "").partition("\n")[0], **_object(properties, required)}


def docs_of(cls: type[Any]) -> dict[str, str]:
    """The text under each field of an attrs class and of its bases: its description, which Python itself throws away."""
    texts: dict[str, str] = {}
    for base in filter(attrs.has, reversed(cls.__mro__)):
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(found, ast.ClassDef)
        for field, below in pairwise(found.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                texts[field.target.id] = str(ast.literal_eval(below.value))
    return {a.name: texts.get(a.name, "") for a in attrs.fields(cls)}


def _field(name: str, hint: Any) -> dict[str, Any]:
    if name == "layer_classes":
        return _layer_classes()
    found = _type(hint)
    for part in (found, *found.get("anyOf", ())):
        if part.get("type") in ("integer", "number"):
            part.update(_OWN_BOUNDS.get(name) or _bounds(name))
    return found


def _bounds(name: str) -> dict[str, int]:
    """The bounds of the spec field of the same name."""
    for spec in (*FAMILIES.values(), NormSpec, ExpertsSpec):
        for attribute in attrs.fields(spec):
            if attribute.name == name:
                return _BOUNDS.get(kind_of(attribute), {})
    return {"exclusiveMinimum": 0} if name.endswith(("_eps", "_scale")) else {}


def _type(hint: Any) -> dict[str, Any]:
    if hint == At:
        listed = _listed({"type": "integer", "minimum": 0}, maxItems=MOST_LAYERS)
        return {"anyOf": [{"enum": ["all", "rest"]}, listed, _ref("Every")]}
    if hint == LayerKind:
        each = [
            {"if": {"properties": {"family": {"const": family}}, "required": ["family"]}, "then": _ref(cls.__name__)}
            for family, cls in KINDS.items()
        ]
        family = {"family": {"enum": list(KINDS)}}
        return {"type": "object", "required": ["family"], "properties": family, "allOf": each}
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, UnionType):
        # TOML has no null: an optional field is left out.
        kinds = [_type(part) for part in parts if part is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is list:
        return _listed(_type(parts[0]))
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(parts[1])}
    if attrs.has(hint):
        return _ref(hint.__name__)
    return {"type": {int: "integer", float: "number", str: "string", bool: "boolean"}[hint]}


# ---- the words of adapters -------------------------------------------------------------------------------------------


def _layer_classes() -> dict[str, Any]:
    return {
        "type": "object",
        "propertyNames": {"pattern": r"^[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*$"},
        "additionalProperties": {"anyOf": [_ref("facts"), _listed(_ref("facts"), minItems=1)]},
    }


_LAYER_WORDS = {
    "tp_size": "Where to read the tensor-parallel size.",
    "tp_rank": "Where to read this rank.",
    "tp_weight": "Linear modules whose weight tells, with the side their heads are on: `o_proj.in_features`.",
    "mlp_weight": "Down projections, or the weights of experts, that tell over how many ranks an MLP's result is summed.",
    "added_as_given": "Whether what attention and MLP give is added as it is; true unless it says otherwise.",
    "mixture": "The modules in the place of the MLP that may be a mixture of experts: the first that is one is read.",
    "last_linear": "The linear whose result the layer adds to the stream last, as far as a layer has it.",
    "unless": "What, where it is there, makes a layer one that the spec does not describe: cross-attention.",
}


def _facts() -> dict[str, Any]:
    properties: dict[str, Any] = {
        "like": {"description": "A known layer class to start from.", "type": "string"},
        "family": {"description": "The kind of layer.", "enum": list(FAMILIES)},
        "without": {
            "description": "Fields of the class it is like that are not read here.",
            **_listed({"type": "string"}),
        },
    }
    for spec in FAMILIES.values():
        said = docs_of(spec)
        for name, kind in fields_of(spec).items():
            properties.setdefault(name, {"description": f"Where to read: {said.get(name) or name}", **_words(kind)})
    for name in (*LAYER_WORDS, *RESIDUAL_WORDS):
        properties[name] = {"description": _LAYER_WORDS[name], **_ref("place")}
    return {
        "description": "Where each field of a layer's spec is read, in the words of adapters.",
        **_object(properties),
        "anyOf": [{"required": ["like"]}, {"required": ["family"]}],
    }


def _words(kind: str) -> dict[str, Any]:
    if kind == "norms":
        return {"anyOf": [_ref("norm"), _listed(_ref("norm"))]}
    if kind == "optional_rope":
        return _ref("rope")
    return _ref("norm" if kind.endswith("norm") else "place")


def _place() -> dict[str, Any]:
    text = {"type": "string"}
    constant = _object({"const": {"type": ["string", "number", "boolean"]}}, ["const"])
    converted = _object({"path": text, "as": {"enum": list(CONVERSIONS)}}, ["path", "as"])
    said = {"type": ["string", "integer", "boolean"]}
    where = _object({"path": text, "where": text, "is": said}, ["path", "where"])
    named = _object({"name_as": {"enum": list(CONVERSIONS)}}, ["name_as"])
    several = _listed(_ref("place"), minItems=1)
    return {
        "description": (
            'An attribute path, a list of them tried in order, {const = ...}, {path = ..., as = "..."}, {path = ..., where = '
            '"..."} for what counts where another path says so, or {name_as = "..."} for what the layer\'s name in its model says.'
        ),
        "anyOf": [{"type": "string", "minLength": 1}, several, constant, converted, where, named],
    }


def _norm() -> dict[str, Any]:
    fields = (
        "width",
        "epsilon",
        "weight_offset",
        "activation",
        "norm_before_gate",
        "group_size",
        "has_weight",
        "has_bias",
    )
    linears = _listed({"type": "string"})
    table = _object(
        {
            "module": {"type": "string"},
            "consumers": {"description": "The linears that read its result, as far as a layer has them.", **linears},
            "producers": {
                "description": "The linears whose result joins the residual stream in front of it, as far as a layer has them.",
                **linears,
            },
            "where": {
                "description": "The layer's flag that is false where it has no such norm, of a gated norm that may be absent.",
                **_ref("place"),
            },
            "layer_epsilon": {
                "description": "Where the layer holds the epsilon of a norm that holds none.",
                **_ref("place"),
            },
            **{name: _ref("place") for name in fields},
        },
        ["module"],
    )
    return {"description": "A norm: its module, and where its own fields are.", "anyOf": [{"type": "string"}, table]}


def _rope() -> dict[str, Any]:
    places = {name: _ref("place") for name in ROPE_WORDS}
    required = [name for name, default in ROPE_WORDS.items() if default is None]
    table = _object({"module": {"type": "string"}, **places}, required)
    none = _object({"const": {"const": "none"}}, ["const"])
    return {
        "description": 'A rope: its module, if it has one, and where its own fields are; {const = "none"}: there is none.',
        "anyOf": [table, none],
    }


def text() -> str:
    """The schema as it is checked in."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
