"""The products with a linear's weight, and with those of routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, field, frozen

from ...adapters.activation_quant import ActivationQuant
from ...adapters.linear_specs import weight_in_words
from ...adapters.specs import LinearSpec, WeightSpec
from ..declare import Kernel, Op
from ..kernel_source import later
from ..linear_ops import LINEARS
from ..sites import EXPERTS, LINEAR
from .step import MIDDLE, At, Legality, Source, Whole

if TYPE_CHECKING:
    from ..rewrite.binding import Binding


HELD = "not known: how the linear holds its weight"
"""Of a linear that nothing was said of, as the reason begins."""

EXPERTS_HELD = "not known: how the routed experts hold their weights"
"""The same of a mixture."""


@frozen(kw_only=True)
class Linear(Whole):
    """The product with a linear's weight, and the quantisation of what it reads where no chain in front has done that."""

    stage = MIDDLE
    roles = frozenset({LINEAR})
    takes_any_number = True

    weights: tuple[WeightSpec, ...]
    "What the op reads."
    whose: ClassVar[str] = "the linear's weight"
    schemes: tuple[str, ...] = ()
    "How the linear quantises what it reads, in words of `ActivationQuant.scheme`; none: it does not."
    group_size: int | None = None
    "Columns that share a scale there."
    fewer: int | None = None
    "From so many numbers in a weight on the engine's own product is as fast; None: of any number."
    behind: Op | None = field(default=None, repr=False)
    "What is left of the op where a chain in front has quantised what it reads; None: the op quantises nothing."
    goes_with: str | None = None

    @property
    def own_kernels(self) -> tuple[Kernel, ...]:
        return LINEARS[self.op]

    @property
    def in_parts(self) -> tuple[Linear, ...]:
        return () if self.behind is None else (evolve(self, op=self.behind, behind=None),)

    def why_not(self, at: At) -> Legality | None:
        linear = at.site.linear
        assert linear is not None, "a site of this role has one"
        if (other := self.other_weight(linear.weight)) is not None:
            return other
        unsaid = linear.weight is None and linear.activation is None and at.quant is None
        if unsaid and not at.declared and not self.schemes:
            return Legality("refused", f"{HELD}; {self.reads}")
        problem = self._why_no_quant(linear, at)
        if problem is not None:
            return Legality("not_applicable", problem)
        if self.fewer is None:
            return None
        depth, columns = linear.local_in_features, linear.local_out_features
        if depth is None or columns is None:
            why = f"not known: how large its weight is; from {self.fewer:,} numbers on the engine's own product is as fast"
        elif depth * columns >= self.fewer:
            why = f"its weight is {columns} x {depth}, and from {self.fewer:,} numbers on the engine's own product is as fast"
        else:
            return None
        return Legality("refused", why)

    def _why_no_quant(self, linear: LinearSpec, at: At) -> str | None:
        quant = at.quant
        if quant is None:
            said = f"it takes what it reads as it is, and {self.op.name} quantises that" if self.schemes else None
            return linear.activation if isinstance(linear.activation, str) else said
        return self.other_quant(quant)

    def other_weight(self, weight: WeightSpec | None) -> Legality | None:
        """What the op says of a weight that it does not read; None of one that it reads, or that is not known."""
        if weight is None or weight in self.weights:
            return None
        return Legality("not_applicable", f"{self.whose} is {weight_in_words(weight)}; {self.reads}")

    @property
    def reads(self) -> str:
        """The weights that the op reads, in words."""
        return f"{self.op.name} reads {' or '.join(map(weight_in_words, self.weights))}"

    def other_quant(self, quant: ActivationQuant) -> str | None:
        """The same of how what is read is quantised, as a sentence."""
        fits = quant.scheme in self.schemes and quant.group_size == self.group_size
        return None if fits else f"it quantises with {quant}, which {self.op.name} does not"

    def described(self, at: At) -> str:
        return (
            "the product, with the quantisation in front of it unless a chain has done that,"
            if self.behind is not None
            else "the product"
        )

    bind = later("layerfuse.fusion.rewrite.linears:bind_linear")


@frozen(kw_only=True)
class Experts(Linear):
    """Both products of each chosen expert, what stands between them, and their sum. Its op writes where the engine says, so that it stands at a call alone."""

    roles = frozenset({EXPERTS})
    launches = "two launches"
    whose = "an expert's weight"

    out: str = ""

    @property
    def in_graphs(self) -> bool:
        return False

    def source(self, source: Source) -> Iterator[str]:
        given = (source.read(argument.name) for argument in self.op.args)
        yield f"{self.op.name}({', '.join(given)})"

    def why_not(self, at: At) -> Legality | None:
        experts = at.site.experts
        assert experts is not None, "a site of this role has a mixture"
        if at.declared and at.quant is None:
            return Legality("not_applicable", f"its experts take what they read as it is; {self.reads}")
        if experts.weight is None:
            return Legality("not_applicable", f"{EXPERTS_HELD}; {self.reads}")
        # What quantises inside of their kernels is what the op does as well.
        quant = None if at.quant is None else self.other_quant(at.quant)
        return self.other_weight(experts.weight) or (None if quant is None else Legality("not_applicable", quant))

    def described(self, at: At) -> str:
        return "both products of each chosen expert with their quantisation and their sum"

    def bind(self, bound: Binding) -> None:
        from ..match.errors import Unmatched

        raise Unmatched(f"{self.op.name} writes to what it is given, which no graph does")
