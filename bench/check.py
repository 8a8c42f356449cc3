"""Whether a peer's results are right: every element, against float64.

What is right is the fusion's chain in float64. A norm may err by its roundings, a sum by one. A quantised value may err by half a step of fp8 at its size, and a scale by float32's
rounding; a peer that quantises the rounded norm is held to that norm's rounding on top.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..fusion.declare import Like, Quantised, Result
from ..fusion.ops.quantisation import scale_strides
from .arithmetic import EXACT, LARGEST, SMALLEST_AMAX, compose
from .inputs import Work

NORM_UNITS = {torch.bfloat16: 1.6, torch.float16: 1.6, torch.float32: 16.0}
"""Largest relative error of a norm, in units of its dtype's epsilon. A rounding errs by half a unit, and kernels that
round before the weight do it twice; in float32 the sums themselves are what errs."""

SUM_UNITS = 0.6
"""Likewise of a residual sum, which is rounded once."""

SCALE_UNITS = 16.0
"""Largest relative error of a scale, in units of float32's epsilon."""

_FLOAT32 = torch.finfo(torch.float32).eps


@frozen(kw_only=True)
class Verdict:
    """What came of a check."""

    ok: bool
    error: float
    "Of norms, in units of the dtype's epsilon; the largest of all."
    quant_error: float | None
    "Of quantised values, in half steps of fp8; None where nothing is quantised."
    message: str
    "What is wrong, or empty."


def expected(work: Work, index: int) -> tuple[Tensor, ...]:
    """What the results of one set should be, in float64: for quantised values and for scales, what is quantised."""
    return compose(work.case.declared, EXACT)(*work.arguments(work.sets[index]))


def poison(results: tuple[Tensor, ...]) -> None:
    """Fill results with NaN, so that what is not written again shows."""
    for result in results:
        if result.dtype == torch.uint8:
            result.zero_()
        elif result.dtype in LARGEST:
            result.view(torch.uint8).fill_(_nan_byte(result.dtype))
        else:
            result.fill_(float("nan"))


def _nan_byte(dtype: torch.dtype) -> int:
    return 0x80 if dtype == torch.float8_e4m3fnuz else 0x7F


def check(work: Work, right: tuple[Tensor, ...], results: tuple[Tensor, ...], rounds_between: bool) -> Verdict:
    """Hold the results of one set to what they should be."""
    problem = _shapes(work, results)
    if problem:
        return Verdict(ok=False, error=float("inf"), quant_error=None, message=problem)
    fusion = work.case.declared
    sums = () if fusion.add is None else (fusion.add.out,)
    error, quant_error = 0.0, None
    problems = []
    for result, got, exact in zip(fusion.op.results, results, right, strict=True):
        if isinstance(result, Like):
            off = _norm_error(got, exact)
            error = max(error, off, key=_nan_above_all)
            problems.append(_rounding_problem(work, off, "sum" if result.name in sums else "norm"))
    quant = fusion.quant
    if quant is not None:
        places = {result.name: place for place, result in enumerate(fusion.op.results)}
        values, scales = results[places[quant.out]], results[places[quant.scales]]
        quant_error, problem = _quantised(work, right[places[quant.out]], values, scales, rounds_between)
        problems.append(problem)
    message = next(filter(None, problems), "")
    return Verdict(ok=not message, error=error, quant_error=quant_error, message=message)


def _nan_above_all(error: float) -> tuple[bool, float]:
    return error != error, error


def check_copy(results: tuple[Tensor, ...]) -> Verdict:
    """A copy has copied."""
    same = torch.equal(results[0], results[1])
    return Verdict(ok=same, error=0.0, quant_error=None, message="" if same else "the copy differs from its source")


def _rounding_problem(work: Work, error: float, what: str) -> str:
    allowed = SUM_UNITS if what == "sum" else NORM_UNITS[work.dtype]
    if error != error:
        return f"a {what} holds NaN: an element was not written, or computed wrongly"
    if error > allowed:
        return f"a {what} is off by {error:.3g} roundings of {work.case.dtype} (allowed {allowed:g})"
    return ""


