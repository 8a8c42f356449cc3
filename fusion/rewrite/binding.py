"""What a chain is in a graph: the values of an op's arguments, and what its results take the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch.fx import Node

from ...adapters.specs import NormSpec
from ..compose import is_inner
from ..match.adds import FoundAdd
from ..match.found import FoundNorm
from ..match.quants import FoundQuant
from ..match.values import value
from ..steps.step import MIDDLE, SINKS, SOURCES, Step
from .hoisting import check_writes
from .layouts import Made, Size
from .uses import SiteMatch

if TYPE_CHECKING:
    from ..planning import Plan


@define(kw_only=True, eq=False)
class Binding:
    """What a chain is in a graph: the op's arguments, and what takes the place of its results."""

    name: str
    "Of the op."
    chain: tuple[Step, ...]
    use: SiteMatch
    "The site, and what of it was found in the graph."
    plan: Plan
    moved: dict[Node, Node]
    "Nodes that earlier replacements took out -> what stands for them."
    args: dict[str, Any] = field(factory=dict)
    "Argument -> node, constant, or a view that is still to be made."
    outs: dict[str, Node] = field(factory=dict)
    "Result -> the node that it replaces, of the same dtype, contiguous."
    views: dict[str, tuple[Size, ...]] = field(factory=dict)
    "Result -> the sizes of the node that it replaces, where its own are others."
    orders: dict[str, tuple[int, ...]] = field(factory=dict)
    "Result -> its dimensions in the order of the node that it replaces, where that is another."
    like: torch.Tensor | None = None
    "What the op's quantised results are shaped like, where that is not the node that is quantised."
    nodes: list[Node] = field(factory=list)
    "Everything that may be unread afterwards."
    last: list[Node] = field(factory=list)
    "Further nodes up to which nothing may write in place."
    result: Node | None = None
    "What the sinks start from, in a graph: the result of the first step of the middle."
    added: FoundAdd | None = None
    "The residual add in front of the middle."
    quantised: tuple[Node, FoundQuant] | None = None
    "The rows of a norm that the graph's op quantises itself, and how."
    check: Callable[[Node], None] | None = None
    "What must hold where the op is put in front of a node; raises `Unmatched`."
    finish: list[Callable[[dict[str, Node]], Iterable[Node]]] = field(factory=list)
    "Each replaces what is read in other shapes and layouts; returns nodes that may be unread afterwards."

    def now(self, node: Node) -> Node:
        """A node, or what stands for it since it was found."""
        return self.moved.get(node, node)

    @property
    def sources(self) -> list[Node]:
        """What the arguments so far are, or are made of."""
        return [node for arg in self.args.values() for node in needed_by(arg)]

    def norm_of(self, step: Step) -> tuple[FoundNorm, NormSpec]:
        """The norm in the graph that stands for a step, and what the spec says of it.

        Raises:
            Unmatched: something writes in place between the norm's nodes.
        """
        norms = [each for each in self.chain if each.is_norm]
        found = zip(norms, self.use.norms, self.use.site.norms, strict=True)
        norm, spec = next((norm, spec) for each, norm, spec in found if each is step)
        check_writes(min(norm.nodes), norm.out)
        return norm, spec

    def start_sinks_from(self, result: Node) -> None:
        """What the sinks take, unless a step before has said it."""
        if self.result is None:
            self.result = result

    def is_inner(self, step: Step) -> bool:
        """Whether a step's result stays inside of the op."""
        return is_inner(step, self.chain)

    def steps(self) -> Iterator[Step]:
        """The steps in the order in which they are bound: the middle, the sources from the last to the first, the sinks."""
        yield from (step for step in self.chain if step.stage == MIDDLE)
        yield from reversed([step for step in self.chain if step.stage == SOURCES])
        yield from (step for step in self.chain if step.stage == SINKS)


def val_of(arg: Any) -> Any:
    """The traced tensor of an argument, or the constant that it is."""
    return arg.val if isinstance(arg, Made) else value(arg) if isinstance(arg, Node) else arg


def needed_by(arg: Any) -> tuple[Node, ...]:
    """The nodes that an argument is, or is made of."""
    return (arg,) if isinstance(arg, Node) else arg.needed if isinstance(arg, Made) else ()
