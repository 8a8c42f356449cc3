"""What every step of a chain says of itself. Nothing here needs torch: what finds a step in a graph imports it when it is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from attrs import define, evolve, field, frozen

from ...adapters.activation_quant import ActivationQuant
from ...adapters.errors import LayerfuseError
from ...adapters.specs import NormSpec
from ..declare import Argument, Kernel, Op, Result
from ..formats import Format
from ..sites import Site
from ..target import Target

if TYPE_CHECKING:
    from torch.fx import Graph

    from ..match.found import FoundNorm
    from ..rewrite.binding import Binding
    from ..rewrite.uses import SiteMatch


class FusionError(LayerfuseError, ValueError):
    """A fusion that is declared wrongly; the message says what to change."""


Kind = Literal["expected", "fallback", "refused", "not_applicable"]
"""`fallback`: another fusion is expected there, and this one is taken where that one is missed. `refused`: the site has
the steps and may not take the fusion. `not_applicable`: it has no such steps."""


class Legality(NamedTuple):
    """What one fusion is at one site, before the others are looked at."""

    kind: Kind
    reason: str


SOURCES, MIDDLE, SINKS = range(3)
"""Where a step stands: what comes in, what is computed of it, and what becomes of that."""

STAGES = ("a source", "in the middle", "a sink")
"""The same in words."""


class At(NamedTuple):
    """Where a step is asked about: a site, on a target."""

    site: Site
    target: Target
    quant: ActivationQuant | None
    "How what reads the site quantises it."
    declared: bool = False
    "Whether that was said, so that None says that it does not."
    norm: NormSpec | None = None
    "The one of the site's that stands for the step, if it is a norm."
    first: bool = True
    "Whether no step stands before it."


@define(kw_only=True)
class Source:
    """A chain being written out as statements of Python."""

    main: Step
    "The step that a quantisation or a padding takes the result of."
    several: bool = False
    "Whether more steps of the middle follow it."
    reads: dict[str, str] = field(factory=dict)
    "Argument -> the variable that stands for it behind an earlier step."

    def read(self, name: str) -> str:
        """What a step reads where it names this argument."""
        return self.reads.get(name, name)

    def wide(self, name: str) -> str:
        """The same as a tensor in the dtype that references compute in: float64 for float64, else float32. Nothing may write to it."""
        return f"_wide({self.read(name)})"


@frozen(kw_only=True)
class Step(ABC):
    """One operation of a chain. Each names the arguments and results of an op that it stands for."""

    stage: ClassVar[int] = -1
    "`SOURCES`, `MIDDLE` or `SINKS`: a chain has them in this order."
    roles: ClassVar[frozenset[str]] = frozenset()
    "Where it may stand: names of `sites.ROLES`."
    is_norm: ClassVar[bool] = False
    "Whether one of the site's norms stands for it. Other steps stand in a chain once."
    norm: ClassVar[type[NormSpec]] = NormSpec
    "The kind of that norm; one of your own is a class derived from NormSpec."
    adds: ClassVar[bool] = False
    "Whether it is the residual add in front of a norm."
    launches: ClassVar[str] = "one launch"
    "How many its op is, in words."
    reads_latents: ClassVar[bool] = False
    "Whether the quantisation that it asks about is that of the layer's `latents` site, where it stands beside that."
    across_ranks: ClassVar[bool] = False
    "Whether the ranks of a process group do it together, so that each needs a kernel for it."

    @property
    def length(self) -> int:
        """How many steps of a chain it counts for: a longer one is preferred."""
        return 1

    @property
    def is_ours(self) -> bool:
        """Whether it is a step of the library's; a class that another package derives from one of these is not."""
        return type(self).__module__.startswith(f"{__name__.partition('.')[0]}.")

    @property
    def kernel(self) -> str:
        """What kernels that are made from chains know it by; empty: they do not."""
        return ""

    @property
    def format(self) -> Format | None:
        """What it quantises to."""
        return None

    @property
    def own_op(self) -> Op | None:
        """The op that does it where nothing else is in the chain, for a step whose op is written by hand; None: one is composed."""
        return None

    @property
    def own_kernels(self) -> tuple[Kernel, ...]:
        """Those of `own_op` beside its reference, the preferred one first."""
        return ()

    @property
    def in_parts(self) -> tuple[Step, ...]:
        """What is left of it where another chain has done a part of it, each with an `own_op`."""
        return ()

    @property
    def takes_any_number(self) -> bool:
        """Whether its op takes more tokens than it is fast for, so that a graph for any number of them may hold it."""
        return self.across_ranks

    @property
    def goes_with(self) -> str | None:
        """A word of `formats.FORMATS`, or a fusion: in an engine it is on where such a chain, or that fusion, is. None: it goes alone.

        A switch of its own says otherwise.
        """
        return None

    out: str = ""
    "The name of its result, if it has one."

    @property
    def takes(self) -> tuple[str, ...]:
        """The results of steps of the middle before it that it takes, by their names. Sinks take that of the first without saying it."""
        return ()

    @property
    def outs(self) -> tuple[str, ...]:
        """The names of its results."""
        return (self.out,) if self.out else ()

    @property
    def is_kept(self) -> bool:
        """Whether its result is one of the op's also where a sink takes it."""
        return False

    @property
    def in_graphs(self) -> bool:
        """Whether a graph may hold its own op, or one that gives its result beside a quantisation of it."""
        return True

    def keeping(self) -> Step | None:
        """Itself with its result as one of the op's, beside what a quantisation makes of it; None where no op can give both."""
        return None

    @property
    def rows(self) -> str:
        """The variable of its first result, as rows that a sink takes."""
        return f"made_{self.outs[0]}"

    @abstractmethod
    def arguments(self) -> tuple[Argument, ...]:
        """What it fills."""

    @abstractmethod
    def results(self, of: str) -> tuple[Result, ...]:
        """What it gives. `of`: the rows that results are shaped like."""

    @abstractmethod
    def said(self, before: str, source: Source) -> str:
        """The words of the op's docstring up to this step. `before`: up to the one before, empty at the first."""

    @abstractmethod
    def source(self, source: Source) -> Iterator[str]:
        """Itself as statements over the functions of `ops.arithmetic.REFERENCE`, which set `made_` and the name of each result."""

    def reference(self) -> Mapping[str, Callable[..., Any]]:
        """The functions that `source` names beyond those of `ops.arithmetic.REFERENCE`."""
        return {}

    def why_not_in(self, chain: Sequence[Step]) -> str | None:
        """Why it cannot stand where it stands among the steps of a chain, as a sentence; None where it can."""
        return None

    @abstractmethod
    def why_not(self, at: At) -> Legality | None:
        """Why it cannot stand at a site, from the site's spec alone; None where it can."""

    @abstractmethod
    def described(self, at: At) -> str:
        """What it does at a site, in words that a plan joins with those of the others."""

    def find_norms(self, graph: Graph) -> Iterable[FoundNorm]:
        """The norms of a graph that are of `norm`, where that is a kind of your own. The graph stays as it is."""
        return ()

    @abstractmethod
    def bind(self, bound: Binding) -> None:
        """Find itself in a graph, from what the steps before it have bound, and bind its arguments and results.

        The middle is bound first, then the sources from the last to the first, then the sinks.

        Raises:
            Unmatched: it is not there, or not as the spec says; nothing has changed in the graph.
        """

    def is_left(self, use: SiteMatch) -> bool:
        """Whether a use of a site has it, so that it stays behind a form without it: that is said then."""
        return False


