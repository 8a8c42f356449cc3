"""Which of a norm's quantisations one fused op takes in: all of them, or those that are as planned beside the norm itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...adapters.activation_quant import ActivationQuant
from ..match.arithmetic import convert
from ..match.errors import Unmatched
from ..match.provenance import ROW_PRESERVING
from ..match.quants import FoundQuant, check_readers, find_quants, readers_of
from ..target import Target
from .binding import Binding
from .quant_results import Results, why_not_as_planned

if TYPE_CHECKING:
    from ..steps import Quant

_SAME = {*ROW_PRESERVING, convert}
Chosen = list[tuple[FoundQuant, Results]]


def bind_quant(bound: Binding, step: Quant) -> None:
    """Bind the quantisation of what the middle of a chain gives.

    Raises:
        Unmatched: it is not quantised as planned, or something else reads it.
    """
    quant, target, out = bound.plan.config.quant_at(bound.use.site), bound.plan.target, bound.result
    if quant is None:
        raise Unmatched("the plan declares no quantisation here")
    if out is None:
        raise Unmatched("the chain has nothing to quantise")
    if bound.quantised is not None:
        rows, already = bound.quantised
        chosen = all_of(rows, quant, target, [already])
    else:
        bound.last.append(out)
        kept = any(each.is_kept for each in bound.chain)
        chosen = some_of(out, quant, target) if kept else all_of(out, quant, target, like=bound.like)
    first = chosen[0][0]
    inside = sorted({node for each, _ in chosen for node in each.nodes})
    bound.last += [inside[0], inside[-1]]
    bound.nodes += inside
    bound.args[step.dtype] = first.dtype
    if first.scale is not None:
        bound.args[step.scale] = first.scale
    else:
        bound.args[step.use_ue8m0] = quant.use_ue8m0
    if quant.group_size is not None:
        bound.args |= {step.group_size: quant.group_size, step.column_major: quant.column_major}
        if step.tma_aligned is not None:
            bound.args[step.tma_aligned] = quant.tma_aligned

    def finish(given: dict[str, Node]) -> list[Node]:
        return [node for _, result in chosen for node in result.replace(given[step.out], given.get(step.scales))]

    bound.finish.append(finish)


def all_of(
    out: Node,
    quant: ActivationQuant,
    target: Target,
    found: list[FoundQuant] | None = None,
    like: torch.Tensor | None = None,
) -> Chosen:
    """Every quantisation of a node, where nothing else reads it and they are all one.

    Args:
        out: what is quantised.
        quant: what the plan says.
        target: whose fp8 format is wanted.
        found: the quantisations where they are known, as with an op that norms and quantises.
        like: what the op's quantised values are shaped like, where that is not the node.

    Raises:
        Unmatched: something else reads it, or a quantisation is not as planned.
    """
    like = out.meta["val"] if like is None else like
    chosen: Chosen = []
    for each in find_quants(out) if found is None else found:
        result, reason = _planned(each, like, quant, target, chosen)
        if result is None:
            raise Unmatched(reason)
        chosen.append((each, result))
    return chosen


def some_of(out: Node, quant: ActivationQuant, target: Target) -> Chosen:
    """The quantisations of a node that are as planned and equal; what else reads the node reads it unquantised.

    Raises:
        Unmatched: none is as planned, or something that stays reads an intermediate of one.
    """
    readers = readers_of(out)
    chosen: Chosen = []
    left: list[FoundQuant] = []
    reasons = [*readers.problems]
    for each in readers.quants:
        result, reason = _planned(each, out.meta["val"], quant, target, chosen)
        if result is None:
            left.append(each)
            reasons.insert(0, reason)
        else:
            chosen.append((each, result))
    if not chosen:
        raise Unmatched(reasons[0])
    # Since the norm stays, so can what is computed from it for another quantisation, or only reshapes or widens it.
    front = [node for each, _ in chosen for node in each.nodes if _is_the_norm(node, out)]
    stays = [*(node for each in left for node in each.nodes), *(user for node in front for user in node.users)]
    check_readers([each for each, _ in chosen], beside=stays)
    return chosen


def _is_the_norm(node: Node, out: Node) -> bool:
    while node is not out and node.target in _SAME and isinstance(node.args[0], Node):
        node = node.args[0]
    return node is out


def _planned(
    found: FoundQuant, like: Any, quant: ActivationQuant, target: Target, before: Chosen
) -> tuple[Results | None, str]:
    if isinstance(like, torch.Tensor) and like.dtype == torch.float64:
        return None, "what is quantised is torch.float64; quantisation starts from float32, bfloat16 or float16"
    try:
        result = Results(found, like)
    except Unmatched as reason:
        return None, str(reason)
    problem = why_not_as_planned(found, result, like.shape[-1], quant, target)
    if problem is None and before and before[0][0].scale is not found.scale:
        problem = f"the norm is quantised by two static scales, {before[0][0].scale} and {found.scale}"
    return (result, "") if problem is None else (None, problem)
