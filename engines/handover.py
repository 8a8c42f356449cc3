"""What a fused op has quantised, on its way to the linears behind it.

An engine's code passes the plain result on, and each linear quantises it for itself. So the op gives that result too, and what it has
quantised waits here until the next such op: a linear that is given the same tensor takes it from here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from attrs import define, frozen
from torch import Tensor

from . import trial
from .native import Native

Refuse: TypeAlias = Callable[[str, str], None]
"""Told of a site why what the engine runs there gives something else."""


@define(eq=False)
class Given:
    """What the op at one site gave in one call."""

    site: str
    plain: Tensor
    values: Tensor
    scales: Tensor
    taken: bool = False
    "Whether a linear has taken it."

    def is_of(self, site: str, x: Tensor) -> bool:
        """Whether a tensor is that op's plain result, as rows. It is held here, so that no other can be at its place."""
        if self.site != site or x.data_ptr() != self.plain.data_ptr():
            return False
        # Its heads may be joined since.
        whole = x.is_contiguous() and self.plain.is_contiguous()
        return whole and (x.shape, x.dtype) == (self.values.shape, self.plain.dtype)


class _Here(threading.local):
    """Of the thread: micro-batches have threads of their own."""

    last: Given | None = None


_here = _Here()


def give(site: str, results: tuple[Tensor, ...], scale: Tensor | None) -> tuple[Tensor, ...]:
    """Keep what is quantised for the linears behind a site until the next call, and return the other results.

    Args:
        site: the op's.
        results: values, scales, the plain result, others; without scales where the op was given one.
        scale: that one.
    """
    values, *others = results
    scales = others.pop(0) if scale is None else scale
    _here.last = Given(site, others[0], values, scales)
    return tuple(others)


def forget() -> None:
    """Keep nothing for anybody any more."""
    _here.last = None


@contextmanager
def keeping() -> Iterator[None]:
    """What waits goes on waiting, whatever ops that are only tried out give meanwhile."""
    last = _here.last
    try:
        yield
    finally:
        _here.last = last


@frozen(kw_only=True, eq=False)
class Reader:
    """Where a linear comes to what it reads in fp8."""

    place: Any
    "An object of the engine's."
    method: str
    "Of that object: what is called instead."
    make: Callable[[Wanted], Callable[..., Any]]
    "Makes what is called."
    stood: Native
    scale: Tensor | None = None
    "The static scale that it reads by; None: it has none."

    def stand(self, site: str, took: Callable[[str], None], refuse: Refuse) -> None:
        """Take what a site's op has quantised, where it is of what the linear reads.

        Args:
            site: the op's.
            took: is told of the site when the first of its readers takes something.
            refuse: at the first time both ways are compared.
        """
        setattr(self.place, self.method, self.make(Wanted(site, took, refuse)))


class Wanted:
    """What one reader asks for."""

    def __init__(self, site: str, took: Callable[[str], None], refuse: Refuse) -> None:
        self._site, self._took, self._refuse = site, took, refuse
        self._compared = False

    def __call__(self, x: Tensor) -> Given | None:
        """What waits for a linear that is given this tensor."""
        last = _here.last
        return last if last is not None and last.is_of(self._site, x) else None

    def taken(
        self, given: Given, own: Callable[[], Any], ours: Callable[[], Any], why_apart: Callable[[Any, Any], str | None]
    ) -> Any:
        """What is made of what was given, or the engine's own: at the first time both are made and compared."""
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


def static_scale(linear: Any, scheme: str) -> tuple[Tensor | None, bool]:
    """The scale by which a linear quantises all that it reads, None where the scheme has none, and whether it is as it should be: there, and one number."""
    if scheme != "static":
        return None, True
    scale: Tensor | None = linear._parameters.get("input_scale")
    return scale, scale is not None and scale.numel() == 1


def why_products_apart(theirs: Any, ours: Any) -> str | None:
    """How products of a linear differ, as a sentence, or None."""
    return trial.why_apart([(theirs, ours)], trial.TOLERANCE[1])


def why_quantised_apart(theirs: Any, ours: Any) -> str | None:
    """How values and scales differ, or what a product needs to know of them, as a sentence, or None."""
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return "what quantises there does not give values and scales"
    for name, own, other in zip(("values", "scales"), theirs, ours, strict=True):
        if _form(own) != _form(other):
            return f"what quantises there gives {name} of {', '.join(_form(own))}, and the op {', '.join(_form(other))}"
    # The engine rounds what is quantised before: scales and values may each be the next ones.
    return trial.why_apart([(_meaning(*theirs), _meaning(*ours))], trial.TOLERANCE[1])


def _meaning(values: Tensor, scales: Tensor) -> Tensor:
    """What they stand for, in float32."""
    if scales.numel() == 1:
        return values.float() * scales.float()
    width = values.shape[-1]
    size = -(-width // scales.shape[-1])
    return values.float() * scales.repeat_interleave(size, -1)[..., :width]


def _form(tensor: Tensor) -> tuple[str, ...]:
    """What a product needs to know of a tensor. The stride of a dimension of one is anybody's."""
    strides = tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    return str(tensor.dtype), f"shape {tuple(tensor.shape)}", f"strides {strides}"
