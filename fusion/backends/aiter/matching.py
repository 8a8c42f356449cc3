"""How a function of AITER's is recorded, and how the one that is installed is matched with its record.

A record is one parameter list. What we pass is passed by name, so that a new optional parameter or another order does no harm; a
parameter that was removed, renamed or newly required is refused.
"""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen

from .releases import NEWEST, OLDEST, ReleaseRange
from .source import Signature, read_signature, signature_of


@frozen
class Function:
    """One function of AITER's."""

    path: str
    "`module:function`, or `module:Class.method`."
    signature: Signature = field(converter=signature_of)
    "As text: `out, input, gemma_norm?=`."
    since: str = OLDEST
    "The first release that has it; the oldest supported one: all of them."

    @property
    def is_triton(self) -> bool:
        """Whether it is there in Triton-only mode too."""
        return self.path.startswith("aiter.ops.triton.")


@frozen
class Match:
    """A function as installed."""

    function: Function
    signature: Signature
    "As installed."

    @property
    def names(self) -> frozenset[str]:
        """The recorded parameters that are there: what else it may take has no known meaning."""
        there = {parameter.name for parameter in self.signature.parameters}
        return frozenset(p.name for p in self.function.signature.parameters if p.name in there)

    @property
    def recorded(self) -> bool:
        """Whether the installed parameters are the record's, in any order, without some of what only some releases have."""
        kept = {p for p in self.function.signature.parameters if not p.sometimes or p.name in self.names}
        return kept == set(self.signature.parameters)

    @property
    def summary(self) -> str:
        """The function alone where it is as recorded; its parameters only where they are news."""
        return f"{self.function.path}, as recorded" if self.recorded else str(self)

    def __str__(self) -> str:
        here = f"{self.function.path}({self.signature})"
        return (
            f"{here}, as recorded"
            if self.recorded
            else f"{here}, called by name; recorded: ({self.function.signature})"
        )


def follows(signature: Signature, function: Function) -> bool:
    """Whether a call by name that fits the record fits the signature.

    None of the record's parameters may be missing, but for those that only some releases have, and none newly required.
    """
    known = {parameter.name: parameter for parameter in function.signature.parameters}
    found = {parameter.name: parameter for parameter in signature.parameters}
    if any(name not in found and not parameter.sometimes for name, parameter in known.items()):
        return False
    return all(not p.required or (name in known and known[name].required) for name, p in found.items())


def match(folder: Path, function: Function) -> Match | str:
    """The installed function, or a sentence where there is none or it cannot be called."""
    signature = read_signature(folder, function.path)
    if signature is None:
        return f"this build has no such function: {function.path} is in {ReleaseRange(function.since, NEWEST)}"
    if not follows(signature, function):
        return f"{function.path} has an unknown signature: ({signature}). Known: ({function.signature})"
    return Match(function, signature)
