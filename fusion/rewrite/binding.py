"""What a chain is in a graph: the values of an op's arguments, and what its results take the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import define, field
from torch.fx import Node

from ..match.quants import FoundQuant
from ..match.values import value
from .layouts import Made, Size


@define(kw_only=True, eq=False)
class Binding:
    """What a chain is in a graph: the op's arguments, and what takes the place of its results."""

    args: dict[str, Any] = field(factory=dict)
    "Argument -> node, constant, or a view that is still to be made."
    outs: dict[str, Node] = field(factory=dict)
    "Result -> the node that it replaces, of the same dtype, contiguous."
    views: dict[str, tuple[Size, ...]] = field(factory=dict)
    "Result -> the sizes of the node that it replaces, where its own are others."
    like: torch.Tensor | None = None
    "What the op's quantised results are shaped like, where that is not the node that is quantised."
    nodes: list[Node] = field(factory=list)
    "Everything that may be unread afterwards."
    last: list[Node] = field(factory=list)
    "Further nodes up to which nothing may write in place."
    quantised: tuple[Node, FoundQuant] | None = None
    "The rows of a norm that the graph's op quantises itself, and how."
    check: Callable[[Node], None] | None = None
    "What must hold where the op is put in front of a node; raises `Unmatched`."
    finish: Callable[[dict[str, Node]], Iterable[Node]] | None = None
    "Replaces what is read in other shapes and layouts; returns nodes that may be unread afterwards."


def val_of(arg: Any) -> Any:
    """The traced tensor of an argument, or the constant that it is."""
    return arg.val if isinstance(arg, Made) else value(arg) if isinstance(arg, Node) else arg


def needed_by(arg: Any) -> tuple[Node, ...]:
    """The nodes that an argument is, or is made of."""
    return (arg,) if isinstance(arg, Node) else arg.needed if isinstance(arg, Made) else ()