def _shapes(work: Work, results: tuple[Tensor, ...]) -> str:
    wanted = [_kind_of(work, result) for result in work.case.declared.op.results]
    found = [(tuple(result.shape), result.dtype) for result in results]
    if found != wanted:
        return f"results are {_listed(found)}, expected {_listed(wanted)}"
    quant = work.case.declared.quant
    for result, got in zip(work.case.declared.op.results, results, strict=True):
        if quant is not None and result.name == quant.scales:
            strides = scale_strides(tuple(got.shape), work.case.column_major)
            if any(size > 1 and one != two for size, one, two in zip(got.shape, got.stride(), strides, strict=True)):
                return f"the scales {tuple(got.shape)} have strides {got.stride()}, expected {strides}"
    return ""


def _kind_of(work: Work, result: Result) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype."""
    case = work.case
    if isinstance(result, Like):
        return (work.tokens, case.width_of(result.of)), work.dtype
    if isinstance(result, Quantised):
        return (work.tokens, case.width_of(result.of)), work.fp8
    return (work.tokens, case.groups_of(result.of)), torch.float32


def _listed(shapes: list[Any]) -> str:
    return ", ".join(f"{dtype} {shape}".removeprefix("torch.") for shape, dtype in shapes)


def _norm_error(got: Tensor, right: Tensor) -> float:
    info = torch.finfo(got.dtype)
    unit = right.abs().clamp_(min=info.tiny).mul_(info.eps)
    error = (got.double() - right).abs_().div_(unit).max()  # NaN goes through max
    return float(error)


def _quantised(work: Work, right: Tensor, got: Tensor, scales: Tensor, rounds_between: bool) -> tuple[float, str]:
    """(largest error in half steps, what is wrong or empty)."""
    case = work.case
    rounding = NORM_UNITS[work.dtype] * torch.finfo(work.dtype).eps if rounds_between else 0.0
    slack = SCALE_UNITS * _FLOAT32 + rounding
    # Below the normal numbers of float16 a rounding errs by a step of fixed size.
    subnormal = torch.finfo(work.dtype).smallest_normal * torch.finfo(work.dtype).eps if rounds_between else 0.0
    width, groups = got.shape[-1], scales.shape[-1]
    size = width if case.group_size is None else case.group_size
    padding = groups * size - width
    amax = torch.nn.functional.pad(right.abs(), (0, padding)).unflatten(-1, (groups, size)).amax(-1)
    ideal = amax.clamp_(min=SMALLEST_AMAX).div_(LARGEST[work.fp8])
    problem = _scale_problem(ideal, scales.double(), slack, case.ue8m0)
    per_column = scales.double().repeat_interleave(size, dim=-1)[:, :width]
    # In units of the scale, where fp8 has 3 bits after the leading one and a smallest step.
    magnitude = (right / per_column).abs_().mul_(1 + slack)
    least = 2.0 ** (-10 if work.fp8 == torch.float8_e4m3fnuz else -9)
    half_step = torch.exp2(torch.frexp(magnitude.clamp(min=least)).exponent.double() - 5).clamp_(min=least / 2)
    # float8 has no arithmetic of its own; float32 holds each of its values.
    error = (got.float().double() - right / per_column).abs_().sub_(magnitude.mul_(slack))
    error = error.sub_(subnormal / per_column).div_(half_step)
    largest = float(error.max())
    if largest != largest:
        return largest, "a quantised value or a scale is NaN: an element was not written, or computed wrongly"
    # Sums in another order move a value across the middle of a step by the slack, which is subtracted above.
    if largest > 1 + 1e-6 and not problem:
        problem = f"a quantised value is off by {largest:.6g} half steps of fp8 (allowed 1)"
    return largest, problem


def _scale_problem(ideal: Tensor, got: Tensor, slack: float, ue8m0: bool) -> str:
    if ue8m0:
        # The power of two that is not below; either neighbour where the ideal is within rounding of one.
        low = torch.exp2(torch.ceil(torch.log2(ideal * (1 - slack))))
        high = torch.exp2(torch.ceil(torch.log2(ideal * (1 + slack))))
        right = (got == low) | (got == high)
        return "" if bool(right.all()) else "a scale is not the power of two that it should be"
    error = float(((got - ideal) / ideal).abs().max())
    if error != error:
        return "a scale is NaN: an element was not written, or computed wrongly"
    return "" if error <= slack else f"a scale is off by {error:.2g} of itself (allowed {slack:.2g})"
