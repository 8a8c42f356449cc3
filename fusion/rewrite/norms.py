"""Binding the norm of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ..match.errors import Unmatched
from ..match.values import value
from .binding import Binding

if TYPE_CHECKING:
    from ..steps import Norm


def bind_norm(step: Norm, bound: Binding) -> None:
    """Bind a norm of a site.

    Raises:
        Unmatched: an op of the graph does more than the norm, or the chain does.
    """
    norm, spec = bound.norm_of(step)
    inner = bound.is_inner(step)
    if norm.add is not None and not any(each.adds for each in bound.chain):
        raise Unmatched(f"{norm.out} adds a residual itself ({norm.form}), and {bound.name} does not")
    if norm.quant is not None:
        if len(bound.use.norms) == 1:
            raise Unmatched(f"the engine's own op norms and quantises already ({norm.form})")
        if not inner:
            raise Unmatched(f"{norm.form} gives the norm quantised only")
        bound.quantised = (norm.x, norm.quant)
    if norm.weight_offset and step.weight_offset is None:
        raise Unmatched(f"{norm.out} adds {norm.weight_offset:g} to its weight, which the fused op does not")
    x = _unwidened(norm.x) if inner else norm.x
    # The spec's epsilon: a graph may have it rounded to float32.
    bound.args |= {step.x: bound.now(x), step.weight: norm.weight, step.epsilon: spec.epsilon}
    if step.weight_offset is not None:
        bound.args[step.weight_offset] = norm.weight_offset
    bound.nodes += norm.nodes
    bound.start_sinks_from(norm.out)
    if not inner:
        bound.outs[step.out] = norm.out


def _unwidened(x: Node) -> Node:
    """What was widened to float32: torch 2.11 leaves out the rounding between a norm and its quantisation."""
    source = x.args[0] if x.target is torch.ops.prims.convert_element_type.default else None
    widened = isinstance(source, Node) and value(source).dtype in (torch.bfloat16, torch.float16)
    return source if widened and value(x).dtype == torch.float32 else x
