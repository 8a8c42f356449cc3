"""Arguments for any op of the norm family, and what its results should be in float64."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor

from layerfuse.bench.arithmetic import EXACT
from layerfuse.fusion.catalog import FUSIONS
from layerfuse.fusion.chain import Form
from layerfuse.fusion.compose import op_of, written
from layerfuse.fusion.declare import (
    Exponents,
    Like,
    Op,
    Padded,
    Quantised,
    Scales,
    SmallScales,
    WeightOffset,
)
from layerfuse.fusion.steps import SINKS, main_step
from layerfuse.testing.op_inputs import arguments_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
E4M3 = torch.float8_e4m3fn
ALL = [
    (fusion, form)
    for fusion in FUSIONS.values()
    for form in fusion.forms
    if form.op.chain is not None and not any(kernel.function for kernel in fusion.backends)
]
FORMS = {form.op.name: form for fusion, form in ALL if not fusion.across_ranks}
"""Every op of the family on one rank by name."""
REDUCED = {form.op.name: form for fusion, form in ALL if fusion.across_ranks}
"""Those that start with an all-reduce."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of fp4."""


@frozen(kw_only=True)
class Options:
    """What a case is made of."""

    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None
    offset: float = 0.0
    group_size: int = 64
    column_major: bool = False
    tma_aligned: bool = False
    use_ue8m0: bool = False
    swizzled: bool = False
    activation: str = "silu"
    norm_before_gate: bool = True
    limit: float = float("inf")
    pad: int = 40
    group: str = ""
    gap: int = 8
    "Columns of a row that are not read: inputs are column ranges."


def arguments(form: Form, leading: tuple[int, ...], width: int, options: Options, seed: int = 0) -> list[Any]:
    """Arguments by position. A second width is half of the first."""
    said = asdict(options)
    dtype, pad = said.pop("dtype"), said.pop("pad")
    said |= {argument.name: options.offset for argument in form.op.args if isinstance(argument, WeightOffset)}
    more = {"padded_width": width + pad, "device": DEVICE, "seed": seed}
    return arguments_of(form.op, leading, width, dtype, **said, **more)


def kernel_of(name: str) -> Any:
    return made_by_kernel(FORMS[name].op)


def made_by_kernel(op: Op) -> Callable[..., Any]:
    from layerfuse.fusion.backends.triton.family import function_of

    return function_of(op)


def made_by_reference(op: Op) -> Callable[..., Any]:
    return op.reference


def plain(form: Form, given: list[Any], made_by: Callable[[Op], Callable[..., Any]]) -> Tensor:
    """What the op without its quantisation gives of the same arguments: what is quantised, in the dtype of the rows."""
    main = main_step(form.chain)
    assert main is not None
    op = op_of(f"{form.op.name}_left_plain", [step for step in form.chain if step.stage != SINKS])
    with torch.no_grad():
        results = made_by(op)(*given[: len(op.args)])
    results = results if isinstance(results, tuple) else (results,)
    found: Tensor = results[[result.name for result in op.results].index(main.out)]
    assert found.dtype == given[0].dtype
    return found


def exact(form: Form, given: list[Any]) -> tuple[Tensor, ...]:
    """The results in float64; of what is quantised, and of its scales, the values themselves."""
    result = written(form.op.name, form.chain, form.op.args, form.op.results, EXACT)(*given)
    return result if isinstance(result, tuple) else (result,)


def unpacked(codes: Tensor) -> Tensor:
    """fp4 codes, two to a byte, as numbers."""
    table = torch.tensor([*E2M1, *(-magnitude for magnitude in E2M1)], device=codes.device, dtype=torch.float64)
    return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(-2)


