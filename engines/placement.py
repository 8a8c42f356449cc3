"""Chains at seams of an engine, which no graph shows: at which of their sites they ran, and why not at the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from types import MappingProxyType
from typing import Any

from attrs import define, field, frozen
from torch import nn

from ..adapters.errors import LayerfuseError
from ..fusion.ops.agreement import RankDisagreementError, agree
from ..fusion.report import Use
from ..fusion.rewrite.unknown_norms import UnknownNorm
from ..fusion.sites import Site
from .host import here

REFUSALS = (LayerfuseError, TypeError, ValueError)
"""What an op raises for arguments that it does not take."""

_looking: list[int] = []
"""The threads whose runs are looked at, the innermost last."""


@contextmanager
def looking() -> Iterator[None]:
    """Look at the run that this thread makes: an engine's other micro-batches run in threads of their own beside it."""
    _looking.append(get_ident())
    try:
        yield
    finally:
        _looking.pop()


@contextmanager
def aside() -> Iterator[None]:
    """Look at nothing meanwhile: what is only tried out is no call of the run."""
    _looking.append(0)  # no thread
    try:
        yield
    finally:
        _looking.pop()


def is_looked_at() -> bool:
    """Whether a call in this thread counts: it is of the run that is looked at, or there is none."""
    return not _looking or _looking[-1] == get_ident()


def why_apart(what: str, decision: str) -> str | None:
    """Why the ranks of the tensor-parallel group do not decide alike on something, as a sentence; None where they do.

    Args:
        what: it is; asked once in a process.
        decision: of this rank: the reason why not, in its first line, or nothing.
    """
    try:
        agree(here().group(), what, decision)
    except RankDisagreementError as error:
        said = (f"rank {rank}: {why.splitlines()[0]}" for rank, why in enumerate(error.decisions) if why)
        return next(said, str(error))
    return None


_NOTHING = object()


@frozen(eq=False)
class Put:
    """Something of ours in an attribute of an instance of the engine's."""

    instance: Any = field(repr=False)
    name: str
    ours: Any = field(repr=False)
    before: Any = field(repr=False)
    "What the instance itself held there."

    @classmethod
    def at(cls, instance: Any, name: str, before: Mapping[str, Any] = MappingProxyType({})) -> Put:
        """What is there now. `before`: what the instance held."""
        return cls(instance, name, vars(instance)[name], before.get(name, _NOTHING))

    def take_out(self) -> None:
        """Let the engine's own be there, unless somebody has put something else there."""
        if vars(self.instance).get(self.name) is self.ours:
            if self.before is _NOTHING:
                delattr(self.instance, self.name)
            else:
                setattr(self.instance, self.name, self.before)

    def put_back(self) -> None:
        """Let it be there again, unless somebody has put something there meanwhile."""
        if vars(self.instance).get(self.name, _NOTHING) is self.before:
            setattr(self.instance, self.name, self.ours)


@define(kw_only=True, eq=False)
class Placement(ABC):
    """One fusion in one model, or several."""

    fusion: str = ""
    "The one; empty where there are several."
    ran: Mapping[str, Counter[str]] = field(factory=dict)
    "Site -> op -> calls in the run that is looked at; empty before it."
    missed: dict[str, str] = field(factory=dict)
    "Site -> why what is expected does not stand there, or refused a call, as a sentence."
    put: list[Put] = field(factory=list, repr=False)
    "Where something stands in instances of the engine's."
    strange: dict[UnknownNorm, None] = field(factory=dict)
    "Norms of the residual stream that belong to no layer that was read, as far as it looks for them."

    @abstractmethod
    def calls(self) -> Mapping[str, Counter[str]]:
        """Site -> op -> calls so far, for every site that was to have it."""

    @abstractmethod
    def why_left(self, site: str, run: str) -> str | None:
        """Why nothing was called at a site in that run, as a sentence; None where it did not come there. `run`: as `CompiledModule.run`."""

    def fusions_at(self, site: str) -> tuple[str, str]:  # noqa: ARG002 (for those of several)
        """What is expected at a site, and what stands there, which may be its fallback."""
        return self.fusion, self.fusion

    def uses(self, run: str) -> Iterator[Use]:
        """What that run was: one for each call, and one for each site that had none, or misses what is expected."""
        for site, ran in self.ran.items():
            expected, stands = self.fusions_at(site)
            why = self.missed.get(site) or (None if ran.total() else self.why_left(site, run))
            missed = {} if why is None else {expected: why}
            beside = missed if stands != expected else {}
            if not ran.total() or (missed and not beside):
                yield Use(site=site, fused=None if missed else expected, missed=missed, how="module")
            yield from (Use(site=site, fused=stands, form=op, how="module", missed=beside) for op in ran.elements())

    def told(self, counted: Counter[str]) -> Counter[str]:
        """Calls of ops in that run as its report tells them. An MLA layer is counted in a step that decodes nothing too, in which its op is not called."""
        return counted | sum(self.ran.values(), Counter())

    def covers(self, site: Site) -> bool:  # noqa: ARG002 (for those that do)
        """Whether what stands here ran in the place of another site's op."""
        return False

    def left_to_engine(self) -> set[str]:
        """Sites at which the engine's own code runs, as the expected op does not stand there, and no fallback of it."""
        return {site for site in tuple(self.missed) if len({*self.fusions_at(site)}) == 1}

    @property
    def key(self) -> str:
        """What the engine's cache has to know beside the plan; empty: nothing."""
        return ""

    def put_in(self) -> None:  # noqa: B027 (some stand there as they are made)
        """Let it stand there, if it does not yet."""

    def look_again(self) -> bool:
        """Stand aside where something was put in the place of the engine's code since; whether it does from now on."""
        return False

    def modules(self) -> Mapping[str, nn.Module]:
        """Path of a layer -> the module in which it stands, as far as it is to be watched."""
        return {}

    def notes(self, run: str) -> Iterable[str]:  # noqa: ARG002 (for those that have some)
        """What there is to say of that run beside its sites, as sentences."""
        return ()
