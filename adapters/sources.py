"""Where a spec field is read: the words that adapters and models.toml share.

A source is an attribute path, a list of paths tried in order, a constant, or a norm module. Both Python adapters and
TOML tables are written in these words and parsed by `parse_source`.

    "num_heads"                         an attribute of the layer
    "q_a_layernorm.variance_epsilon"    of a child module; a mapping's key or a sequence's index may be a step too
    "layers.-1.hidden_size"             of the last one in a sequence
    "o_proj.in_features / head_dim"     a quotient of two paths, which must be exact
    ["scaling", "scale"]                the first of these that exists (None and 0 are values, not gaps)
    {const = "sigmoid"}                 a fact about the class that no attribute says; {const = "none"} is None
    {path = "sinks", as = "present"}    a path whose value is converted, see CONVERSIONS
    {path = "sliding_window", where = "is_sliding"}    a path that counts where another says so; None elsewhere
    {path = "window", where = "kind", is = "local"}    the same, where the other says this
    {name_as = "name_index"}            the layer's own name in its model, converted: what no attribute says
    {module = "o_norm", activation = {const = "sigmoid"}, ...}    a norm, read from that child module
    {module = "q_a_layernorm", consumers = ["q_b_proj"]}    and the linears that read its result, as far as a layer has them
    {module = "post_attention_layernorm", producers = ["self_attn.o_proj"]}    and those whose result is added in front of it
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from attrs import field, frozen

from .conversions import CONVERSIONS, whole
from .errors import FOREIGN, FactsError, UnreadableError, cut, did_you_mean, said, shown
from .pipeline import ELSEWHERE, stands_for_missing

_STEP = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,4}|-1")
_LONGEST_PATH = 12
_SIDES = ("out_features", "in_features")


class _Absent:
    """Nothing of it can be asked for."""


ABSENT: Any = _Absent()
"""What a place finds that does not exist. Where several are tried, or one is passed over, an error for each would take most of a reading."""


@frozen
class Path:
    """An attribute path such as `self_attn.q_a_layernorm.variance_epsilon`."""

    steps: tuple[str, ...]
    _keys: tuple[str | int, ...] = field(init=False, eq=False, repr=False)

    @_keys.default
    def _parsed(self) -> tuple[str | int, ...]:
        return tuple(int(step) if is_index(step) else step for step in self.steps)

    _text: str = field(init=False, eq=False, repr=False)

    @_text.default
    def _joined(self) -> str:
        return ".".join(self.steps)

    def __str__(self) -> str:
        return self._text

    def __truediv__(self, divisor: Path) -> Quotient:
        return Quotient(self, divisor)

    def find(self, obj: Any) -> Any:
        """As `read`, but ABSENT where it leads nowhere, and what the layer's own code raises comes through."""
        for key in self._keys:
            cls: Any = type(obj)
            try:
                obj = getattr(obj, key) if isinstance(key, str) and not has_keys(cls) else obj[key]
            except (AttributeError, LookupError):
                return ABSENT
        return obj

    def read(self, obj: Any) -> Any:
        """The value at the end of the path.

        Raises:
            UnreadableError: a step does not exist, or leads through None.
        """
        try:
            found = self.find(obj)
            if found is not ABSENT:
                return found
        except FOREIGN:
            pass
        return self._refused(obj)

    def _refused(self, obj: Any) -> Any:
        """The same, step by step, for what is to be said of the one that leads nowhere."""
        for depth, key in enumerate(self._keys):
            cls: Any = type(obj)
            try:
                obj = getattr(obj, key) if isinstance(key, str) and not has_keys(cls) else obj[key]
            except FOREIGN as error:
                if obj is None:
                    raise UnreadableError(f"{self}: {'.'.join(self.steps[:depth])} is None") from None
                if not isinstance(
                    error, (AttributeError, LookupError)
                ):  # a property of the layer that fails in its own way
                    raise UnreadableError(f"{self}: reading {self.steps[depth]!r} raised {said(error)}") from error
                why = ELSEWHERE if stands_for_missing(obj) else _why_not(cls, self.steps[depth])
                raise UnreadableError(f"{self}: {type(obj).__name__} {why}") from None
        return obj


def _why_not(cls: type, step: str) -> str:
    """In a module an AttributeError inside of a property comes out as if there were no such property."""
    return f"has a property {step!r} that raised" if hasattr(cls, step) else f"has no {step!r}"


def is_index(step: str) -> bool:
    """Whether a step is the index into a sequence, and no name."""
    return step[0] in "-0123456789"


@lru_cache(maxsize=1024)
def has_keys(cls: Hashable) -> bool:
    """Whether the steps of a path into an object of this class are keys, and no attributes."""
    return isinstance(cls, type) and issubclass(cls, Mapping)


