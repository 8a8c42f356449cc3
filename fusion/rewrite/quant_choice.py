"""Which of a norm's quantisations one fused op takes in: all of them, or those that are as planned beside the norm itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ...adapters.activation_quant import ActivationQuant
from ..match.arithmetic import convert
from ..match.errors import Unmatched
from ..match.provenance import ROW_PRESERVING
from ..match.quants import FoundQuant, check_readers, find_quants, readers_of
from ..match.values import value
from .binding import Binding
from .quant_results import Results, why_not_as_planned

if TYPE_CHECKING:
    from ..steps import Quant

_SAME = {*ROW_PRESERVING, convert}
Chosen = list[tuple[FoundQuant, Results]]
Left = list[tuple[FoundQuant, str]]
"""Those that are not as planned, and why."""


def bind_quant(step: Quant, bound: Binding) -> None:
    """Bind the quantisation of what the middle of a chain gives.

    Raises:
        Unmatched: it is not quantised as planned, or something else reads it.
    """
    quant, out = bound.plan.config.quant_at(bound.use.site), bound.result
    if quant is None:
        raise Unmatched("the plan declares no quantisation here")
    if out is None:
        raise Unmatched("the chain has nothing to quantise")
    if bound.quantised is not None:
        rows, already = bound.quantised
        chosen = _as_planned([already], value(rows), bound, quant)
    elif any(each.is_kept for each in bound.chain):
        bound.last.append(out)
        chosen = _some_of(out, bound, quant)
    else:
        bound.last.append(out)
        chosen = _as_planned(find_quants(out), value(out) if bound.like is None else bound.like, bound, quant)
    first = chosen[0][0]
    inside = sorted({node for each, _ in chosen for node in each.nodes})
    bound.last += [inside[0], inside[-1]]
    bound.nodes += inside
    bound.args |= {
        step.dtype: first.dtype,
        step.scale: first.scale,
        step.global_scale: first.scale,
        step.swizzled: quant.swizzled,
        step.use_ue8m0: quant.use_ue8m0,
        step.group_size: quant.group_size,
        step.column_major: quant.column_major,
        step.tma_aligned or "tma_aligned": quant.tma_aligned,
    }

    def finish(given: dict[str, Node]) -> list[Node]:
        return [node for _, result in chosen for node in result.replace(given[step.out], given.get(step.scales))]

    bound.finish.append(finish)


def _as_planned(
    quants: Iterable[FoundQuant], like: torch.Tensor, bound: Binding, quant: ActivationQuant, left: Left | None = None
) -> Chosen:
    """The quantisations that are as planned and equal. `like`: what their values are shaped like.

    Raises:
        Unmatched: one is not, and there is no `left` that it may be left in, with the reason.
    """
    chosen: Chosen = []
    if like.dtype == torch.float64:
        raise Unmatched("what is quantised is torch.float64; quantisation starts from float32, bfloat16 or float16")
    for found in quants:
        try:
            result = Results(found, like, bound.sources)
            problem = why_not_as_planned(found, result, like.shape[-1], quant, bound.plan.target)
            if problem is None and chosen and chosen[0][0].scale is not found.scale:
                problem = f"the norm is quantised by two scales that are given, {chosen[0][0].scale} and {found.scale}"
            if problem is not None:
                raise Unmatched(problem)
        except Unmatched as reason:
            if left is None:
                raise
            left.append((found, str(reason)))
        else:
            chosen.append((found, result))
    return chosen


def _some_of(out: Node, bound: Binding, quant: ActivationQuant) -> Chosen:
    """The quantisations of a node that are as planned and equal; what else reads the node reads it unquantised.

    Raises:
        Unmatched: none is as planned, or something that stays reads an intermediate of one.
    """
    readers = readers_of(out)
    left: Left = []
    chosen = _as_planned(readers.quants, value(out), bound, quant, left)
    if not chosen:
        raise Unmatched(left[-1][1] if left else readers.problems[0])
    # Since the norm stays, so can what is computed from it for another quantisation, or only reshapes or widens it.
    front = [node for each, _ in chosen for node in each.nodes if _is_the_norm(node, out)]
    stays = [*(node for each, _ in left for node in each.nodes), *(user for node in front for user in node.users)]
    check_readers([each for each, _ in chosen], beside=stays)
    return chosen


def _is_the_norm(node: Node, out: Node) -> bool:
    while node is not out and node.target in _SAME and isinstance(node.args[0], Node):
        node = node.args[0]
    return node is out
