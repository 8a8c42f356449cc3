"""What is right of a sum over ranks: float64 of all parts, how far a rounded sum may be off, and the same bits on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..fusion.steps import Add, AllReduce, Norm
from .arithmetic import parts_of
from .cases import step_of
from .check import Slack, Verdict
from .inputs import Work

ROUNDING_UNITS = 0.6
"""Largest error of one addition of a sum over ranks, in units of its dtype's epsilon: a rounding errs by half a unit."""

ROUNDS_THE_SUM = "right where the sum over ranks may be rounded, before the residual is added"
"""What is said of results that are right in that sense alone."""


def _parts(work: Work, index: int) -> Tensor:
    reduced = step_of(work.case.form, AllReduce)
    place = next(place for place, rows in enumerate(work.case.form.op.rows) if reduced and rows.name == reduced.x)
    return parts_of(work.sets[index][place], dist.group.WORLD.group_name).double()


def _rounding(parts: Tensor) -> float:
    """Of a sum over ranks with a rounding after each addition, in units of the sum of the parts' sizes."""
    return ROUNDING_UNITS * (len(parts) - 1)


def slack(work: Work, index: int) -> Slack | None:
    """How far results may be off where the sum over ranks was rounded; None where the chain is another. All ranks call it."""
    form = work.case.form
    add, norm = step_of(form, Add), step_of(form, Norm)
    if step_of(form, AllReduce) is None or add is None or norm is None:
        return None
    parts = _parts(work, index)
    off = parts.abs().sum(0).mul_(_rounding(parts) * torch.finfo(work.dtype).eps)
    given = dict(zip((rows.name for rows in form.op.rows), work.sets[index], strict=True))
    total = parts.sum(0).add_(given[add.residual])
    size = total.square().mean(-1, keepdim=True).add_(work.case.epsilons[norm.epsilon]).sqrt_()
    offset = 0.0 if norm.weight_offset is None else work.case.weight_offsets[norm.weight_offset]
    factor = (work.weights[norm.weight].double() + offset).abs()
    # An element is off by its own error, and by that of the root mean square.
    of_size = off.square().mean(-1, keepdim=True).sqrt_() / size
    return Slack(total=off, norm=(off + total.abs() * of_size) * factor / size)


def check_sum(work: Work, index: int, results: tuple[Tensor, ...]) -> Verdict:
    """Hold an all-reduce alone to the sum. All ranks call it."""
    parts = _parts(work, index)
    (got,) = results
    allowed = parts.abs().sum(0).mul_(torch.finfo(work.dtype).eps).clamp_(min=torch.finfo(work.dtype).tiny)
    worst = float((got.double() - parts.sum(0)).abs_().div_(allowed).max())
    most = _rounding(parts)
    if worst <= most:
        return Verdict(ok=True, error=worst, quant_error=None, message="")
    said = (
        "holds NaN: an element was not written"
        if worst != worst
        else f"is off by {worst:.3g} roundings (allowed {most:g})"
    )
    return Verdict(ok=False, error=worst, quant_error=None, message=f"a sum over ranks {said}")


def same_bits(results: tuple[Tensor, ...]) -> bool:
    """Whether this rank's results are those of the first, bit by bit. All ranks call it."""
    same = True
    for result in results:
        mine = result.contiguous().view(torch.uint8)
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        same = torch.equal(mine, theirs) and same
    return same
