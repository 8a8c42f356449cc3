"""Binding the all-reduce in front of a residual add: the op takes this rank's part of the sum, and the group by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from ..match.collectives import FoundAllReduce, find_all_reduce
from ..match.errors import Unmatched
from ..match.values import is_contiguous, same_shape, value
from ..ops.groups import GroupError, other_kind, process_group, world_size
from .binding import Binding
from .hoisting import check_writes
from .layouts import Made, sizes_of

if TYPE_CHECKING:
    from ..steps import AllReduce


def bind_all_reduce(step: AllReduce, bound: Binding) -> None:
    """Bind the all-reduce of what joins the residual stream, in the place of the sum that the add was bound to.

    The op stands where the add stood, so an all-reduce that was launched earlier moves behind what lies in between, other
    collectives too. What is decided here follows from the graph alone, and all ranks trace the same one: they go on calling
    the collectives of a group in one order.

    Raises:
        Unmatched: nothing is reduced there, or it cannot be replaced.
    """
    found, add = bound.added, step.add_of(bound.chain)
    if found is None or add is None:
        raise Unmatched("no residual add stands behind the all-reduce")
    reduced = find_all_reduce(found)
    _check_group(reduced, bound.use.site.reduced)
    # The part may be read later than it was, and was never to be written before the sum was there.
    check_writes(min(reduced.launches), found.out or min(bound.use.norms[0].nodes))
    residual = bound.now(reduced.residual)
    parts = [_like(bound.now(part), residual) for part in reduced.parts]
    bound.args |= {step.x: _added(parts), add.residual: residual, step.group: reduced.group}
    bound.nodes += reduced.nodes


def _check_group(reduced: FoundAllReduce, ranks: int) -> None:
    """Check that the sum goes over as many ranks as planned, since limits follow from their number, and of no other kind."""
    try:
        size, kind = world_size(reduced.group), other_kind(reduced.group)
    except GroupError as error:
        raise Unmatched(str(error)) from None
    if kind is not None:
        desc = process_group(reduced.group).group_desc
        raise Unmatched(
            f"{reduced.launches[0]} sums over group {reduced.group!r} ({desc}), which is {kind}-parallel by its description; a "
            "layer's partial sums go over tensor-parallel ranks"
        )
    if size != ranks:
        raise Unmatched(
            f"{reduced.launches[0]} sums over the {size} ranks of group {reduced.group!r}, and the plan says {ranks}: is it "
            "a group of another kind (data, context), or does the spec say another tensor-parallel size?"
        )


def _like(part: Node, residual: Node) -> Node | Made:
    """A part of the sum in the shape of the residual."""
    val, shape = value(part), value(residual).shape
    if same_shape(val.shape, shape):
        return part
    if not is_contiguous(val):
        raise Unmatched(
            f"the part {part} {tuple(val.shape)} of the sum is not contiguous, so it has no view {tuple(shape)}"
        )
    return Made(of=part, val=val.new_empty(shape), sizes=sizes_of(shape, residual))


def _added(parts: list[Any]) -> Node | Made:
    """The parts of several all-reduces as one: what they are on this rank is added before, in place of their sums behind."""
    if len(parts) == 1:
        return parts[0]
    first, *others = (part if isinstance(part, Made) else Made(of=part, val=value(part)) for part in parts)
    return Made(of=first.of, val=first.val.new_empty(first.val.shape), sizes=first.sizes, plus=tuple(others))
