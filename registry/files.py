"""models.toml <-> typed entries, by cattrs: unknown keys forbidden, types exact, every mistake reported at once.

Nothing in a file can import or run code: it is parsed as TOML, structured into frozen values, and that is all.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

import attrs
import cattrs
from cattrs import ClassValidationError, IterableValidationError, transform_error
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from ..adapters.arguments import expect
from ..adapters.errors import LayerfuseError, did_you_mean, shown
from .catalog import MOST_LAYERS, ModelEntry
from .errors import MOST_PROBLEMS, TOO_MANY_PROBLEMS, CatalogError
from .kind_words import At, Every, GateWords, Rope, RopeWords, Yarn
from .kinds import KINDS, EngineFacts, ExpertsKind, LayerKind, MLAKind, MLPKind
from .published import QuantKind, problems_of
from .values import wrong_values

LARGEST_FILE = 1 << 20
"""Bytes. The largest models.toml read: some twenty times a hundred models."""

MOST_KEY_PARTS = 32
"""Parts of one dotted key. tomllib takes time in the square of them: a file of dots would keep it busy for an hour."""

_LONG_KEY = re.compile(
    # A part of a key starts where no other goes on, so that every character is looked at a bounded number of times.
    r"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){"""
    rf"{MOST_KEY_PARTS}}}"
)


class _WrongValueError(ValueError):
    """A value of the wrong type or form; the text is the problem."""


_TABLES = (*KINDS.values(), MLPKind, ExpertsKind, QuantKind, EngineFacts, Every, GateWords, RopeWords, Yarn)


