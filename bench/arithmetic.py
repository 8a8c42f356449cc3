"""A form's chain as plain torch: as a model without fused kernels has it, as a compiler should fuse it, and exactly.

The steps of the chain name the op's arguments, so what is composed here is made from the declaration alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (everybody's name for it)

from ..fusion.chain import Form
from ..fusion.compose import written
from ..fusion.formats import FORMATS
from ..fusion.ops.groups import world_size

Results = tuple[Tensor, ...]

# Written here once more rather than taken from the ops: the check should not share a mistake with what it checks.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
SMALLEST_AMAX = 1e-10


Arithmetic = Mapping[str, Callable[..., Any]]
"""How each kind of step is computed: functions by the names that `compose.lines` gives them."""


def compose(form: Form, how: Arithmetic) -> Callable[..., Results]:
    """The chain as one function, which takes all of the op's arguments by position and gives all of its results.

    What `how` does not quantise to is quantised as the format's own reference does.
    """
    function = written(form.op.name, form.chain, form.op.args, form.op.results, how)
    if len(form.op.results) > 1:
        return function
    return lambda *args: (function(*args),)


# ---- as a model without fused kernels has it -------------------------------------------------------------------------


def quantise_group(
    values: Tensor, dtype: torch.dtype, group_size: int | None, column_major: bool, tma_aligned: bool, ue8m0: bool
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
    if tma_aligned:
        scales = F.pad(scales.t(), (0, -scales.shape[0] % 4)).contiguous()[:, : scales.shape[0]].t()
    elif column_major:
        scales = scales.t().contiguous().t()
    return quantised.view(-1, groups * size)[:, :width], scales


def quantise_per_token(values: Tensor, dtype: torch.dtype, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """The same with scales (tokens, 1)."""
    return quantise_group(values, dtype, None, False, False, ue8m0)


def gathered(x: Tensor, group: str) -> Tensor:
    """What each rank gives, (ranks, *x.shape)."""
    every = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous().unsqueeze(0), world_size(group), group)
    parts: Tensor = torch.ops._c10d_functional.wait_tensor(every)
    return parts


def _torch_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    if weight.dtype != x.dtype:  # rms_norm wants one dtype; a model with float32 weights norms in float32
        x, weight = x.float(), weight.float()
    return F.rms_norm(x, x.shape[-1:], weight + offset if offset else weight, epsilon)


def _gated(norm: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
    def gated(
        x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, offset: float, activation: str, norm_before_gate: bool
    ) -> Tensor:
        factor = F.silu(gate.to(dtype)) if activation == "silu" else gate.to(dtype).sigmoid()
        if norm_before_gate:
            return norm(x, weight, epsilon, offset) * factor
        return norm(x * factor, weight, epsilon, offset)

    return gated


def silu_mul(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """In the dtype of the inputs."""
    if math.isfinite(limit):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str) -> Tensor:
    """Of heads (tokens, heads, width), in their dtype, as vLLM's native form has it."""
    c, s = (table[positions].unsqueeze(1).to(x.dtype) for table in (cos, sin))
    turned, rest = x[..., : 2 * c.shape[-1]], x[..., 2 * c.shape[-1] :]
    first, second = turned.chunk(2, -1) if pairs == "halves" else (turned[..., ::2], turned[..., 1::2])
    both = first * c - second * s, second * c + first * s
    whole = torch.cat(both, -1) if pairs == "halves" else torch.stack(both, -1).flatten(-2)
    return torch.cat([whole, rest], -1)


def quantise_static(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """By a given scale of one element."""
    return (values.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def _padded(value: Tensor, width: int) -> Tensor:
    return F.pad(value, (0, width - value.shape[-1]))


_ROUNDED: dict[str, Callable[..., Any]] = {
    "quantise_per_token": quantise_per_token,
    "quantise_group": quantise_group,
    "quantise_static": quantise_static,
    "_pad": _padded,
}

EAGER: Arithmetic = {
    **_ROUNDED,
    "_all_reduce": lambda x, group: gathered(x, group).sum(0),
    "_add": lambda x, residual: x + residual,
    "_wide": Tensor.float,
    "_norm": _torch_norm,
    "_gated_norm": _gated(_torch_norm),
    "_silu_mul": silu_mul,
    "_rope": rope,
    "_store": lambda value, rows: value.to(rows.dtype),
}
"""PyTorch's own operations one after another, with a rounding after each."""


# ---- without a rounding in between -----------------------------------------------------------------------------------


def _in(dtype: torch.dtype) -> Arithmetic:
    """All but what quantises, in one dtype."""

    def norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        wide, factor = x.to(dtype), weight.to(dtype)
        return (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * (factor + offset if offset else factor)
        )

    return {
        "_all_reduce": lambda x, group: gathered(x, group).to(dtype).sum(0),
        "_add": lambda x, residual: x.to(dtype) + residual.to(dtype),
        "_wide": lambda x: x.to(dtype),
        "_norm": norm,
        "_gated_norm": _gated(norm, dtype),
        "_silu_mul": lambda gate, up, limit: silu_mul(gate.to(dtype), up.to(dtype), limit),
        "_rope": rope,
        "_pad": _padded,
    }


FUSABLE: Arithmetic = {**_in(torch.float32), **_ROUNDED, "_store": lambda value, rows: value.to(rows.dtype)}
"""For a compiler to fuse."""

EXACT: Arithmetic = {
    **_in(torch.float64),
    **{
        form.op: (lambda values, *_: (values, values)) if len(form.results) > 1 else (lambda values, *_: values)
        for form in FORMATS.values()
    },
    "_store": lambda value, _: value,
}
"""In float64 and never rounded. In place of quantised values and of their scales, the values themselves."""


def fusable(form: Form, arguments: Sequence[Any]) -> Callable[..., Results | Tensor]:
    """What compilers are given: the op's own plain form if it has one, else its chain, as a function of tensors alone.

    Args:
        form: what is measured.
        arguments: of the op, by position; those that are no tensors become constants.
    """
    plain = form.op.plain
    tensors, every = [], [argument.name for argument in form.op.args]
    scope: dict[str, Any] = {"_chain": compose(form, FUSABLE) if plain is None else plain}
    for name, value in zip(every, arguments, strict=True):
        if isinstance(value, Tensor):
            tensors.append(name)
        else:
            scope[name] = value
    exec(f"def fusable({', '.join(tensors)}):\n    return _chain({', '.join(every)})\n", scope)
    function: Callable[..., Results | Tensor] = scope["fusable"]
    return function
