"""What a row of the table of restrictions is, and which bindings a row is about."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from .calls import Call
from .releases import NEWEST, OLDEST, ReleaseRange
from .table import BINDINGS

UE8M0 = "power-of-two scales in float32: the function has none"
TMA = "column-major scales with padded columns: AITER pads none, and a copy of them would cost what the fusion saves"
FLAVOUR = "the fp8 dtype of another GPU: it writes the flavour of this one only"
OFFSET = "a weight offset: the function knows none"
GEMMA = "a weight offset: gemma_norm came with v0.1.17-rc0"
GEMMA_ONE = "a weight offset other than 1, which is all that gemma_norm adds"
TYPE_16_BIT = "its kernel takes float16 and bfloat16 only"
WEIGHT = "weights of another dtype than the activations: the kernel reads both as one dtype"


@frozen
class Restriction:
    """One thing that a function of AITER's must not be asked for."""

    bindings: tuple[str, ...]
    kind: str
    "What is wrong, in a word or two: the docs and the tests sort by it."
    when: Callable[[Call], bool]
    reason: str
    since: str = OLDEST
    until: str = NEWEST

    @property
    def releases(self) -> ReleaseRange:
        """The releases it is true of."""
        return ReleaseRange(self.since, self.until)


def calling(*makers: str) -> tuple[str, ...]:
    """The names of the bindings that these functions of this package put over AITER's, in the order of the table."""
    return tuple(binding.name for binding in BINDINGS if binding.calls in makers)
