"""What is right of a sum over ranks: float64 of all parts, how far it may be off in float32 or rounded, and the same bits on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..fusion.steps import Add, AllReduce, Norm
from .arithmetic import gathered
from .cases import step_of
from .check import Slack, Verdict
from .inputs import Work
from .reducers import parts_of

FLOAT32 = torch.finfo(torch.float32).eps / 2
"""Largest error of one addition in float32, relative to the sizes of what is added."""

ROUNDING_UNITS = 0.6
"""Largest error of one addition of a sum over ranks, in units of its dtype's epsilon: a rounding errs by half a unit."""

NORMS_THE_STREAM = "right where the norm may read the stream as it is stored"
ROUNDS_THE_SUM = "right where the sum over ranks may be rounded, before the residual is added"
"""What is said of results that are right in that sense alone, the stricter first."""


def _parts(work: Work, index: int) -> Tensor:
    """Of every rank, in float64, (ranks, tokens, width). All ranks call it."""
    return gathered(parts_of(work)[index], dist.group.WORLD.group_name).double()


def _rounding(parts: Tensor) -> float:
    """Of a sum over ranks with a rounding after each addition, in units of the sum of the parts' sizes."""
    return ROUNDING_UNITS * (len(parts) - 1)


def senses(work: Work, index: int) -> dict[str, Slack | None]:
    """How far results may be off, by what is then said of them, the strictest first. All ranks call it.

    In float32 each rank's part and the residual cost an addition, and where they cancel, its error outgrows a rounding of
    what is left. Chains without a sum over ranks have nothing of that.
    """
    form = work.case.form
    add, norm = step_of(form, Add), step_of(form, Norm)
    if step_of(form, AllReduce) is None or add is None or norm is None:
        return {"": None}
    parts, unit = _parts(work, index), torch.finfo(work.dtype).eps
    residual = dict(zip((rows.name for rows in form.op.rows), work.sets[index], strict=True))[add.residual]
    total, sizes = parts.sum(0).add_(residual), parts.abs().sum(0)
    size = total.square().mean(-1, keepdim=True).add_(work.case.epsilons[norm.epsilon]).sqrt_()
    offset = 0.0 if norm.weight_offset is None else work.case.weight_offsets[norm.weight_offset]
    factor = (work.weights[norm.weight].double() + offset).abs()

    def normed(off: Tensor) -> Tensor:
        # An element is off by its own error, and by that of the root mean square.
        return (off + total.abs() * (off.square().mean(-1, keepdim=True).sqrt_() / size)) * factor / size

    exact = (sizes + residual.abs()).mul_(len(parts) * FLOAT32)
    rounded = exact.add(sizes, alpha=_rounding(parts) * unit)
    return {
        "": Slack(total=exact, norm=normed(exact)),
        NORMS_THE_STREAM: Slack(total=exact, norm=normed(exact.add(total.abs(), alpha=ROUNDING_UNITS * unit))),
        ROUNDS_THE_SUM: Slack(total=rounded, norm=normed(rounded)),
    }


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
