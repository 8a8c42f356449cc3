"""Binding what is gated: the gated norm of a delta net's heads, and the product of a gated MLP.

A graph may hold their rows in other shapes than the ops take, so both go in and come out as views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...adapters.specs import GatedDeltaNetSpec, GatedNormSpec, Mamba2Spec
from ..match.errors import Unmatched
from ..match.gates import FoundGatedNorm, why_ungated
from ..match.products import FoundProduct
from ..match.provenance import ROW_PRESERVING
from ..match.values import last_width, same_shape, value
from .binding import Binding, val_of
from .hoisting import check_writes
from .layouts import Made, lay_out, sizes_of, sources_of

if TYPE_CHECKING:
    from ..steps import GatedNorm, SiluMul

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default, torch.ops.aten.reshape.default)


def bind_gated_norm(step: GatedNorm, bound: Binding) -> None:
    """Bind the gated norm of a site.

    Raises:
        Unmatched: it is not what the spec says, or its rows are no views of heads.
    """
    norm, spec = bound.norm_of(step)
    site = bound.use.site
    if not isinstance(norm, FoundGatedNorm):
        raise Unmatched(why_ungated(norm))
    if not isinstance(spec, GatedNormSpec) or not isinstance(site.spec, GatedDeltaNetSpec | Mamba2Spec):
        raise Unmatched(f"the spec says of no heads that {norm.out} is gated")
    if norm.activation != spec.activation:
        raise Unmatched(f"the gate of {norm.out} passes through {norm.activation}; the spec says {spec.activation}")
    if norm.norm_before_gate != spec.norm_before_gate:
        order = ["gates before it norms", "norms before it gates"]
        raise Unmatched(
            f"{norm.out} {order[norm.norm_before_gate]}; the spec says that it {order[spec.norm_before_gate]}"
        )
    heads, width = site.spec.gated_norm_shape
    x, gate = lay_out([bound.now(each) for each in (norm.x, norm.gate)], (heads, width))
    bound.args |= {step.x: x, step.gate: gate, step.weight: norm.weight, step.epsilon: spec.epsilon}
    bound.args |= {step.weight_offset: norm.weight_offset}
    bound.args |= {step.activation: norm.activation, step.norm_before_gate: norm.norm_before_gate}
    shape = val_of(x).shape
    bound.like = val_of(x).new_empty((*shape[:-2], heads * width))
    _bind_out(bound, step, norm, shape)
    if bound.is_inner(step):
        bound.start_sinks_from(_joined(bound, norm, heads * width))


def bind_product(step: SiluMul, bound: Binding) -> None:
    """Bind the product of a site.

    Raises:
        Unmatched: its halves are no views of rows.
    """
    product = bound.use.product
    if product is None:
        raise Unmatched(f"no silu(gate) * up of {bound.use.site.layer} is known")
    gate, up = (bound.now(each) for each in (product.gate, product.up))
    rows: list[Node | Made]
    if product.halves:
        ends = ((0, product.width), (product.width, 2 * product.width))
        rows = [Made(of=gate, columns=each, val=torch.ops.aten.slice.Tensor(value(gate), -1, *each)) for each in ends]
    else:
        rows = lay_out([gate, up], (product.width,))
    bound.args |= {step.gate: rows[0], step.up: rows[1], step.limit: product.limit}
    bound.like = val_of(rows[0])
    _bind_out(bound, step, product, bound.like.shape)
    bound.start_sinks_from(product.out)


def _bind_out(bound: Binding, step: GatedNorm | SiluMul, found: FoundGatedNorm | FoundProduct, shape: Any) -> None:
    """The result of a step whose op may give it in another shape than the graph has it."""
    sources = [source for each in found.inputs for source in sources_of(each)]
    # The op may read what was copied instead of the copy.
    check_writes(min([*found.nodes, *(source for source in sources if source.target in _COPIES)]), found.out)
    # Copies and views in front are unread too, where nobody else reads them.
    bound.nodes += [*found.nodes, *sources]
    if bound.is_inner(step):
        bound.last.append(found.out)
        return
    bound.outs[step.out] = found.out
    if not same_shape(shape, value(found.out).shape):
        bound.views[step.out] = sizes_of(value(found.out).shape, *bound.sources, *found.inputs)


def _joined(bound: Binding, norm: FoundGatedNorm, width: int) -> Node:
    """The node that joins the heads of a gated norm, which a quantisation starts from."""
    joined = [norm.out]
    while last_width(joined[-1]) != width:
        readers = list(joined[-1].users)
        if len(readers) != 1 or readers[0].target not in ROW_PRESERVING:
            return norm.out
        joined.append(readers[0])
    bound.nodes += joined
    return joined[-1]
