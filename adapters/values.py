"""What stands on a layer, as the kind of field that it is read for: tensors and numpy's numbers as numbers, -1 as no window.

What means nothing is left as it is, for the check of the field to refuse it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .conversions import is_one_number, mlp_activation, whole
from .errors import FOREIGN


def same(value: Any) -> Any:
    """Unchanged."""
    return value


def _window(value: Any) -> Any:
    """None, -1 and (-1, -1) all mean off; a pair counts the tokens before and after the current one."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        before, after = map(whole, value)
        if type(before) is not int or type(after) is not int:
            return value
        return None if before == -1 else before + 1 if after == 0 else value
    value = whole(value)
    return None if type(value) is int and value == -1 else value


def _activation(value: Any) -> Any:
    return "silu" if type(value) is str and value == "swish" else value


def _number(value: Any) -> Any:
    if type(value) is float:
        return value
    try:
        # A text has no __float__, though float() takes it.
        converts = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
        return float(value) if converts and type(value) is not bool and is_one_number(value) else value
    except FOREIGN:  # no number, or without data; the spec refuses it by name
        return value


VALUES: dict[str, Callable[[Any], Any]] = {
    "count": whole,
    "optional_count": whole,
    "width_or_zero": whole,
    "index": whole,
    "optional_index": whole,
    "window": _window,
    "activation": _activation,
    "mlp_activation": mlp_activation,
    "positive": _number,
    "optional_positive": _number,
    "number": _number,
}
"""By kind of field; the values of other kinds are read as they are."""

UNCHANGED: dict[Callable[[Any], Any], type] = {whole: int, _number: float}
"""Of which type a value is that needs no change: most are, and a layer is read often."""
