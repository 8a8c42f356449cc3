"""How far what a kernel gives may be from its op's reference, element by element: by the dtype, and by the format of what is quantised.

The units are those that `layerfuse bench` holds every peer to. There results are held to float64; here the reference has rounded too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from .declare import (
    ELEMENTS,
    Argument,
    BlockScale,
    Cache,
    ExpertWeights,
    Exponents,
    Flag,
    GlobalScale,
    GroupSize,
    LinearWeight,
    Op,
    Output,
    Product,
    Quantised,
    Result,
    Scales,
    SmallScales,
    Swizzled,
)
from .ops.cache_layout import DS_GROUP
from .ops.quantisation import DTYPES, LARGEST, unswizzled

NORM_UNITS = {torch.bfloat16: 1.6, torch.float16: 1.6, torch.float32: 16.0}
"""Largest relative error of a norm, in units of its dtype's epsilon. A rounding errs by half a unit, and kernels that
round before the weight do it twice; in float32 the sums themselves are what errs."""

PRODUCT = {1: 2.0**-5, 2: 2.0**-9}
"""Largest error of a product with a weight whose elements have so many bytes, as a part of the row's largest. Hopper's tensor cores keep 14 bits of a sum
of fp8 products (DeepSeek-V3, arXiv 2412.19437, section 3.5.2), and what an op quantises in between may go either way."""

SCALE_UNITS = 16.0
"""Largest relative error of a scale, in units of float32's epsilon."""

FLOAT32 = torch.finfo(torch.float32).eps

_HELD = {DTYPES[name]: element for name, element in ELEMENTS.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@frozen(kw_only=True)
class Apart:
    """One result of a call, beside what the reference gives."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    largest: float
    "The largest difference; of quantised values, of what they stand for."
    first: tuple[int, ...] | None
    "The first element that is further off than it may be; None: none is."
    got: float = 0.0
    "That element."
    wanted: float = 0.0
    "What the reference gives there."

    def __str__(self) -> str:
        result = f"{self.name}, {self.dtype} {self.shape}".replace("torch.", "")
        where = (
            "" if self.first is None else f", first at {list(self.first)}: {self.got:g}, where it is {self.wanted:g}"
        )
        return f"{result} is up to {self.largest:.2g} away from the reference{where}"


def compare(op: Op, given: tuple[Any, ...], got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> Iterator[Apart]:
    """Hold the results of a call, and behind them what it has written to, to those of the reference.

    What is quantised was rounded to the dtype of the rows before, by which two kernels may differ; some of AITER's round behind it.

    Args:
        op: the declaration.
        given: the call's arguments, all by position.
        got: the op's results in their order, then the arguments that it writes to.
        wanted: the same of the reference, of the same shapes and dtypes.
    """
    named = dict(zip((each.name for each in op.args), given, strict=True))
    made: tuple[Result | Argument, ...] = (*op.results, *op.mutated)
    ours, theirs = ({each.name: of for each, of in zip(made, several, strict=True)} for several in (got, wanted))
    dtype = given[0].dtype
    slack = SCALE_UNITS * FLOAT32 + NORM_UNITS.get(dtype, 0.0) * torch.finfo(dtype).eps
    subnormal = _step_below_normal(dtype)
    scaling = next((each for each in op.results if isinstance(each, Scales | BlockScale)), None)
    powers = isinstance(scaling, Exponents) or any(
        isinstance(each, Flag) and each.name == "use_ue8m0" and named[each.name] for each in op.args
    )
    sizes = [named[each.name].element_size() for each in op.args if isinstance(each, LinearWeight | ExpertWeights)]
    group = next((named[each.name] for each in op.args if isinstance(each, GroupSize)), None)
    for each in made:
        mine, right = ours[each.name], theirs[each.name]
        if isinstance(each, Scales):
            # Rounding may move what is rounded up to a power of two to the next one.
            yield _apart(each.name, mine, right, slack, 0.0, steps=1 if powers else 0)
        elif isinstance(each, Exponents):
            yield _apart(each.name, mine, right, 0.0, 1.0)
        elif isinstance(each, SmallScales):
            # Rounding may move a scale to the next one of its format.
            yield _apart(
                each.name, mine.float(), right.float(), 2.0**-3 + slack, _HELD[mine.dtype].smallest, shown=mine
            )
        elif isinstance(each, Quantised):
            size = scaling.columns if isinstance(scaling, BlockScale) else None if scaling is None else group
            factors = [None if scaling is None else of[scaling.name] for of in (ours, theirs)]
            if isinstance(scaling, SmallScales):
                factors = [_small(op, named, of[scaling.name], mine) for of in (ours, theirs)]
            yield _quantised(each.name, mine, right, factors, size, slack, subnormal, named.get("scale"))
        elif isinstance(each, Cache):
            yield from _entries(each, named, mine, right, slack, subnormal)
        elif mine.dtype in LARGEST:
            yield _quantised(each.name, mine, right, [None, None], None, slack, subnormal, named.get("cache_scale"))
        else:
            of_row = SCALE_UNITS * FLOAT32
            if isinstance(each, Product | Output):
                of_row = max((PRODUCT.get(size, of_row) for size in sizes), default=of_row)
            yield _apart(each.name, mine, right, _units(mine.dtype), 0.0, of_row=of_row)


def _units(dtype: torch.dtype) -> float:
    return float(NORM_UNITS.get(dtype, NORM_UNITS[torch.float32]) * torch.finfo(dtype).eps)


def _apart(
    name: str,
    got: Tensor,
    wanted: Tensor,
    relative: float,
    absolute: float | Tensor,
    *,
    of_row: float = 0.0,
    steps: int = 0,
    shown: Tensor | None = None,
) -> Apart:
    """Args: of_row: what may be off on top, relative to the row's largest: a rope's columns cancel. steps: of powers of two."""
    like = got if shown is None else shown
    said: dict[str, Any] = {"name": name, "shape": tuple(like.shape), "dtype": like.dtype}
    mine, right = got.double(), wanted.double()
    if not mine.numel():
        return Apart(**said, largest=0.0, first=None)
    size = torch.maximum(mine.abs(), right.abs())
    same = (mine == right) | (mine.isnan() & right.isnan())
    off = (mine - right).abs().masked_fill_(same, 0.0).nan_to_num_(nan=float("inf"), posinf=float("inf"))
    size.nan_to_num_(0.0, posinf=0.0)  # what is not finite allows nothing
    allowed = size * relative + absolute + size.amax(-1, keepdim=True) * of_row
    if steps:
        allowed = torch.maximum(allowed, size / 2)
    beyond = (off > allowed).nonzero()
    if not len(beyond):
        return Apart(**said, largest=float(off.max()), first=None)
    first = tuple(beyond[0].tolist())
    return Apart(**said, largest=float(off.max()), first=first, got=float(mine[first]), wanted=float(right[first]))


def _quantised(
    name: str,
    got: Tensor,
    wanted: Tensor,
    factors: list[Tensor | None],
    size: int | None,
    slack: float,
    subnormal: float,
    scale: Tensor | None = None,
) -> Apart:
    """Either may be half a step of the format from what is exact, so that a step is between them.

    subnormal: what the rounding before may move a value by, however small that is; scale: what divided it, where no factors did.
    """
    element = _HELD[got.dtype]
    step, smallest = element.step, element.smallest
    mine, right = (values_of_e2m1(each) if element.per > 1 else each.float().double() for each in (got, wanted))
    if factors[0] is None or factors[1] is None:
        beyond = 0.0 if scale is None else (subnormal / scale.double()).nan_to_num_(0.0, posinf=0.0)
        return _apart(name, mine, right, step + slack, smallest + beyond, shown=got)
    ours, theirs = (_spread(each, mine.shape[-1], size) for each in factors if each is not None)
    least = torch.maximum(ours, theirs) * smallest + subnormal
    return _apart(name, mine * ours, right * theirs, step + slack, least, shown=got)


def _step_below_normal(dtype: torch.dtype) -> float:
    """Below its normal numbers a dtype rounds by a step of fixed size, as those of float16 do."""
    return float(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)


def _spread(scales: Tensor, width: int, size: int | None) -> Tensor:
    """What multiplies each of the values: of one scale, or exponent, for so many of them, or for the whole row."""
    factor = torch.exp2(scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
    return factor.repeat_interleave(width if size is None else size, dim=-1)[..., :width]


def _small(op: Op, named: Mapping[str, Any], scales: Tensor, values: Tensor) -> Tensor:
    """What multiplies each group of NVFP4's values (..., width / 2), (..., width / 16) in float64."""
    kinds = {type(each): named[each.name] for each in op.args}
    groups = (*values.shape[:-1], values.shape[-1] * 2 // SmallScales.columns)
    if kinds[Swizzled]:
        scales = unswizzled(scales, prod(groups[:-1]), groups[-1]).view(groups)
    return scales.float().double() / kinds[GlobalScale].double()


def values_of_e2m1(bytes_: Tensor) -> Tensor:
    """Two values of each byte, the low bits first, in float64."""
    codes = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2).long()
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64, device=bytes_.device)[codes]


