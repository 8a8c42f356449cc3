"""What a row of the table of restrictions is, and reasons that several rows give."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from .calls import Call
from .releases import NEWEST, OLDEST, ReleaseRange

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
    "What is wrong, in a word or two: the tests sort by it."
    when: Callable[[Call], bool]
    reason: str
    since: str = OLDEST
    until: str = NEWEST
    lacks: str | None = None
    "It is true only of functions without this parameter."

    @property
    def releases(self) -> ReleaseRange:
        """The releases it is true of."""
        return ReleaseRange(self.since, self.until)

    @property
    def where(self) -> str:
        """The same in words."""
        return str(self.releases) if self.lacks is None else f"without {self.lacks}"

    def is_of(self, releases: ReleaseRange, names: frozenset[str]) -> bool:
        """Whether it is true of some release that a build can be, with the parameters that its function has."""
        return self.releases.overlaps(releases) and self.lacks not in names
