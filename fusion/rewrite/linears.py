"""Binding the product of a linear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from ..match.errors import Unmatched
from .binding import Binding

if TYPE_CHECKING:
    from ..steps import Linear

UNREAD = "its kernel does not read this weight, its scales or what is multiplied with it as they lie in memory"


def bind_linear(step: Linear, bound: Binding) -> None:
    """Bind the product of a site.

    Raises:
        Unmatched: the step's op does not read what the graph multiplies.
    """
    found = bound.use.linear
    given = None if found is None else found.ways.get(step.op.name)
    if found is None or given is None:
        raise Unmatched(UNREAD)
    bound.args |= {name: bound.now(each) if isinstance(each, Node) else each for name, each in given.items()}
    bound.outs[step.out] = found.out
    bound.nodes += found.nodes
