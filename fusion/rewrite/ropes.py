"""Binding the norms of query and key heads and the rope behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ...adapters.specs import GQASpec
from ..match.angles import Angles
from ..match.errors import Unmatched
from ..match.ropes import find_rope
from ..match.values import value
from .binding import Binding
from .hoisting import check_writes
from .layouts import Made, lay_out, sizes_of, sources_of

if TYPE_CHECKING:
    from ..steps import HeadNorm, Rope


def bind_head_norm(step: HeadNorm, bound: Binding) -> None:
    """Bind the norm of a query's or a key's heads.

    Raises:
        Unmatched: an op of the graph does more than the norm, or its rows are no views of heads.
    """
    norm, spec = bound.norm_of(step)
    if norm.add is not None or norm.quant is not None:
        raise Unmatched(f"{norm.form} does more than norm heads")
    # Both together, as the op's rows have the same tokens: one may be a view that goes no further back than the other.
    both = bound.use.norms
    tails = [(heads, each.width) for heads, each in zip(_heads(bound), both, strict=True)]
    rows = lay_out([bound.now(each.x) for each in both], *tails)
    bound.args |= {step.x: rows[both.index(norm)], step.weight: norm.weight, step.epsilon: spec.epsilon}
    if step.weight_offset is not None:
        bound.args[step.weight_offset] = norm.weight_offset
    # Copies in front are unread too, where nobody else reads them.
    bound.nodes += [*norm.nodes, *sources_of(norm.x)]


def bind_rope(step: Rope, bound: Binding) -> None:
    """Bind the rope of both.

    Raises:
        Unmatched: it is not as the spec says, or in no known form.
    """
    spec, norms = bound.use.site.spec, bound.use.norms
    found = find_rope(norms[0].out, norms[1].out, *_heads(bound))
    rope = spec.rope if isinstance(spec, GQASpec) else None
    pairs = None if rope is None else "interleaved" if rope.interleaved else "halves"
    if rope is None or (rope.width, pairs) != (2 * found.half, found.pairs):
        said = "of no rope" if rope is None else f"of {rope.width} columns, {pairs}"
        raise Unmatched(f"{found.q.out} turns {2 * found.half} columns, {found.pairs}; the spec says {said}")
    check_writes(min(bound.nodes), max(found.q.out, found.k.out))
    bound.args |= {step.cos: _table(found.cos, found.half), step.sin: _table(found.sin, found.half)}
    if found.cos.positions is not found.sin.positions:
        raise Unmatched(f"cos is looked up by {found.cos.positions}, and sin by {found.sin.positions}")
    bound.args |= {step.positions: _flat(found.cos.positions), step.pairs: found.pairs}
    for name, turned, norm in ((step.q, found.q, norms[0]), (step.k, found.k, norms[1])):
        bound.outs[name] = turned.out
        shape = value(turned.out).shape if turned.order is None else value(norm.out).shape
        bound.views[name] = sizes_of(shape, *bound.sources, norm.x, before=turned.out)
        if turned.order is not None:
            bound.orders[name] = turned.order
        bound.nodes += turned.nodes


def _heads(bound: Binding) -> tuple[int, int]:
    spec = bound.use.site.spec
    if not isinstance(spec, GQASpec):
        raise Unmatched("the spec says of no heads that they are normed")
    return spec.num_local_heads, spec.num_local_kv_heads


def _flat(positions: Node | None) -> Node | Made | None:
    if positions is None or value(positions).dim() == 1:
        return positions
    return Made(of=positions, sizes=(-1,), val=_viewed(value(positions), (-1,)))


def _table(angles: Angles, half: int) -> Made:
    """Half as many columns as are turned, as (rows, columns)."""
    columns = angles.start, angles.start + half
    cut = torch.ops.aten.slice.Tensor(value(angles.table), -1, *columns)
    if cut.dim() == 2:
        return Made(of=angles.table, columns=columns, val=cut)
    return Made(of=angles.table, columns=columns, sizes=(-1, half), val=_viewed(cut, (-1, half)))


def _viewed(val: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    try:
        return torch.ops.aten.view.default(val, sizes)
    except (RuntimeError, ValueError):
        raise Unmatched(f"a tensor of {tuple(val.shape)}, strides {val.stride()}, cannot be seen as {sizes}") from None