@frozen(kw_only=True)
class Kept(Step):
    """A step whose result code at module level passes on, beside what a quantisation makes of it."""

    kept: bool = False
    "Whether the op gives it beside that."

    @property
    def is_kept(self) -> bool:
        return self.kept

    @property
    def in_graphs(self) -> bool:
        return False

    def keeping(self) -> Self:
        return evolve(self, kept=True)


@frozen(kw_only=True)
class Whole(Step):
    """A step with an op of its own, which is all of its chain."""

    op: Op = field(repr=False)
    out: str = "out"

    @property
    def own_op(self) -> Op:
        return self.op

    def arguments(self) -> tuple[Argument, ...]:
        return self.op.args

    def results(self, of: str) -> tuple[Result, ...]:
        return self.op.results

    def said(self, before: str, source: Source) -> str:
        return self.op.doc.removesuffix(".")

    def source(self, source: Source) -> Iterator[str]:
        given = (source.read(argument.name) for argument in self.op.args)
        yield f"made_{self.out} = {self.op.name}({', '.join(given)})"

    def reference(self) -> Mapping[str, Callable[..., Any]]:
        return {self.op.name: self.op.reference}


def main_step(chain: Sequence[Step]) -> Step | None:
    """The step whose result the sinks take: the first of the middle."""
    return next((step for step in chain if step.stage == MIDDLE), None)


def format_of(chain: Sequence[Step]) -> Format | None:
    """What a chain quantises to."""
    return next((step.format for step in chain if step.format is not None), None)
