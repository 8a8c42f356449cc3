"""How vLLM's fp8 linears take what was quantised in front of them: at their quantiser, or at the product that they quantise inside of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...adapters.activation_quant import ActivationQuant
from ...adapters.linear_quant import quantiser_of
from ..handover import Reader, Wanted, static_scale, why_products_apart, why_quantised_apart
from ..hooks import Hook
from ..native import native, native_methods
from ..whose import kind_of
from . import inside

PRODUCT = "apply_block_scaled_mm"
"""The method of a kernel that quantises inside of its product."""


def reader_of(linear: Any, quant: ActivationQuant, quantiser: Hook) -> Reader | None:
    """How a linear can be given fp8; None where nothing of ours can stand there.

    Args:
        linear: vLLM's.
        quant: what it does.
        quantiser: a method of vLLM's class for that.

    Raises:
        NotNativeError: what runs there is not vLLM's own code.
    """
    place = quantiser_of(linear)
    if quant.inside:
        if type(place).__module__ != inside.KERNELS or inside.why_not() is not None:
            return None
        make = partial(_product, place, quant.use_ue8m0)
        return Reader(place=place, method=PRODUCT, make=make, stood=native_methods((place, PRODUCT)))
    scale, known = static_scale(linear, quant.scheme)
    if not known or kind_of(place) != quantiser.cls:
        return None
    make = partial(_quantiser, place, scale)
    return Reader(place=place, method="forward", make=make, stood=native(place), scale=scale)


def _quantiser(place: Any, static: Tensor | None, wanted: Wanted) -> Callable[..., Any]:
    cls = type(place)

    def forward(x: Tensor, scale: Any = None, scale_ub: Any = None, *args: Any, **kwargs: Any) -> Any:
        def own() -> Any:
            return cls.forward(place, x, scale, scale_ub, *args, **kwargs)

        given = wanted(x) if scale is static and scale_ub is None else None
        # Of several linears with static scales of their own, the op has quantised for one.
        if given is None or (static is not None and given.scales is not static):
            return own()
        return wanted.taken(given, own, lambda: (given.values, given.scales), why_quantised_apart)

    return forward


def _product(place: Any, powers_of_two: bool, wanted: Wanted) -> Callable[..., Any]:
    cls = type(place)

    def product(A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:  # noqa: N803 (named as vLLM names them)
        def own() -> Any:
            return getattr(cls, PRODUCT)(place, A, B, As, Bs)

        given = wanted(A)
        if given is None:
            return own()
        ours = partial(inside.product, place, given.values, given.scales, B, Bs, powers_of_two)
        return wanted.taken(given, own, ours, why_products_apart)

    return product
