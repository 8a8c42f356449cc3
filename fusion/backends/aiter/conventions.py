"""How a function of AITER's is described, and how the one that is installed is matched with the descriptions.

A convention is a parameter list of one or more releases. What we pass is passed by name, so that a new optional
parameter or another order does no harm; a parameter that was removed, renamed or newly required is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen

from .releases import NEWEST, RELEASES, ReleaseRange, before, is_after
from .source import Signature, read_signature, signature_of


@frozen
class Convention:
    """One known parameter list."""

    since: str
    "The first release that has it."
    signature: Signature = field(converter=signature_of)
    "As text: `out, input, gemma_norm=`."
    refused: str | None = None
    "Why this one cannot be called at all."
    again: tuple[str, str] | None = None
    "First and last release in which it came back after another one."

    @property
    def names(self) -> frozenset[str]:
        """Its parameters' names."""
        return frozenset(parameter.name for parameter in self.signature.parameters)


@frozen
class Function:
    """One function of AITER's and every parameter list it has had."""

    path: str
    "`module:function`, or `module:Class.method`."
    conventions: tuple[Convention, ...]
    "Oldest first."
    gone: str | None = None
    "The first release without it again."

    def spans(self, convention: Convention) -> tuple[ReleaseRange, ...]:
        """The releases of one of its conventions: until the next one starts, and again where it came back."""
        starts = [c.since for c in self.conventions] + [c.again[0] for c in self.conventions if c.again]
        later = [start for start in (*starts, *([self.gone] if self.gone else ())) if is_after(start, convention.since)]
        end = before(min(later, key=RELEASES.index)) if later else NEWEST
        again = () if convention.again is None else (ReleaseRange(*convention.again),)
        return (ReleaseRange(convention.since, end), *again)


@frozen(kw_only=True)
class Binding:
    """One call of ours and the functions of AITER's that can answer it, the preferred one first."""

    name: str
    "An op's name, with a suffix where the op has several bindings: `rms_norm_group_quant.triton`. Else a call of ours."
    calls: str
    "`module.function` in this package: from what was found to the callable with our convention."
    functions: tuple[Function, ...]
    kind: Literal["hip", "triton"] = "hip"
    "triton: there in Triton-only mode too."
    adds: bool = False
    "Whether a residual is added first."
    keeps_norm: bool = False
    "Whether the norm is returned unquantised too."

    @property
    def op(self) -> str:
        """The op that it serves."""
        return self.name.partition(".")[0]


@frozen
class Match:
    """A function as installed, and the convention that it follows."""

    function: Function
    convention: Convention
    signature: Signature
    "As installed."

    @property
    def recorded(self) -> bool:
        """Whether the installed parameter list is exactly the known one."""
        return self.signature == self.convention.signature

    def is_of(self, releases: ReleaseRange) -> bool:
        """Whether some of these releases have this convention."""
        return any(span.overlaps(releases) for span in self.function.spans(self.convention))

    @property
    def summary(self) -> str:
        """The function and the release whose convention it follows; its parameters only where they are news."""
        return f"{self.function.path}, as since {self.convention.since}" if self.recorded else str(self)

    def __str__(self) -> str:
        if self.recorded:
            return f"{self.function.path}({self.signature}), as since {self.convention.since}"
        return (
            f"{self.function.path}({self.signature}), called by name as since {self.convention.since}: "
            f"({self.convention.signature})"
        )


def follows(signature: Signature, convention: Convention, function: Function) -> bool:
    """Whether a call by name that fits the convention fits the signature.

    None of its parameters may be missing or newly required, and what the signature has beyond it may be left out and must be new:
    a parameter known from another convention would make it a mixture of two, about which nothing is known.
    """
    known = {parameter.name: parameter for parameter in convention.signature.parameters}
    ever = {name for other in function.conventions for name in other.names}
    found = {parameter.name: parameter for parameter in signature.parameters}
    if any(name not in found for name in known):
        return False
    return all(
        known[name].required or not parameter.required if name in known else not parameter.required and name not in ever
        for name, parameter in found.items()
    )


def match(folder: Path, function: Function) -> Match | str | None:
    """The installed function with its convention; a sentence where it cannot be called; None where there is none."""
    signature = read_signature(folder, function.path)
    if signature is None:
        return None
    exact = [convention for convention in function.conventions if convention.signature == signature]
    close = [convention for convention in function.conventions if follows(signature, convention, function)]
    best = next(iter(exact or close), None)
    if best is None:
        known = "; ".join(f"({convention.signature}) since {convention.since}" for convention in function.conventions)
        return f"{function.path} has an unknown signature: ({signature}). Known: {known}"
    if best.refused is not None:
        return f"{function.path}({signature}): {best.refused}"
    return Match(function, best, signature)


def existed(function: Function) -> str:
    """In which releases the function was, in words."""
    last = before(function.gone) if function.gone else NEWEST
    return f"{function.path} is in {ReleaseRange(function.conventions[0].since, last)}"
