"""How SGLang's fp8 linears take what was quantised in front of them: as values and scales in the place of the plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...adapters.activation_quant import ActivationQuant
from ..handover import Reader, Wanted, why_products_apart
from ..hooks import Hook
from ..native import native_methods


def reader_of(linear: Any, quant: ActivationQuant, method: Hook) -> Reader | None:
    """How a linear can be given fp8; None where nothing of ours can stand there.

    Args:
        linear: SGLang's.
        quant: what it does.
        method: SGLang's, that multiplies and takes a tuple.

    Raises:
        NotNativeError: what runs there is not SGLang's own code.
    """
    place = linear.quant_method
    cls = type(place)
    name, _, called = method.path.partition(".")
    scale = linear._parameters.get("input_scale") if quant.scheme == "static" else None
    absent = quant.scheme == "static" and (scale is None or scale.numel() != 1)
    if absent or quant.inside or (cls.__module__, cls.__qualname__) != (method.module, name):
        return None
    make = partial(_apply, place, called, quant.scheme, scale)
    return Reader(place=place, method=called, make=make, stood=native_methods((place, called)), scale=scale)


def _apply(place: Any, called: str, scheme: str, static: Tensor | None, wanted: Wanted) -> Callable[..., Any]:
    cls = type(place)

    def apply(layer: Any, x: Any, bias: Tensor | None = None) -> Any:
        def multiply(given: Any) -> Any:
            return getattr(cls, called)(place, layer, given, bias)

        given = wanted(x) if isinstance(x, Tensor) else None
        # A product in blocks gives bfloat16 where it is given fp8. Of several static scales, the op has quantised by one.
        refused = scheme == "group" and isinstance(x, Tensor) and x.dtype != torch.bfloat16
        if given is None or refused or (static is not None and given.scales is not static):
            return multiply(x)
        ours = (given.values, given.scales) if scheme == "group" else (given.values, given.scales, x.dtype)
        return wanted.taken(given, lambda: multiply(x), lambda: multiply(ours), why_products_apart)

    return apply
