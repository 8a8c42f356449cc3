"""How a function of AITER's is described, and how the one that is installed is matched with the descriptions.

A convention is a parameter list of one or more releases. What we pass is passed by name, so that a new optional
parameter or another order does no harm; a parameter that is gone, renamed or newly required is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen

from .releases import ReleaseRange, before
from .source import Signature, read_signature


@frozen
class Convention:
    """One known parameter list."""

    since: str
    "The first release that has it."
    signature: Signature = field(converter=Signature.of)
    "As text: `out, input, gemma_norm=`."
    refused: str | None = None
    "Why this one cannot be called at all."

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


@frozen(kw_only=True)
class Binding:
    """One call of ours and the functions of AITER's that can answer it, the preferred one first."""

    name: str
    calls: str
    "`module.function` in this package: from what was found to the callable with our convention."
    functions: tuple[Function, ...]
    with_: tuple[Function, ...] = ()
    "Functions used beside it where the build has them."
    needs: tuple[Function, ...] = ()
    "Functions used beside it that must be there."
    kind: Literal["hip", "triton"] = "hip"
    "triton: there in Triton-only mode too."


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


def follows(signature: Signature, convention: Convention) -> bool:
    """Whether a call by name that fits the convention fits the signature: nothing gone, nothing newly required."""
    known = {parameter.name: parameter for parameter in convention.signature.parameters}
    found = {parameter.name: parameter for parameter in signature.parameters}
    if any(name not in found for name in known):
        return False
    return all(not p.required or (name in known and known[name].required) for name, p in found.items())


def match(folder: Path, function: Function) -> Match | str | None:
    """The installed function with its convention; a sentence where it cannot be called; None where there is none."""
    signature = read_signature(folder, function.path)
    if signature is None:
        return None
    exact = [convention for convention in function.conventions if convention.signature == signature]
    close = [convention for convention in reversed(function.conventions) if follows(signature, convention)]
    # The newest convention that fits is the one that knows most of the installed parameters.
    best = (exact or sorted(close, key=lambda c: len(c.names), reverse=True) or [None])[0]
    if best is None:
        known = "; ".join(f"({convention.signature}) since {convention.since}" for convention in function.conventions)
        return f"{function.path} has an unknown signature: ({signature}). Known: {known}"
    if best.refused is not None:
        return f"{function.path}({signature}): {best.refused}"
    return Match(function, best, signature)


def existed(function: Function) -> str:
    """In which releases the function was, in words."""
    first = function.conventions[0].since
    return (
        f"{function.path} is in {ReleaseRange(first, before(function.gone)) if function.gone else first + ' or later'}"
    )
