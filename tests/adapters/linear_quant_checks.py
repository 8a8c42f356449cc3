"""What the tests of quantised linears share."""

from __future__ import annotations

from typing import Any

from layerfuse.adapters import ActivationQuant, activation_quant_of, describe_linear_quant

PER_TOKEN = ActivationQuant()
GROUP = ActivationQuant(group_size=128)
STATIC = ActivationQuant(fixed="static")


def check(linear: Any, expected: ActivationQuant | str | None) -> None:
    """The answer, or a sentence that begins with the linear's class and holds these words."""
    described = describe_linear_quant(linear)
    if isinstance(expected, str):
        assert isinstance(described, str) and expected in described
        assert described.startswith(type(linear).__name__)
        assert activation_quant_of(linear) is None
    else:
        assert described == expected
        assert activation_quant_of(linear) == expected
