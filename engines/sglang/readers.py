"""How SGLang's fp8 linears take what was quantised in front of them: as values and scales in the place of the plain tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...adapters.activation_quant import ActivationQuant
from ..handover import Reader, Wanted, static_scale, why_products_apart
from ..hooks import Hook
from ..native import native_methods
from ..process import once
from ..whose import kind_of
from . import products

RELOADED = "layerfuse: weights were loaded again, and linears have other static scales: what was quantised for them is not taken any more"


def reader_of(linear: Any, quant: ActivationQuant, method: Hook) -> Reader | None:
    """How a linear can be given fp8; None where nothing of ours can stand there.

    Args:
        linear: SGLang's.
        quant: what it does.
        method: SGLang's, that multiplies and takes a tuple.

    Raises:
        NotNativeError: what runs there is not SGLang's own code.
    """
    place, called = linear.quant_method, method.path.rpartition(".")[2]
    scale, known = static_scale(linear, quant.scheme)
    if not known or quant.inside or kind_of(place) != method.cls:
        return None
    make = partial(_apply, place, called, quant.scheme, scale)
    return Reader(place=place, method=called, make=make, stood=native_methods((place, called)), scale=scale)


def _apply(place: Any, called: str, scheme: str, static: Tensor | None, wanted: Wanted) -> Callable[..., Any]:
    cls = type(place)

    def apply(layer: Any, x: Any, bias: Tensor | None = None) -> Any:
        def multiply(given: Any) -> Any:
            return getattr(cls, called)(place, layer, given, bias)

        given = wanted(x) if isinstance(x, Tensor) else None
        # Of several linears with static scales of their own, the op has quantised by one.
        if given is None or (static is not None and given.scales is not static):
            return multiply(x)
        # A product in blocks gives bfloat16 where it is given fp8.
        if scheme == "group" and x.dtype != torch.bfloat16:
            return multiply(x)
        if scheme != "group" and layer._parameters.get("input_scale") is not static:
            once(logging.WARNING, RELOADED)
            return multiply(x)
        ours = (given.values, given.scales) if scheme == "group" else (given.values, given.scales, x.dtype)

        def own() -> Any:
            with products.left_out():
                return multiply(x)

        return wanted.taken(given, own, lambda: multiply(ours), why_products_apart)

    return apply
