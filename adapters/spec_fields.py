"""What a single field of a spec may hold, and the check of all of them when a spec is made.

The kind is data on the field, so that reading a layer, structuring TOML and validating all follow the same table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import attrs
from attrs import field, frozen

from .errors import FOREIGN, SpecError, shown

S = TypeVar("S")

LARGEST = 2**31 - 1
"""The largest count or width accepted: kernels index with int32, and more than that is a typing error."""


ACTIVATIONS = ("silu", "sigmoid")
"""Output-gate activations of gated norms: silu for Qwen, sigmoid for Kimi and GLM."""

MLP_ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "situ",
    "swiglu_oai",
    "swiglu_step",
    "xielu",
)
"""Activations of an MLP, of its gate where it has one. `relu2` is max(x, 0) squared (arXiv 2109.08668). `quick_gelu` is x * sigmoid(1.702 x).
`situ` is Kimi-K3's: beta * tanh(gate / beta) * sigmoid(gate), and a bounded up. `swiglu_oai` is that of gpt-oss and MiniMax-M3:
gate * sigmoid(1.702 gate), and up + 1. `swiglu_step` is Step-5's: silu(gate) at most a limit, and up within it. `xielu` has weights of its own (arXiv 2411.13010)."""

ROPE_TABLES = ("none", "cos_sin", "cos_and_sin", "values")
"""Where the cos and sin of a rope come from, see `RopeSpec.table`."""

LINEAR_STYLES = ("column", "row", "replicated")
"""Which side of a linear ranks share, see `LinearSpec.style`."""

WEIGHT_SCHEMES = ("plain", "tensor", "channel", "block", "group", "mx")
"""What shares a scale in a weight, see `WeightSpec.scheme`."""

_WORDS = {
    "activation": ACTIVATIONS,
    "mlp_activation": MLP_ACTIVATIONS,
    "rope_table": ROPE_TABLES,
    "linear_style": LINEAR_STYLES,
    "weight_scheme": WEIGHT_SCHEMES,
}

_OPTIONAL = (
    "optional_count",
    "optional_index",
    "optional_norm",
    "optional_gated_norm",
    "optional_positive",
    "optional_flag",
    "window",
    "module_path",
    "optional_text",
    "activation_quant",
    "optional_rope",
    "linear_style",
    "optional_weight",
    "optional_linear",
    "optional_mlp",
    "optional_experts",
    "linear_activation",
    "block",
)
"""The kinds of which None is a value."""

GATED = ("gated_norm", "optional_gated_norm")
"""The kinds that are gated norms."""

_SEVERAL = ("norms", "linears", "paths", "counts", "block")
"""The kinds that are tuples."""

NESTED: dict[str, type] = {
    "text": str,
    "optional_text": str,
    "module_path": str,
    "paths": str,
    "counts": int,
    "block": int,
}
"""The class of each kind that is no number, word or flag; the spec types enter themselves."""


def of_kind(kind: str, *, goes_with: str | None = None, **kwargs: Any) -> Any:
    """A field of this kind, and the field whose None makes it None too."""
    return field(metadata={"kind": kind, "goes_with": goes_with}, **kwargs)


def count() -> Any:
    """A whole number of at least 1: heads, widths."""
    return of_kind("count")


def width_or_zero() -> Any:
    """A whole number of at least 0: a rope dimension may be 0 (no rope at all)."""
    return of_kind("width_or_zero")


def optional_count() -> Any:
    """A count, or None where the architecture has no such thing. None is an answer, not a gap."""
    return of_kind("optional_count")


def goes_with(attribute: attrs.Attribute[Any]) -> str | None:
    """The field whose None makes this one None too (the query norm goes with the query latent)."""
    partner: str | None = attribute.metadata.get("goes_with")
    return partner


def kind_of(attribute: attrs.Attribute[Any]) -> str:
    """The kind a spec field was declared with."""
    kind: str = attribute.metadata["kind"]
    return kind


