"""What a fused norm has quantised, on its way to the linears behind it.

vLLM's code passes the norm's result on, and each linear quantises it for itself. So the norm's op gives that result too, and what it has
quantised waits here until the next such op: a linear that is given the same tensor takes it from here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from attrs import define, frozen
from torch import Tensor

from ...adapters.activation_quant import ActivationQuant
from . import inside, trial
from .hooks import Hook
from .native import Native, native, native_methods

PRODUCT = "apply_block_scaled_mm"
"""The method of a kernel that quantises inside of its product."""

Refuse: TypeAlias = Callable[[str, str], None]
"""Told of a site why what vLLM runs there gives something else."""


@define(eq=False)
class Given:
    """What the op of one norm gave in one call."""

    site: str
    normed: Tensor
    values: Tensor
    scales: Tensor
    taken: bool = False
    "Whether a linear has taken it."

    def is_of(self, site: str, x: Tensor) -> bool:
        """Whether a tensor is that norm's result. It is held here, so that no other can be at its place."""
        if self.site != site or x.data_ptr() != self.normed.data_ptr():
            return False
        return (x.shape, x.stride(), x.dtype) == (self.normed.shape, self.normed.stride(), self.normed.dtype)


class _Here(threading.local):
    """Of the thread: micro-batches have threads of their own."""

    last: Given | None = None


_here = _Here()


def give(site: str, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Keep the values and scales for the linears behind a site until the next call, and return the other results."""
    values, scales, normed, *others = results
    _here.last = Given(site, normed, values, scales)
    return (normed, *others)


@frozen(kw_only=True, eq=False)
class Reader:
    """Where a linear comes to what it reads in fp8."""

    place: Any
    "Its quantiser, or its kernel where that quantises inside of its product."
    method: str
    stood: Native
    powers_of_two: bool

    def stand(self, site: str, took: Callable[[str], None], refuse: Refuse) -> None:
        """Take what a site's op has quantised, where it is of what the linear reads.

        Args:
            site: the norm's.
            took: is told of the site when the first of its readers takes something.
            refuse: at the first time both ways are compared.
        """
        make = self._product if self.method == PRODUCT else self._quantiser
        setattr(self.place, self.method, make(site, took, refuse))

    def _quantiser(self, site: str, took: Callable[[str], None], refuse: Refuse) -> Callable[..., Any]:
        cls = type(self.place)
        wanted = _Wanted(site, took, refuse)

        def forward(x: Tensor, scale: Any = None, scale_ub: Any = None, *args: Any, **kwargs: Any) -> Any:
            def own() -> Any:
                return cls.forward(self.place, x, scale, scale_ub, *args, **kwargs)

            given = wanted(x) if scale is None and scale_ub is None else None
            if given is None:
                return own()
            return wanted.taken(given, own, lambda: (given.values, given.scales), _why_quantised_apart)

        return forward

    def _product(self, site: str, took: Callable[[str], None], refuse: Refuse) -> Callable[..., Any]:
        cls = type(self.place)
        wanted = _Wanted(site, took, refuse)

        def product(A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:  # noqa: N803 (named as vLLM names them)
            def own() -> Any:
                return getattr(cls, PRODUCT)(self.place, A, B, As, Bs)

            given = wanted(A)
            if given is None:
                return own()
            ours = partial(inside.multiply, given.values, given.scales, B, Bs, self.powers_of_two)
            return wanted.taken(given, own, ours, _why_products_apart)

        return product


def reader_of(place: Any, quantiser: Hook, quant: ActivationQuant) -> Reader | None:
    """How a linear can be given fp8; None where nothing of ours can stand there.

    Args:
        place: what quantises for it (`quantiser_of`).
        quantiser: a method of vLLM's class for that.
        quant: what it does.

    Raises:
        NotNativeError: what runs there is not vLLM's own code.
    """
    cls = type(place)
    if quant.inside:
        if cls.__module__ != inside.KERNELS or inside.why_not() is not None:
            return None
        stood = native_methods((place, PRODUCT))
        return Reader(place=place, method=PRODUCT, stood=stood, powers_of_two=quant.use_ue8m0)
    if (cls.__module__, cls.__qualname__) != (quantiser.module, quantiser.path.partition(".")[0]):
        return None
    return Reader(place=place, method="forward", stood=native(place), powers_of_two=quant.use_ue8m0)


class _Wanted:
    """What one reader asks for."""

    def __init__(self, site: str, took: Callable[[str], None], refuse: Refuse) -> None:
        self._site, self._took, self._refuse = site, took, refuse
        self._compared = False

    def __call__(self, x: Tensor) -> Given | None:
        last = _here.last
        return last if last is not None and last.is_of(self._site, x) else None

    def taken(
        self, given: Given, own: Callable[[], Any], ours: Callable[[], Any], why_apart: Callable[[Any, Any], str | None]
    ) -> Any:
        """What is made of what was given, or vLLM's own: at the first time both are made and compared."""
        made = ours()
        if not self._compared and trial.possible():
            self._compared = True
            theirs = own()
            problem = why_apart(theirs, made)
            if problem is not None:
                self._refuse(self._site, problem)
                return theirs
        if not given.taken:
            given.taken = True
            self._took(self._site)
        return made


def _why_products_apart(theirs: Any, ours: Any) -> str | None:
    return trial.why_apart([(theirs, ours)], trial.TOLERANCE[1])


def _why_quantised_apart(theirs: Any, ours: Any) -> str | None:
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return "what quantises there does not give values and scales"
    for name, own, other in zip(("values", "scales"), theirs, ours, strict=True):
        if _form(own) != _form(other):
            return f"what quantises there gives {name} of {', '.join(_form(own))}, and the op {', '.join(_form(other))}"
    # vLLM rounds the norm before it is quantised: scales and values may each be the next ones.
    return trial.why_apart([(_meaning(*theirs), _meaning(*ours))], trial.TOLERANCE[1])


def _meaning(values: Tensor, scales: Tensor) -> Tensor:
    """What they stand for, in float32."""
    width = values.shape[-1]
    size = -(-width // scales.shape[-1])
    return values.float() * scales.repeat_interleave(size, -1)[..., :width]


def _form(tensor: Tensor) -> tuple[str, ...]:
    """What a product needs to know of a tensor. The stride of a dimension of one is anybody's."""
    strides = tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    return str(tensor.dtype), f"shape {tuple(tensor.shape)}", f"strides {strides}"
