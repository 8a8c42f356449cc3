"""Which of a norm's quantisations one fused op takes in: all of them, or those that are as planned beside the norm itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...adapters.activation_quant import ActivationQuant
from ..match.errors import Unmatched
from ..match.provenance import ROW_PRESERVING
from ..match.quant_forms import convert
from ..match.quants import FoundQuant, check_readers, find_quants, readers_of
from ..target import Target
from .quant_results import Results, why_not_as_planned

_SAME = {*ROW_PRESERVING, convert}
Chosen = list[tuple[FoundQuant, Results]]


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