_KINDS_IN: dict[type[Any], tuple[tuple[str, str], ...]] = {}


def kinds_in(spec: type[Any]) -> tuple[tuple[str, str], ...]:
    """The fields of a class with their kinds. Kept, as it is asked of every spec that is made."""
    found = _KINDS_IN.get(spec)
    if found is None:
        found = _KINDS_IN[spec] = tuple((a.name, kind_of(a)) for a in attrs.fields(spec) if "kind" in a.metadata)
    return found


def problem_of(kind: str, value: Any) -> str | None:
    """Why `value` is no legal value of this kind, or None if it is."""
    if value is None and kind in _OPTIONAL:
        return None
    if kind in ("count", "optional_count", "width_or_zero", "index", "optional_index", "window"):
        least = 0 if kind in ("width_or_zero", "index", "optional_index") else 1
        if type(value) is not int:
            return f"expected a whole number, got {shown(value)} ({type(value).__name__})"
        if value < least:
            return f"expected at least {least}, got {shown(value)}"
        if value > LARGEST:
            return f"expected at most {LARGEST}, got {shown(value)}"
        return None
    if kind in ("positive", "optional_positive", "number"):
        # What `as_float` could not convert is no number, or one beyond every float.
        if type(value) is not float or not math.isfinite(value):
            return f"expected a finite number, got {shown(value)}"
        if kind != "number" and value <= 0:
            return f"expected more than 0, got {shown(value)}"
        return None
    if kind in ("flag", "optional_flag"):
        return None if type(value) is bool else f"expected true or false, got {shown(value)}"
    if kind in _WORDS:
        fine = type(value) is str and value in _WORDS[kind]
        return None if fine else f"expected one of {', '.join(_WORDS[kind])}, got {shown(value)}"
    expected = NESTED[kind]
    if kind in _SEVERAL:
        fine = type(value) is tuple and all(issubclass(type(one), expected) for one in value)
        return None if fine else f"expected a tuple of {expected.__name__}, got {shown(value)}"
    if kind == "linear_activation" and type(value) is str:
        return None
    # Not isinstance: that asks the value for its class, which is the value's own code.
    return None if issubclass(type(value), expected) else f"expected {expected.__name__}, got {shown(value)}"


def as_float(value: Any) -> Any:
    """A whole number as a float; anything else, and a number beyond every float, unchanged for the check to refuse."""
    try:
        return float(value) if type(value) is int else value
    except OverflowError:
        return value


@frozen(kw_only=True)
class Checked:
    """Runs the per-field checks, then the cross-field ones, and raises all problems as one SpecError."""

    def __attrs_post_init__(self) -> None:
        wrong = {
            name: problem
            for name, kind in kinds_in(type(self))
            if (problem := problem_of(kind, getattr(self, name))) is not None
        }
        # Cross-field rules only make sense on legal values.
        problems = [f"{name}: {problem}" for name, problem in wrong.items()] or list(self._contradictions())
        if problems:
            raise SpecError(type(self).__name__, problems)

    def _contradictions(self) -> Iterator[str]:
        yield from ()


def made(spec: Callable[..., S], values: Mapping[str, Any], parts: tuple[int, ...] = ()) -> S:
    """The spec of these values, which is made and checked once: layers are read often, and say the same.

    Args:
        spec: its class, or what makes it.
        values: of its fields.
        parts: the identities of those specs in it that are equal to others which say more or less (who reads a norm).

    Raises:
        SpecError: the values are illegal, or contradict each other.
    """
    kept: Any = spec
    try:
        found: S = _made(kept, parts, **values)
    except SpecError:
        raise
    except FOREIGN:  # a value that nothing can be kept under, which the check has words for
        return spec(**values)
    return found


@lru_cache(maxsize=16384, typed=True)
def _made(spec: Any, _parts: tuple[int, ...], /, **values: Any) -> Any:
    # What is kept holds its parts, so that no other may come to have their identities.
    return spec(**values)
