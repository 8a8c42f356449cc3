"""Matching of latents: whether two norms are the latent norms of one MLA layer, judged from where their inputs come from.

Engines have one down-projection and split it, transformers has two projections of one hidden state; in both the
latents lie at the columns that the spec says.
"""

from __future__ import annotations

from torch.fx import Node

from ...adapters.specs import MLASpec
from .found import FoundNorm
from .provenance import Columns, columns_of, source_of
from .quants import unquantised


def base_of(norm: FoundNorm) -> Node:
    """The node that both latents of a layer share: what their projections read, or the tensor they are columns of."""
    origin = columns_of(norm.x)
    if origin is None:
        return norm.x
    source = _source(origin.root)
    return origin.root if source is None else source.root


def why_unpaired(spec: MLASpec, q: FoundNorm, kv: FoundNorm) -> str | None:
    """None where `q` and `kv` norm the query and the key/value latent of one layer, else why they do not."""
    q_at, kv_at = columns_of(q.x), columns_of(kv.x)
    if q_at is None or kv_at is None:
        return "the width of a norm's input is not static, so its columns cannot be told"
    if q_at.root is kv_at.root:
        return _one_projection(spec, q_at, kv_at)
    q_from, kv_from = _source(q_at.root), _source(kv_at.root)
    if q_from is None or kv_from is None or q_from != kv_from:
        return (
            f"the norms are of different tensors ({q_at}; {kv_at}), neither columns of one projection nor "
            "projections of one hidden state"
        )
    return _two_projections(spec, q_at, kv_at)


def _source(projection: Node) -> Columns | None:
    """What a projection reads, before it is quantised: two linears quantise one hidden state each for itself."""
    source = source_of(projection)
    return None if source is None else columns_of(unquantised(source.root))


def _one_projection(spec: MLASpec, q: Columns, kv: Columns) -> str | None:
    q_width, kv_width, rope = spec.split_sizes
    return (
        _misplaced("query", q, 0, q_width)
        or _misplaced("key/value", kv, q_width, q_width + kv_width)
        or _too_narrow(q, q_width + kv_width + rope)
    )


def _two_projections(spec: MLASpec, q: Columns, kv: Columns) -> str | None:
    q_width, kv_width, rope = spec.split_sizes
    return (
        _misplaced("query", q, 0, q_width)
        or _misplaced("key/value", kv, 0, kv_width)
        or _too_narrow(q, q_width)
        or _too_narrow(kv, kv_width + rope)
    )


def _misplaced(name: str, at: Columns, start: int, stop: int) -> str | None:
    if (at.start, at.stop) == (start, stop):
        return None
    return f"the {name} norm reads {at}, expected columns {start}:{stop}"


def _too_narrow(at: Columns, least: int) -> str | None:
    # Wider is fine: an output gate may follow the rope columns (Kimi-K3).
    return None if at.width >= least else f"{at.root} is {at.width} wide, expected at least {least}"
