"""A fusion's chain as plain torch: as a model without fused kernels has it, as a compiler should fuse it, and exactly.

The steps of the chain name the op's arguments, so what is composed here is made from the declaration alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (everybody's name for it)

from ..fusion.chain import Add, Fusion, Norm, Quant
from ..fusion.declare import Like
from .errors import CannotMeasureError

Results = tuple[Tensor, ...]

# Written here once more rather than taken from the ops: the check should not share a mistake with what it checks.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
SMALLEST_AMAX = 1e-10


@frozen(kw_only=True)
class Arithmetic:
    """How each kind of step is computed."""

    add: Callable[[Tensor, Tensor], Tensor]
    norm: Callable[[Tensor, Tensor, float, float], Tensor]
    "From rows, weight, epsilon and weight offset."
    quantise: Callable[[Tensor, torch.dtype, int | None, bool, bool], tuple[Tensor, Tensor]]
    "From values, fp8 dtype, group size, column_major and use_ue8m0 to fp8 values and scales."
    store: Callable[[Tensor, Tensor], Tensor]
    "From a value and the rows that it belongs to, to the result."


def compose(fusion: Fusion, how: Arithmetic) -> Callable[..., Results]:
    """The chain as one function, which takes all of the op's arguments by position and gives all of its results.

    It is written out as source, since a compiler guards every object that it meets on the way through a loop over steps.

    Raises:
        CannotMeasureError: a step that is not known here.
    """
    lines = [f"def chain({', '.join(argument.name for argument in fusion.op.args)}):"]
    lines += [f"    {line}" for line in _lines(fusion)]
    scope: dict[str, Any] = {"_add": how.add, "_norm": how.norm, "_quantise": how.quantise, "_store": how.store}
    exec(compile("\n".join(lines), f"<chain of {fusion.name}>", "exec"), scope)
    function: Callable[..., Results] = scope["chain"]
    return function


def _lines(fusion: Fusion) -> Iterator[str]:
    reads = {argument.name: argument.name for argument in fusion.op.args}
    for step in fusion.chain:
        if isinstance(step, Add):
            # What follows reads the sum where it would have read x.
            yield f"made_{step.out} = _add({step.x}, {step.residual})"
            reads[step.x] = f"made_{step.out}"
        elif isinstance(step, Norm):
            offset = "0.0" if step.weight_offset is None else step.weight_offset
            yield f"made_{step.out} = _norm({reads[step.x]}, {step.weight}, {step.epsilon}, {offset})"
        elif isinstance(step, Quant):
            groups = ("None", "False") if step.per == "token" else (step.group_size, step.column_major)
            values = f"made_{fusion.norms[0].out}, {step.dtype}, {', '.join(groups)}, {step.use_ue8m0}"
            yield f"made_{step.out}, made_{step.scales} = _quantise({values})"
        else:
            raise CannotMeasureError(f"{fusion.name} has a step {type(step).__name__} that cannot be measured yet")
    stored = [
        f"_store(made_{result.name}, {result.of})" if isinstance(result, Like) else f"made_{result.name}"
        for result in fusion.op.results
    ]
    yield f"return ({', '.join(stored)},)"


# ---- as a model without fused kernels has it -------------------------------------------------------------------------


def wide_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    """The norm in float32, not yet rounded."""
    wide = x.float()
    factor = weight.float() + offset if offset else weight.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * factor


def quantise(
    values: Tensor, dtype: torch.dtype, group_size: int | None, column_major: bool, ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """Values (tokens, width) to fp8 and the float32 scales (tokens, groups)."""
    values = values.float()
    width = values.shape[-1]
    size = width if group_size is None else group_size
    groups = -(-width // size)
    if groups * size != width:
        values = F.pad(values, (0, groups * size - width))
    grouped = values.view(-1, groups, size)
    scales = grouped.abs().amax(-1).clamp(min=SMALLEST_AMAX) / LARGEST[dtype]
    if ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    quantised = (grouped / scales.unsqueeze(-1)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    if column_major:
        scales = scales.t().contiguous().t()
    return quantised.view(-1, groups * size)[:, :width], scales


def _torch_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight + offset if offset else weight, epsilon)


EAGER = Arithmetic(
    add=lambda x, residual: x + residual,
    norm=_torch_norm,
    quantise=quantise,
    store=lambda value, _: value,
)
"""PyTorch's own operations one after another, with a rounding after each."""

FUSABLE = Arithmetic(
    add=lambda x, residual: x.float() + residual.float(),
    norm=wide_norm,
    quantise=quantise,
    store=lambda value, rows: value.to(rows.dtype),
)
"""The arithmetic without a rounding in between, for a compiler to fuse."""


# ---- exactly ---------------------------------------------------------------------------------------------------------


def _exact_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * (weight.double() + offset)


EXACT = Arithmetic(
    add=lambda x, residual: x.double() + residual.double(),
    norm=_exact_norm,
    quantise=lambda values, *_: (values, values),
    store=lambda value, _: value,
)
"""In float64 and never rounded. In place of quantised values and of their scales, the values themselves."""


def fusable(fusion: Fusion, arguments: Sequence[Any]) -> Callable[..., Results | Tensor]:
    """What compilers are given: the op's own plain form if it has one, else its chain, as a function of tensors alone.

    Args:
        fusion: what is measured.
        arguments: of the op, by position; those that are no tensors become constants.
    """
    plain = fusion.op.plain
    tensors, every = [], [argument.name for argument in fusion.op.args]
    scope: dict[str, Any] = {"_chain": compose(fusion, FUSABLE) if plain is None else plain}
    for name, value in zip(every, arguments, strict=True):
        if isinstance(value, Tensor):
            tensors.append(name)
        else:
            scope[name] = value
    exec(f"def fusable({', '.join(tensors)}):\n    return _chain({', '.join(every)})\n", scope)
    function: Callable[..., Results | Tensor] = scope["fusable"]
    return function