@functools.cache
def make_converter() -> cattrs.Converter:
    """The converter for models.toml values, made once. Numbers, texts and flags are taken as written, never coerced."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook(int, _exact_int)
    converter.register_structure_hook(float, _exact_float)
    converter.register_structure_hook(str, _exact_str)
    converter.register_structure_hook(bool, _exact_bool)
    converter.register_structure_hook_func(_is_literal, _one_of)
    converter.register_structure_hook_func(_is_count_or_word, _count_or_word)
    converter.register_structure_hook_func(lambda t: t == At, lambda value, _: _at(converter, value))
    converter.register_structure_hook_func(lambda t: t == LayerKind, lambda value, _: _layer_kind(converter, value))
    converter.register_structure_hook_func(_is_any, lambda value, _: value)
    converter.register_structure_hook_func(lambda t: t == Rope, lambda value, _: _rope(converter, value))
    for cls in _TABLES:
        converter.register_structure_hook(cls, make_dict_structure_fn(cls, converter))
    return converter


@functools.cache
def _make_writer() -> cattrs.Converter:
    """The converter back, made once; what only reads does not wait for it."""
    converter = cattrs.Converter()
    for cls in _TABLES:
        converter.register_unstructure_hook(cls, make_dict_unstructure_fn(cls, converter, _cattrs_omit_if_default=True))
    converter.register_unstructure_hook(
        ModelEntry,
        make_dict_unstructure_fn(ModelEntry, converter, _cattrs_omit_if_default=True, name=override(omit=True)),
    )
    return converter


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) in (Literal,)


def _is_any(kind: Any) -> bool:
    return bool(kind == Any)


def _exact_int(value: Any, _: Any) -> int:
    if type(value) is not int:
        raise _WrongValueError(f"expected a whole number, got {shown(value)}")
    if abs(value) >= 1 << 63:
        raise _WrongValueError("expected a whole number of at most 64 bits, as TOML has it")
    return value


def _exact_float(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise _WrongValueError(f"expected a number, got {shown(value)}")
    if type(value) is int:
        _exact_int(value, int)
    return float(value)


def _exact_str(value: Any, _: Any) -> str:
    if type(value) is not str:
        raise _WrongValueError(f"expected a text, got {shown(value)}")
    return value


def _exact_bool(value: Any, _: Any) -> bool:
    if type(value) is not bool:
        raise _WrongValueError(f"expected true or false, got {shown(value)}")
    return value


def _one_of(value: Any, kind: Any) -> Any:
    words = get_args(kind)
    if type(value) is not str or value not in words:
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        raise _WrongValueError(f"expected {' or '.join(map(repr, words))}, got {shown(value)}{hint}")
    return value


def _is_count_or_word(kind: Any) -> bool:
    parts = get_args(kind)
    return int in parts and any(map(_is_literal, parts))


def _count_or_word(value: Any, kind: Any) -> Any:
    words = [word for part in get_args(kind) if _is_literal(part) for word in get_args(part)]
    if type(value) is int:
        return _exact_int(value, int)
    if type(value) is str and value in words:
        return value
    raise _WrongValueError(f"expected a whole number or {' or '.join(map(repr, words))}, got {shown(value)}")


def _at(converter: cattrs.Converter, value: Any) -> Any:
    if isinstance(value, dict):
        every = converter.structure(value, Every)
        if every.step < 1 or every.start < 0:
            raise _WrongValueError(f"expected a step of at least 1 and a start of at least 0, got {shown(value)}")
        return every
    if isinstance(value, list):
        if len(value) > MOST_LAYERS:
            raise _WrongValueError(f"expected at most {MOST_LAYERS} layers, got {len(value)}")
        return converter.structure(value, list[int])
    if type(value) is not str or value not in ("all", "rest"):
        raise _WrongValueError(f'expected "all", "rest", a list of layers or {{start, step}}, got {shown(value)}')
    return value


def _rope(converter: cattrs.Converter, value: Any) -> Any:
    if isinstance(value, dict):
        return converter.structure(value, RopeWords)
    if value is not None and value != "none":
        raise _WrongValueError(f'expected {{interleaved = ...}} or "none", got {shown(value)}')
    return value


def _layer_kind(converter: cattrs.Converter, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _WrongValueError(f"expected a table, got {shown(value)}")
    family = value.get("family")
    if not isinstance(family, str) or family not in KINDS:
        hint = did_you_mean(family, KINDS) if isinstance(family, str) else ""
        got = shown(family) if "family" in value else f"none, and the keys {shown([*value])}"
        raise _WrongValueError(f"family: expected one of {', '.join(KINDS)}, got {got}{hint}")
    return converter.structure(value, KINDS[family])


# ---- reading ---------------------------------------------------------------------------------------------------------


More: TypeAlias = Callable[[Mapping[str, ModelEntry]], Sequence[str]]
"""What is wrong with entries beyond the file itself: asked of a file with mistakes too, so that none hides another."""


def read_file(path: str | Path, more: More | None = None) -> dict[str, ModelEntry]:
    """The entries of a models.toml file by name. `more` says what else is wrong, where something is.

    Raises:
        CatalogError: the file cannot be read, is no TOML, or holds mistakes; all are listed.
        ArgumentError: this is no path.
    """
    expect("path", path, (str, PathLike), "the path of a models file")
    path = Path(path)
    try:
        # One byte more than allowed tells a file that is too large without reading it whole.
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        raise CatalogError(str(path), [f"cannot be read: {getattr(error, 'strerror', None) or error}"]) from None
    return parse(data, str(path), more)


def parse(data: bytes | str, file: str = "models.toml", more: More | None = None) -> dict[str, ModelEntry]:
    """The entries of a models.toml text by name; `file` is what messages call it.

    Raises:
        CatalogError: as `read_file`.
        ArgumentError: this is no text.
    """
    expect("data", data, (bytes, str), "the text of a models file")
    if len(data) > LARGEST_FILE:
        raise CatalogError(file, [f"larger than {LARGEST_FILE >> 20} MiB, which no models file is"])
    try:
        # Editors of Windows begin a file with a byte-order mark, which TOML does not know.
        text = (data.decode("utf-8") if isinstance(data, bytes) else data).removeprefix("\ufeff")
        if _LONG_KEY.search(text):
            raise ValueError(f"a key has more than {MOST_KEY_PARTS} parts")
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise CatalogError(file, [f"is not UTF-8: byte {error.start} is {data[error.start]!r}"]) from None
    except RecursionError:
        raise CatalogError(file, ["is nested too deeply to be a models file"]) from None
    except ValueError as error:
        raise CatalogError(file, [f"is not TOML: {error}"]) from None
    return structure(document, file, more)


def structure(document: Mapping[str, Any], file: str, more: More | None = None) -> dict[str, ModelEntry]:
    """The entries of a parsed document.

    Raises:
        CatalogError: as `read_file`.
        ArgumentError: this is no document.
    """
    expect("document", document, Mapping, "a parsed TOML document")
    problems = [
        f"unknown table {shown(name)}{did_you_mean(name, ['models'])}; models stand under [models.<name>] @ $"
        for name in list(document)[:TOO_MANY_PROBLEMS]
        if name != "models"
    ]
    tables = document.get("models", {})
    if not isinstance(tables, dict):
        raise CatalogError(file, [*problems, f"expected tables [models.<name>], got {shown(tables)} @ $.models"])
    entries: dict[str, ModelEntry] = {}
    for name, table in tables.items():
        if len(problems) >= TOO_MANY_PROBLEMS:
            break
        where = f"$.models.{name}"
        if not isinstance(table, dict):
            problems.append(f"expected a table, got {shown(table)} @ {where}")
            continue
        if not _is_name(name):
            problems.append(f"a model's name is lower-case without blanks, got {shown(name)} @ {where}")
        if "name" in table:
            problems.append(f"the table's own name is the model's name; remove this key @ {where}.name")
        try:
            entry = one(name, table)
        except (ClassValidationError, IterableValidationError) as error:
            problems += transform_error(error, path=where, format_exception=_format)
            entries[name] = head(name, table)
            continue
        problems += [f"{problem} @ {where}" for problem in contradictions(entry)]
        entries[name] = entry
    if problems:
        also = () if more is None or len(problems) >= TOO_MANY_PROBLEMS else more(entries)
        raise CatalogError(file, [*problems, *also])
    return entries


def one(name: str, table: Mapping[str, Any]) -> ModelEntry:
    """The entry of one table, as far as each value alone tells.

    Raises:
        ClassValidationError: a value is not of its type, a key is missing or unknown.
    """
    entry: ModelEntry = make_converter().structure({**table, "name": name}, ModelEntry)
    return entry


def head(name: str, table: Mapping[str, Any]) -> ModelEntry:
    """What a table that is not structured says of its names, and names of others: its adapter, its engines, its layer classes."""
    adapter, engines, classes, hf_id, aliases = (
        table.get(key) for key in ("adapter", "engines", "layer_classes", "hf_id", "aliases")
    )
    return ModelEntry(
        name=name,
        adapter=adapter if isinstance(adapter, str) else name,
        source="",
        num_hidden_layers=1,
        hidden_size=1,
        rms_norm_eps=1.0,
        layers={},
        aliases=aliases if isinstance(aliases, list) and all(isinstance(alias, str) for alias in aliases) else [],
        hf_id=hf_id if isinstance(hf_id, str) else None,
        engines=engines if isinstance(engines, dict) else {},
        layer_classes=classes if isinstance(classes, dict) else {},
    )


def _is_name(text: str) -> bool:
    return text != "" and text == text.lower() and not any(c.isspace() for c in text)


def contradictions(entry: ModelEntry) -> list[str]:
    """What in an entry cannot be true, as sentences; empty for a good one."""
    if not 1 <= entry.attentions_per_layer <= 8:
        return [f"attentions_per_layer: expected 1 to 8, got {entry.attentions_per_layer}"]
    if not entry.layers:
        return ["layers: expected at least one kind of layer"]
    problems = [
        f"aliases: a model's name is lower-case without blanks, got {shown(alias)}"
        for alias in entry.aliases
        if not _is_name(alias)
    ]
    for name, kind in entry.layers.items():
        yarn = getattr(kind, "yarn", None)
        if yarn is not None and not (1 <= yarn.factor < float("inf") and 0 <= yarn.mscale_all_dim < float("inf")):
            problems.append(f"layers.{name}.yarn: expected a factor of at least 1 and an mscale_all_dim of at least 0")
        rope = kind.rope if isinstance(kind, MLAKind) else None
        if isinstance(rope, RopeWords) and not 0 < rope.attention_scaling < float("inf"):
            problems.append(f"layers.{name}.rope.attention_scaling: expected a number above 0")
    problems += wrong_values(entry)
    problems += problems_of(entry.quant)
    if problems:
        return problems
    # An engine's own epsilons are checked above, and change nothing else.
    try:
        entry.first_of_each_kind()
    except LayerfuseError as error:
        problems += getattr(error, "problems", (str(error),))
    return problems


def _format(error: BaseException, kind: type | None) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        known = [a.name for a in attrs.fields(error.cl) if a.name != "name"]
        extra = sorted(error.extra_fields)
        more = f"; and {len(extra) - MOST_PROBLEMS} more" if len(extra) > MOST_PROBLEMS else ""
        unknown = "; ".join(f"unknown key {shown(key)}{did_you_mean(key, known)}" for key in extra[:MOST_PROBLEMS])
        return f"{unknown}{more} (known: {', '.join(known)})"
    if isinstance(error, KeyError):
        return f"required key {error.args[0]!r} is missing"
    if isinstance(error, _WrongValueError):
        return str(error)
    return f"expected {getattr(kind, '__name__', kind)}, got something else ({error})"


def unstructure(entries: Mapping[str, ModelEntry]) -> dict[str, Any]:
    """The document that `structure` reads back into the same entries, ready for a TOML writer."""
    converter = _make_writer()
    return {"models": {name: _without_none(converter.unstructure(entry)) for name, entry in entries.items()}}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value
