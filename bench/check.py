"""Whether a peer's results are right: every element, against float64.

What is right is the form's chain in float64. A norm may err by its roundings, a turned one by those of its pair, a sum by one, and padding not at all. A
quantised value may err by half a step of its format at its size, a scale by float32's rounding, and an exponent of the MX
formats not at all; what is quantised is rounded before, and that may err too. A sum over ranks may err as
float32's additions do, and where it is rounded before the residual is added, by that rounding too (`sums`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..fusion.closeness import FLOAT32, NORM_UNITS, SCALE_UNITS, values_of_e2m1
from ..fusion.declare import ELEMENTS, Exponents, Like, Padded, SmallScales
from ..fusion.ops import quantisation
from ..fusion.steps import Add, Quant
from .arithmetic import EXACT, SMALLEST_AMAX, compose
from .cases import step_of
from .inputs import DTYPES, FP8_DTYPES, Work

SUM_UNITS = 0.6
"""Largest relative error of a residual sum, which is rounded once, in units of its dtype's epsilon as `NORM_UNITS`."""


@frozen(kw_only=True)
class Verdict:
    """What came of a check."""

    ok: bool
    error: float
    "Of norms, in units of the dtype's epsilon; the largest of all."
    quant_error: float | None
    "Of quantised values, in half steps of their format; None where nothing is quantised."
    message: str
    "What is wrong, or empty."


def expected(work: Work, index: int) -> tuple[Tensor, ...]:
    """What the results of one set should be, in float64: for quantised values and for scales, what is quantised."""
    return compose(work.case.form, EXACT)(*work.arguments(work.sets[index]))


def poison(results: tuple[Tensor, ...]) -> None:
    """Fill results with NaN, so that what is not written again shows."""
    for result in results:
        if not result.dtype.is_floating_point:
            result.zero_()
        elif result.dtype in FP8_DTYPES.values():
            result.view(torch.uint8).fill_(_nan_byte(result.dtype))
        else:
            result.fill_(float("nan"))


def _nan_byte(dtype: torch.dtype) -> int:
    return 0x80 if dtype == torch.float8_e4m3fnuz else 0x7F


@frozen(kw_only=True, eq=False)
class Slack:
    """How far results may be off on top, element by element, in float64."""

    total: Tensor
    "The residual sum."
    norm: Tensor


def check(work: Work, right: tuple[Tensor, ...], results: tuple[Tensor, ...], more: Slack | None = None) -> Verdict:
    """Hold the results of one set to what they should be."""
    problem = _shapes(work, results)
    if problem:
        return Verdict(ok=False, error=float("inf"), quant_error=None, message=problem)
    form = work.case.form
    add, quant = step_of(form, Add), step_of(form, Quant)
    error, quant_error = 0.0, None
    problems = []
    for result, got, exact in zip(form.op.results, results, right, strict=True):
        if isinstance(result, Like | Padded):
            width = work.case.width_of(result.of) if isinstance(result, Padded) else got.shape[-1]
            is_sum = add is not None and result.name == add.out
            slack = None if more is None else more.total if is_sum else more.norm
            off = _norm_error(got[..., :width], exact[..., :width], slack, work.case.turned)
            error = max(error, off, key=_nan_above_all)
            problems.append(_rounding_problem(work, off, "sum" if is_sum else "norm"))
            # NaN is not zero either: a padding that was not written.
            problems.append("the padding is not zero" if bool((got[..., width:] != 0).any()) else "")
    if quant is not None:
        given = {result.name: place for place, result in enumerate(form.op.results)}
        exact, found = right[given[quant.out]], [results[given[name]] for name in quant.outs]
        quant_error, problem = _quantised(work, quant, exact, found, None if more is None else more.norm)
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
    case = work.case
    wanted = [(case.shape_of(result, work.tokens), _DTYPES[case.dtype_of(result)]) for result in case.form.op.results]
    found = [(tuple(result.shape), result.dtype) for result in results]
    if found != wanted:
        return f"results are {_listed(found)}, expected {_listed(wanted)}"
    quant = step_of(case.form, Quant)
    for result, got in zip(case.form.op.results, results, strict=True):
        if quant is not None and result.name == quant.scales:
            strides = quantisation.scale_strides(tuple(got.shape), case.column_major, case.tma_aligned)
            if any(size > 1 and one != two for size, one, two in zip(got.shape, got.stride(), strides, strict=True)):
                return f"the scales {tuple(got.shape)} have strides {got.stride()}, expected {strides}"
    return ""


_DTYPES = {**DTYPES, **{name.removeprefix("float8_"): dtype for name, dtype in quantisation.DTYPES.items()}}


def _listed(shapes: list[Any]) -> str:
    return ", ".join(f"{dtype} {shape}".removeprefix("torch.") for shape, dtype in shapes)


