"""Binding what is roped: the key that goes to a cache beside the normed latent, and the query beside the absorbed latent."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...adapters.specs import MLASpec
from ..match.cache_writes import check_cache, find_write
from ..match.errors import Unmatched
from ..match.ropes import Columns, FoundRope, find_rope
from ..match.values import is_contiguous, value
from ..sites import Site
from ..steps import CacheWrite, Concat, Rope
from .binding import Binding
from .layouts import Blank, Made, sizes_of
from .uses import SiteUse

aten = torch.ops.aten


def bind_cache_write(bound: Binding, write: CacheWrite, rope: Rope, use: SiteUse, moved: dict[Node, Node]) -> None:
    """Bind the rope of a layer's key and the write to its cache, behind the norm of the key/value latent, which is bound.

    Raises:
        Unmatched: what follows the norm is something else, or reads the cache.
    """
    spec, latent = _spec(use.site), use.norms[1].out
    found = find_write(latent)
    turned = find_rope(found.rope, spec.qk_rope_head_dim, value(use.norms[1].x).shape[:-1])
    _bind_rope(bound, rope, turned, use.site, found.slots, moved)
    bound.args |= {write.cache: moved.get(found.cache, found.cache), write.slots: _flat(found.slots)}
    bound.args[write.scale] = Blank.of(found.cache, (1,), torch.float32) if found.scale is None else found.scale
    bound.written[write.cache] = found.written
    bound.nodes += [*found.nodes, *turned.nodes]
    bound.last.append(found.written)
    bound.check = lambda first: check_cache(found, first)


def bind_query(
    bound: Binding, rope: Rope, concat: Concat, use: SiteUse, *, inner: bool, moved: dict[Node, Node]
) -> None:
    """Bind the query of a layer.

    Raises:
        Unmatched: its rope is of no known form, or not what the spec says.
    """
    query = use.query
    if query is None:
        raise Unmatched(f"no query of {use.site.layer} is known")
    _bind_rope(bound, rope, query.rope, use.site, query.latent, moved)
    bound.args[concat.latent] = moved.get(query.latent, query.latent)
    bound.nodes += [query.out, *query.rope.nodes]
    if inner:
        bound.last.append(query.out)
    else:
        bound.outs[concat.out] = query.out


def _spec(site: Site) -> MLASpec:
    if not isinstance(site.spec, MLASpec):
        raise Unmatched(f"{site} is of no MLA layer")
    return site.spec


def _bind_rope(bound: Binding, step: Rope, found: FoundRope, site: Site, tokens: Node, moved: dict[Node, Node]) -> None:
    problem = why_not_as_said(found, _spec(site))
    if problem is not None:
        raise Unmatched(problem)
    x = moved.get(found.x, found.x)
    half = value(x).shape[-1] // 2
    bound.args |= {step.x: x, step.pairs: found.pairs}
    if found.cos is None or found.sin is None or found.positions is None:
        # Nothing of these is read.
        count = value(tokens).numel() if value(tokens).dtype in (torch.int32, torch.int64) else value(tokens).shape[0]
        bound.args |= {name: Blank.of(x, (1, half), torch.float32) for name in (step.cos, step.sin)}
        bound.args[step.positions] = Blank.of(tokens, (count,), torch.int64)
        return
    bound.args |= {step.cos: _columns(found.cos), step.sin: _columns(found.sin), step.positions: _flat(found.positions)}


def why_not_as_said(found: FoundRope, spec: MLASpec) -> str | None:
    """How a rope differs from what a spec says, as a sentence; None where it does not."""
    rope = spec.rope
    if rope is None:
        return "the spec does not say how the layer's rope turns"
    if rope.width not in (0, spec.qk_rope_head_dim):
        return f"the spec turns {rope.width} of {spec.qk_rope_head_dim} rope columns, and the fused op all of them"
    if found.pairs == "none" and rope.width:
        return (
            f"nothing in this graph turns {found.x} by a table of cos and sin: the rope stands in another graph, or its cos and "
            "sin come as values that were looked up before"
        )
    if found.pairs != "none" and not rope.width:
        return f"{found.x} is turned, and the spec says that the layer has no rope"
    if found.pairs != "none" and rope.interleaved is (found.pairs == "halves"):
        said = "interleaved" if rope.interleaved else "in halves"
        return f"the pairs of {found.x} are {found.pairs}; the spec says {said}"
    return None


def _columns(columns: Columns) -> Node | Made:
    table, start, stop = columns
    if stop - start == value(table).shape[1]:
        return table
    return Made(of=table, columns=(start, stop), val=aten.slice.Tensor(value(table), 1, start, stop))


def _flat(index: Node) -> Any:
    """An index with one dimension."""
    val = value(index)
    if val.dim() == 1:
        return index
    if not is_contiguous(val):
        raise Unmatched(f"{index} {tuple(val.shape)} is not contiguous, so it has no view of one dimension")
    return Made(of=index, val=val.reshape(-1), sizes=sizes_of((val.numel(),), index))