@frozen
class Weight(Path):
    """A linear module whose weight tells the sharding, and along which of its features the heads lie.

    A weight that is cut along the others gives every rank all heads: transformers shards the projections of its gated
    delta nets by columns and gathers what comes out.
    """

    side: str | None = None

    def __str__(self) -> str:
        return f"{self._text}.{self.side}" if self.side else self._text

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of the weight, (out_features, in_features), along which a cut shares the heads."""
        return (0, 1) if self.side is None else (_SIDES.index(self.side),)


class _Place:
    """A place whose answer is worked out."""

    def read(self, obj: Any) -> Any:
        """The answer.

        Raises:
            UnreadableError: there is none.
        """
        raise NotImplementedError

    def find(self, obj: Any) -> Any:
        """As `read`, but ABSENT where there is none."""
        try:
            return self.read(obj)
        except UnreadableError:
            return ABSENT


@frozen
class Quotient(_Place):
    """The exact quotient of two paths, for layers that hold a width but no count."""

    dividend: Path
    divisor: Path

    def __str__(self) -> str:
        return f"{self.dividend} / {self.divisor}"

    def read(self, obj: Any) -> Any:
        """The quotient.

        Raises:
            UnreadableError: a path does not exist, or the division leaves a remainder.
        """
        dividend, divisor = whole(self.dividend.read(obj)), whole(self.divisor.read(obj))
        if type(dividend) is not int or type(divisor) is not int or divisor == 0 or dividend % divisor:
            raise UnreadableError(f"{self}: {shown(dividend)} / {shown(divisor)} is no whole number")
        return dividend // divisor


@frozen
class Const:
    """A fact about the class itself."""

    value: Any

    def __str__(self) -> str:
        return f"const {shown(self.value)}"

    def read(self, _: Any) -> Any:
        """The constant, whatever the layer."""
        return self.value

    find = read


@frozen
class Converted(_Place):
    """A path whose value means the field in another notation."""

    path: Path | Quotient
    convert: str

    def __str__(self) -> str:
        return f"{self.path} as {self.convert}"

    def read(self, obj: Any) -> Any:
        """The converted value.

        Raises:
            UnreadableError: the path does not exist, or the value is not in that notation.
        """
        return CONVERSIONS[self.convert](self.path.read(obj))


@frozen
class Where(_Place):
    """A path that counts where another one has a certain value. Elsewhere the field is None."""

    path: Path | Quotient
    where: Path | Quotient
    value: Any = True

    def __str__(self) -> str:
        return f"{self.path} where {self.where} is {shown(self.value)}"

    def read(self, obj: Any) -> Any:
        """The value of the path, or None.

        Raises:
            UnreadableError: the other path does not exist, or, where it has that value, the path itself.
        """
        found = self.where.read(obj)
        return self.path.read(obj) if type(found) is type(self.value) and found == self.value else None


@frozen
class Named(_Place):
    """What the layer's name in its model says, as the caller gives it: for modules that know nothing of their place."""

    convert: str

    def __str__(self) -> str:
        return f"the layer's name as {self.convert}"

    def read(self, name: Any) -> Any:
        """The converted name. Unlike the other sources' argument it is no layer.

        Raises:
            UnreadableError: the name does not say it, or none was given.
        """
        if not isinstance(name, str) or not name:
            raise UnreadableError(f"{self}: no name was given, pass path=")
        return CONVERSIONS[self.convert](name)


Source: TypeAlias = Path | Quotient | Const | Converted | Where | Named
"""One place to look."""


@frozen
class NormSource:
    """A norm module and where its own fields are, relative to it."""

    module: Path
    fields: tuple[tuple[str, tuple[Source, ...]], ...]
    consumers: tuple[Path, ...] = ()
    "The linears that read its result, relative to the layer. Those that a layer lacks are passed over."
    producers: tuple[Path, ...] = ()
    "The linears whose result joins the residual stream in front of it, in the same words."
    where: tuple[Source, ...] = ()
    "The layer's flag that is false where it norms nothing, of a norm that may be absent."
    layer_epsilon: tuple[Source, ...] = ()
    "The epsilon, relative to the layer, of a norm that holds none."

    @property
    def gated(self) -> bool:
        """Whether this describes a gated norm."""
        return self.says("activation")

    @property
    def is_layer_norm(self) -> bool:
        """Whether this describes a LayerNorm of a class of its own."""
        return self.says("has_bias")

    def says(self, field: str) -> bool:
        """Whether it says where this field of a norm is."""
        return any(name == field for name, _ in self.fields)

    def __str__(self) -> str:
        return f"norm at {self.module}"


# ---- parsing ---------------------------------------------------------------------------------------------------------