def _norm_error(got: Tensor, right: Tensor, slack: Tensor | None, turned: int | None) -> float:
    info = torch.finfo(got.dtype)
    size = right.abs()
    if turned is not None:  # what a turned column is the difference of is as large as its pair
        first, second, rest = size.split([turned // 2, turned // 2, right.shape[-1] - turned], -1)
        pair = torch.hypot(first, second)
        size = torch.cat([pair, pair, rest], -1)
    unit = size.clamp_(min=info.tiny).mul_(info.eps)
    # silu of -90 is -90 / (1 + exp(90)), and exp(90) is infinite in float32: such a gate may be zero.
    off = (got.double() - right).abs_().sub_(128 * torch.finfo(torch.float32).tiny)
    error = (off if slack is None else off.sub_(slack)).div_(unit).max()  # NaN goes through
    return max(float(error), 0.0) if error == error else float(error)


def _quantised(work: Work, quant: Quant, right: Tensor, found: list[Tensor], more: Tensor | None) -> tuple[float, str]:
    """(largest error in half steps, what is wrong or empty). `found`: the values, and what scales them if it is a result."""
    case = work.case
    slack = SCALE_UNITS * FLOAT32 + NORM_UNITS[work.dtype] * torch.finfo(work.dtype).eps
    width = right.shape[-1]
    element = ELEMENTS[quant.format.dtype or f"float8_{case.fp8}"]
    got = (
        values_of_e2m1(found[0]) if element.per > 1 else found[0].float().double()
    )  # float8 has no arithmetic of its own
    problem, scaling = "", quant.format.results[-1]
    if len(found) == 1:
        scale = work.weights[quant.scale].double()
    else:
        groups = found[1].shape[-1]
        size = quant.format.block or (width if case.group_size is None else case.group_size)

        def largest_of(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(values, (0, groups * size - width)).unflatten(-1, (groups, size)).amax(-1)

        amax = largest_of(right.abs())
        # Of a largest value, relative to it.
        off = slack if more is None else largest_of(more).div_(amax.clamp(min=SMALLEST_AMAX)).add_(slack)
        if isinstance(scaling, SmallScales):
            factor = work.weights[quant.global_scale].double()
            problem = _small_scale_problem(amax * factor / 6, found[1].float().double(), off)
            per_group = found[1].float().double() / factor
        elif isinstance(scaling, Exponents):
            problem = _exponent_problem(amax, found[1], off, math.frexp(element.largest)[1] - 1)
            per_group = torch.exp2(found[1].double() - 127)
        else:
            ideal = amax.clamp_(min=SMALLEST_AMAX).div_(element.largest)
            per_group = found[1].double()
            problem = _scale_problem(ideal, per_group, off, case.ue8m0)
        scale = per_group.repeat_interleave(size, dim=-1)[:, :width]
    # In units of the scale. Below the normal numbers of float16 a rounding errs by a step of fixed size.
    exact = (right / scale).clamp_(-element.largest, element.largest)
    subnormal = torch.finfo(work.dtype).smallest_normal * torch.finfo(work.dtype).eps
    beyond = subnormal / scale if more is None else (more + subnormal) / scale
    magnitude = exact.abs().mul_(1 + slack)
    highest = magnitude if more is None else magnitude + more / scale
    exponent = torch.frexp(highest.clamp(min=element.smallest)).exponent.double()
    half_step = torch.exp2(exponent - 2).mul_(element.step).clamp_(min=element.smallest / 2)
    error = (got - exact).abs_().sub_(magnitude.mul_(slack)).sub_(beyond).div_(half_step)
    worst = float(error.max())
    if worst != worst:
        return worst, problem or "a quantised value or a scale is NaN: an element was not written, or computed wrongly"
    # Sums in another order move a value across the middle of a step by the slack, which is subtracted above.
    if worst > 1 + 1e-6 and not problem:
        problem = f"a quantised value is off by {worst:.6g} half steps of {element.word} (allowed 1)"
    return worst, problem


def _exponent_problem(amax: Tensor, got: Tensor, slack: float | Tensor, largest: int) -> str:
    """An amax from 1.75 * 2^k on counts as 2^(k+1); within rounding of that either exponent is right."""

    def byte(value: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(value)
        return (exponent - 1 + (2 * mantissa >= 1.75) - largest + 127).masked_fill(value == 0, 0).clamp(0, 254)

    low, high = byte(amax * (1 - slack)), byte(amax * (1 + slack))
    return "" if bool(((got >= low) & (got <= high)).all()) else "an exponent is not that of the largest of its values"


def _small_scale_problem(ideal: Tensor, got: Tensor, slack: float | Tensor) -> str:
    """The nearest of e4m3fn; within rounding of the middle of two either is right."""
    low, high = (
        (ideal * each).clamp(max=448.0).to(torch.float8_e4m3fn).float().double() for each in (1 - slack, 1 + slack)
    )
    return "" if bool(((got >= low) & (got <= high)).all()) else "a scale is not that of the largest of its values"


def _scale_problem(ideal: Tensor, got: Tensor, slack: float | Tensor, ue8m0: bool) -> str:
    if ue8m0:
        # The power of two that is not below; either neighbour where the ideal is within rounding of one.
        low = torch.exp2(torch.ceil(torch.log2(ideal * (1 - slack))))
        high = torch.exp2(torch.ceil(torch.log2(ideal * (1 + slack))))
        right = (got == low) | (got == high)
        return "" if bool(right.all()) else "a scale is not the power of two that it should be"
    error = ((got - ideal) / ideal).abs()
    if bool(error.isnan().any()):
        return "a scale is NaN: an element was not written, or computed wrongly"
    wrong = error > slack
    allowed = "" if isinstance(slack, Tensor) else f" (allowed {slack:.2g})"
    return f"a scale is off by {float(error[wrong].max()):.2g} of itself{allowed}" if bool(wrong.any()) else ""