def in_order(stored: Tensor, rows: int, columns: int) -> Tensor:
    """Swizzled scales row by row, one after the other as NVIDIA's documentation counts their bytes."""
    bytes_, tiles = stored.reshape(-1), stored.shape[1] // 4
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    at = (row // 128 * tiles + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    return bytes_.view(torch.uint8)[at.to(stored.device)].view(stored.dtype)


def units(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding. Triton's interpreter cuts float32 down to bfloat16."""
    return torch.finfo(dtype).eps / 2


def problems(
    form: Form,
    given: list[Any],
    results: Any,
    interpreted: bool = False,
    made_by: Callable[[Op], Callable[..., Any]] | None = None,
) -> list[str]:
    """What is wrong with results, as sentences.

    made_by: what made them, for any op. What is quantised is held to what the op without the quantisation gives then; without it,
    to what is exact, and a rounding of it, unless it is given beside.
    """
    results = results if isinstance(results, tuple) else (results,)
    right = exact(form, given)
    found = []
    names = [result.name for result in form.op.results]
    by_name = dict(zip(names, results, strict=True))
    main = main_step(form.chain)
    assert main is not None
    for result, got, want in zip(form.op.results, results, right, strict=True):
        if isinstance(result, Like | Padded):
            unit = units(got.dtype) * (2 if interpreted and got.dtype == torch.bfloat16 else 1)
            slack = unit * 1.001 + 16 * torch.finfo(torch.float32).eps
            tiny = 6e-8 if got.dtype == torch.float16 else 1e-30
            off = ((got.double() - want).abs() - tiny) / want.abs().clamp(min=1e-30)
            if got.numel() and float(off.max()) > slack:
                found.append(f"{result.name} is off by {float(off.max()):.3g}, allowed {slack:.3g}")
            if isinstance(result, Padded) and got[..., given[0].shape[-1] :].any():
                found.append(f"{result.name} is not padded with zeros")
        elif isinstance(result, Quantised):
            rounding = 0.0
            if made_by is not None:
                want = plain(form, given, made_by).double().reshape(want.shape)
            elif main.is_kept:
                want = by_name[main.out].double().reshape(want.shape)
            else:
                rounding = 1.001 * torch.finfo(results[-1].dtype).eps
            found += _quantised(form, given, by_name, got, want, interpreted, rounding)
    return found


def _quantised(
    form: Form,
    given: list[Any],
    results: dict[str, Tensor],
    got: Tensor,
    want: Tensor,
    interpreted: bool,
    rounding: float,
) -> list[str]:
    """Every value within half a step of its format at its scale, and every scale what it should be."""
    if not got.numel():
        return []
    kinds = {type(result): result.name for result in form.op.results}
    options = {argument.name: value for argument, value in zip(form.op.args, given, strict=True)}
    found = []
    if Exponents in kinds:
        exponents = results[kinds[Exponents]].double() - 127
        size, top = 32, 2 if got.dtype == torch.uint8 else 8
        amax = want.abs().unflatten(-1, (-1, 32)).amax(-1)
        # The exponent of amax rounded at 1.75: either neighbour where rounding decides.
        low, high = (
            torch.floor(torch.log2(amax * (8 / 7) * (1 + slack))) - top for slack in (-1e-6 - rounding, 1e-6 + rounding)
        )
        if not bool(((exponents == low) | (exponents == high)).all()):
            found.append("an exponent is wrong")
        scale = torch.exp2(exponents)
    elif SmallScales in kinds:
        factor, stored, size = options["global_scale"].double(), results[kinds[SmallScales]], 16
        groups = (*want.shape[:-1], want.shape[-1] // 16)
        if options["swizzled"]:
            stored = in_order(stored, prod(groups[:-1]), groups[-1]).view(groups)
        scale = stored.float().double()
        ideal = want.abs().unflatten(-1, (-1, 16)).amax(-1) * factor / 6
        low, high = (
            (ideal * (1 + slack)).clamp(max=448).to(E4M3).float().double()
            for slack in (-1e-6 - rounding, 1e-6 + rounding)
        )
        if not bool(((scale == low) | (scale == high)).all()):
            found.append("a scale is wrong")
        scale = scale / factor
    elif Scales in kinds:
        scale = results[kinds[Scales]].double()
        size = options.get("group_size", want.shape[-1])
        padding = scale.shape[-1] * size - want.shape[-1]
        amax = torch.nn.functional.pad(want.abs(), (0, padding)).unflatten(-1, (-1, size)).amax(-1)
        ideal = amax.clamp(min=1e-10) / 448
        if options["use_ue8m0"]:
            low, high = (
                torch.exp2(torch.ceil(torch.log2(ideal * (1 + slack)))) for slack in (-2e-6 - rounding, 2e-6 + rounding)
            )
            wrong = not bool(((scale == low) | (scale == high)).all())
        else:
            wrong = float(((scale - ideal) / ideal).abs().max()) > 2e-6 + rounding
        if wrong:
            found.append("a scale is wrong")
    else:
        scale, size = options["scale"].double(), want.shape[-1]
    spread = scale.repeat_interleave(size, -1)[..., : want.shape[-1]] if scale.dim() and scale.numel() > 1 else scale
    values = unpacked(got) if got.dtype == torch.uint8 else got.float().double()
    magnitude = (want / spread).abs()
    if got.dtype == torch.uint8:
        most = magnitude * (1 + rounding)
        step = torch.where(most < 2, 0.5, torch.where(most < 4, 1.0, 2.0))
        largest = 6.0
    else:
        step, largest = (
            torch.exp2(torch.frexp((magnitude * (1 + rounding)).clamp(min=2.0**-6)).exponent.double() - 4),
            448.0,
        )
    off = (values - (want / spread).clamp(-largest, largest)).abs() - magnitude * (4e-6 + rounding) > step / 2 * (
        1 + 1e-6
    )
    if interpreted and got.dtype != torch.uint8:
        # Triton's interpreter drops the carry of a value that rounds up to a power of two, and flushes fp8's subnormals.
        steps = magnitude / step
        carries = (steps > 15.5 * (1 - 1e-5 - rounding)) | (steps < 8 * (1 + 1e-5 + rounding))
        off &= ~(carries | (magnitude < 2.0**-6 * (1 + 1e-5 + rounding)))
    if bool(off.any()):
        found.append(f"{float(off.double().mean()):.2%} of the values are off by more than half a step")
    return found