def const(value: Any) -> dict[str, Any]:
    """A constant, in the shared words."""
    return {"const": "none" if value is None else value}


def below(prefix: str, words: Any) -> Any:
    """The same places, seen from an object that holds the layer at `prefix`."""
    if isinstance(words, str):
        return " / ".join(f"{prefix}.{path.strip()}" for path in words.split("/"))
    if isinstance(words, Mapping):
        return {name: below(prefix, word) if name == "path" else word for name, word in words.items()}
    return [below(prefix, word) for word in words]


def norm(module: str, **words: Any) -> dict[str, Any]:
    """A plain RMSNorm module; `weight_offset=const(1.0)` for a zero-centred one, `consumers=[...]` the linears that read it."""
    return {"module": module, **words}


def gated_norm(module: str, **words: Any) -> dict[str, Any]:
    """A gated RMSNorm module. Norm first, one group and an `activation` attribute, unless `words` say otherwise.

    `where` is the layer's flag for it, where a layer may have none.
    """
    return {
        "module": module,
        "activation": "activation",
        "norm_before_gate": const(True),
        "group_size": const(None),
        **words,
    }


def layer_norm(module: str, **words: Any) -> dict[str, Any]:
    """A LayerNorm module of a class of its own; torch's is told by its class. With a weight and no bias, unless `words` say otherwise."""
    return {"module": module, "has_weight": const(True), "has_bias": const(False), **words}


def parse_path(text: str, field: str) -> Path | Quotient:
    """`a.b`, or `a.b / c`.

    Raises:
        FactsError: not of that form.
    """
    try:
        return _path(text)
    except FactsError as error:
        raise FactsError(f"{field}: {error}") from None


@lru_cache(maxsize=4096)  # the classes of many models say the same
def _path(text: str) -> Path | Quotient:
    parts = [part.strip() for part in text.split("/")]
    if len(parts) > 2:
        raise FactsError(f'"{cut(text)}" divides more than once')
    paths = []
    for part in parts:
        steps = tuple(part.split("."))
        if len(steps) > _LONGEST_PATH or not all(_STEP.fullmatch(step) for step in steps):
            raise FactsError(
                f'"{cut(text)}" is no attribute path (letters, digits, dots; -1 for the last of a sequence; at most one " / ")'
            )
        if any(step.startswith("__") for step in steps):
            raise FactsError(f'"{cut(text)}" reads a dunder attribute, which no layer says anything with')
        paths.append(Path(steps))
    return paths[0] if len(paths) == 1 else paths[0] / paths[1]


def parse_weight(text: str, field: str) -> Weight:
    """A linear module, `o_proj`, or the side of it on which the heads lie, `o_proj.in_features`.

    Raises:
        FactsError: not the path of a module.
    """
    path = parse_path(text, field)
    if not isinstance(path, Path):
        raise FactsError(f"{field}: expected the paths of linear modules, got {shown(text)}")
    if path.steps[-1] in _SIDES and len(path.steps) > 1:
        return Weight(path.steps[:-1], path.steps[-1])
    return Weight(path.steps)


def parse_source(words: Any, field: str) -> tuple[Source, ...]:
    """The places to look, in order, from the shared words.

    Raises:
        FactsError: words that mean nothing, naming `field`.
    """
    if isinstance(words, str):
        return (parse_path(words, field),)
    if isinstance(words, Mapping):
        return (_parse_table(words, field),)
    if isinstance(words, Sequence) and words:
        return tuple(source for word in words for source in parse_source(word, field))
    raise FactsError(
        f"{field}: expected an attribute path, a list of them, {{const = ...}} or {{path = ..., as = ...}}, got {shown(words)}"
    )


def _parse_table(words: Mapping[str, Any], field: str) -> Source:
    if set(words) == {"const"}:
        value = words["const"]
        if value is not None and type(value) not in (bool, int, float, str):
            raise FactsError(f"{field}: a constant is a number, a text or a flag, got {shown(value)}")
        return Const(None if value == "none" else value)
    if set(words) == {"path", "as"}:
        convert = _conversion(words["as"], field)
        if not isinstance(words["path"], str):
            raise FactsError(f"{field}: path is a text, got {shown(words['path'])}")
        return Converted(parse_path(words["path"], field), convert)
    if {"path", "where"} <= set(words) <= {"path", "where", "is"}:
        paths = [words["path"], words["where"]]
        if not all(isinstance(path, str) for path in paths) or type(words.get("is", True)) not in (bool, int, str):
            raise FactsError(f"{field}: path and where are texts, is a flag, a number or a text, got {shown(words)}")
        path, where = (parse_path(each, field) for each in paths)
        return Where(path, where, words.get("is", True))
    if set(words) == {"name_as"}:
        return Named(_conversion(words["name_as"], field))
    raise FactsError(
        f"{field}: expected {{const = ...}}, {{path = ..., as = ...}}, {{path = ..., where = ...}} or {{name_as = ...}}, "
        f"got the keys {shown(sorted(map(str, words)))}"
    )