def _entries(
    cache: Cache, named: Mapping[str, Any], got: Tensor, wanted: Tensor, slack: float, subnormal: float
) -> Iterator[Apart]:
    """The entries whose bytes differ, in slots that are to be written and in others: a cache as a whole is too large for float64."""
    bits = _BITS[got.element_size()]
    slots = (got.view(bits) != wanted.view(bits)).any(-1).nonzero()
    mine, right = (each[slots.unbind(-1)] for each in (got, wanted))
    held: Iterable[Apart]
    if got.dtype == torch.uint8:
        held = _ds_mla(cache, named, mine, right, slack, subnormal)
    elif got.dtype in LARGEST:
        scale = named.get("cache_scale")
        held = [_quantised(cache.name, mine, right, [None, None], None, slack, subnormal, scale)]
    else:
        held = [_apart(cache.name, mine, right, _units(got.dtype), 0.0, of_row=SCALE_UNITS * FLOAT32)]
    for apart in held:
        first = None if apart.first is None else (*slots[apart.first[0]].tolist(), apart.first[-1])
        yield evolve(apart, shape=(*got.shape[:-1], apart.shape[-1]), first=first)


def _ds_mla(
    cache: Cache, named: Mapping[str, Any], got: Tensor, wanted: Tensor, slack: float, subnormal: float
) -> Iterator[Apart]:
    """The three parts of an entry in `fp8_ds_mla`, see `ops.cache_layout`."""
    latent = named[cache.parts[0]].shape[-1]
    middle = latent + latent // DS_GROUP * 4

    def part(start: int, end: int | None, dtype: torch.dtype) -> list[Tensor]:
        return [each[..., start:end].contiguous().view(dtype) for each in (got, wanted)]

    mine, right = part(0, latent, torch.float8_e4m3fn)
    ours, theirs = part(latent, middle, torch.float32)
    yield _quantised(f"the latents in {cache.name}", mine, right, [ours, theirs], DS_GROUP, slack, subnormal)
    yield _apart(f"the scales in {cache.name}", ours, theirs, slack, 0.0)
    mine, right = part(middle, None, torch.bfloat16)
    units = _units(torch.bfloat16)
    yield _apart(f"the ropes in {cache.name}", mine, right, units, 0.0, of_row=SCALE_UNITS * FLOAT32)
