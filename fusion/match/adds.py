"""Finding the residual add in front of a norm."""

from __future__ import annotations

import torch
from attrs import frozen
from torch.fx import Node

from .errors import Unmatched
from .provenance import PROJECTIONS, unshaped
from .values import same_shape, value

aten = torch.ops.aten


OTHER_GRAPH = "its residual add is in another graph"
"""What a graph break between the add and the norm comes to."""


@frozen(kw_only=True, eq=False)
class FoundAdd:
    """One sum of two tensors of one shape and dtype."""

    x: Node
    "What joins the stream: an attention's or MLP's result, where that can be told."
    residual: Node
    out: Node | None
    "The sum; None where nothing reads it."


def find_add(total: Node) -> FoundAdd:
    """The add that makes a tensor.

    Raises:
        Unmatched: the tensor is no plain sum of two tensors like it.
    """
    if total.op == "placeholder":
        raise Unmatched(f"the norm's input {total} is an input of the graph: {OTHER_GRAPH}")
    if total.target is not aten.add.Tensor:
        raise Unmatched(f"the norm's input {total} is no sum of two tensors")
    a, b = total.args
    if not isinstance(a, Node) or not isinstance(b, Node) or total.kwargs.get("alpha", 1) != 1:
        raise Unmatched(f"{total} is no plain sum of two tensors")
    whole, one, other = value(total), value(a), value(b)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        raise Unmatched(f"{total} is no plain sum of two tensors")
    for each in (one, other):
        if each.dtype != whole.dtype or each.device != whole.device or not same_shape(each.shape, whole.shape):
            raise Unmatched(
                f"{total} adds {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}, which are not alike"
            )
    # Either order gives the same sum; the name says which of the two a report or a kernel may write over.
    return (
        FoundAdd(x=a, residual=b, out=total)
        if unshaped(a).target in PROJECTIONS
        else FoundAdd(x=b, residual=a, out=total)
    )