def _conversion(name: Any, field: str) -> str:
    if not isinstance(name, str) or name not in CONVERSIONS:
        raise FactsError(
            f"{field}: unknown conversion {shown(name)}{did_you_mean(name, CONVERSIONS)} "
            f"(known: {', '.join(CONVERSIONS)})"
        )
    return name


_NORM_DEFAULTS: dict[str, Any] = {
    # Every engine's norm holds its weight; the epsilon is called one or the other everywhere.
    "width": "weight.shape.0",
    "epsilon": ["variance_epsilon", "eps"],
    "weight_offset": const(0.0),
}
_GATED = ("activation", "norm_before_gate", "group_size")
_LAYER = ("has_weight", "has_bias")
AROUND = ("consumers", "producers")
_WHERE = "where"
_OF_LAYER = "layer_epsilon"

TORCH_NORM = (
    ("width", (Path(("weight", "shape", "0")),)),
    ("epsilon", (Path(("eps",)),)),
    ("weight_offset", (Const(0.0),)),
)
"""Where the fields of torch's own RMSNorm are: it may stand where a class's own norm, which has other names, usually does."""


TORCH_LAYER_NORM = (
    ("width", (Path(("normalized_shape", "0")),)),
    *TORCH_NORM[1:],
    ("has_weight", (Converted(Path(("weight",)), "present"),)),
    ("has_bias", (Converted(Path(("bias",)), "present"),)),
)
"""Those of torch's LayerNorm."""


@lru_cache(maxsize=512)
def torchs_norm(cls: Hashable) -> str | None:
    """The name of torch.nn's norm that this class is, or computes what it does; None of all others."""
    own: Any = cls
    for base in own.__mro__:
        if base.__name__ in ("RMSNorm", "LayerNorm") and base.__module__.startswith("torch.nn."):
            name: str = base.__name__
            return name if own.forward is base.forward else None
    return None


def parse_norm(words: Any, field: str, *, gated: bool) -> NormSource:
    """A norm module, from the shared words (a bare text is the module of a plain norm).

    Raises:
        FactsError: unknown keys, or a gated norm that does not say its gate.
    """
    if isinstance(words, str):
        words = {"module": words}
    if not isinstance(words, Mapping) or not isinstance(words.get("module"), str):
        raise FactsError(f'{field}: expected a norm, {{module = "...", ...}}, got {shown(words)}')
    allowed = ("module", *AROUND, *_NORM_DEFAULTS, _OF_LAYER, *((*_GATED, _WHERE) if gated else _LAYER))
    for word in words:
        if word not in allowed:
            raise FactsError(f"{field}: a norm has no {shown(word)}{did_you_mean(word, allowed)}")
    kind, needed = ("gated norm", _GATED) if gated else ("LayerNorm", _LAYER if any(w in words for w in _LAYER) else ())
    missing = [word for word in needed if word not in words]
    if missing:
        raise FactsError(f"{field}: a {kind} must also say its {', '.join(missing)}")
    module = parse_path(words["module"], field)
    if not isinstance(module, Path):
        raise FactsError(f"{field}: a norm's module is a path, not a quotient")
    said = {**_NORM_DEFAULTS, **{k: v for k, v in words.items() if k not in ("module", _WHERE, _OF_LAYER, *AROUND)}}
    if _OF_LAYER in words:
        del said["epsilon"]
    consumers, producers = (parse_linears(words.get(word, []), f"{field}.{word}") for word in AROUND)
    return NormSource(
        module,
        tuple((name, parse_source(source, f"{field}.{name}")) for name, source in said.items()),
        consumers=consumers,
        producers=producers,
        where=parse_source(words[_WHERE], f"{field}.{_WHERE}") if _WHERE in words else (),
        layer_epsilon=parse_source(words[_OF_LAYER], f"{field}.{_OF_LAYER}") if _OF_LAYER in words else (),
    )


def parse_linears(words: Any, field: str) -> tuple[Path, ...]:
    """The paths of linear modules, from the shared words.

    Raises:
        FactsError: this is no list of paths.
    """
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise FactsError(f"{field}: expected the paths of linear modules, got {shown(words)}")
    paths = [parse_path(word, field) for word in words]
    if not all(isinstance(path, Path) for path in paths):
        raise FactsError(f"{field}: a linear module is at a path, not at a quotient")
    return tuple(path for path in paths if isinstance(path, Path))
