"""Arguments of an op, made from its declaration: what contracts and tests call any op with."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..fusion.declare import (
    REQUIRED,
    Argument,
    Epsilon,
    GroupSize,
    Limit,
    Number,
    Op,
    OptionalIndex,
    PaddedWidth,
    QuantDtype,
    Rows,
    StaticScale,
    Table,
    Weight,
    WeightOffset,
)

HEADS = 3
"""Of rows that are normed head by head; those that have a number of their own have one less."""

POSITIONS = 7
"""Rows of the tables of a rope."""


def arguments_of(
    op: Op,
    leading: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    *,
    weight_dtype: torch.dtype | None = None,
    device: str = "cpu",
    gap: int = 8,
    seed: int = 0,
    **options: Any,
) -> list[Any]:
    """All arguments of an op by position.

    Args:
        op: its declaration.
        leading: the leading dimensions of its rows.
        width: the last one. Rows of a second width have half of it, of a third a third.
        dtype: of the rows.
        weight_dtype: of the weights; that of the rows if not given.
        device: of all tensors.
        gap: columns behind each row that are not its own: rows are column ranges of wider tensors.
        seed: of the values.
        options: other arguments by name, in the place of what is chosen here.

    Raises:
        TypeError: an argument that only its author can fill, as a table or a cache, is not among the options.
    """
    generator = torch.Generator().manual_seed(seed)
    widths = {name: width // (1 + i) for i, name in enumerate(op.widths)}
    rows: dict[str, int] = {}
    offset = next(
        (options[each.name] for each in op.args if isinstance(each, WeightOffset) and each.name in options), 0.0
    )

    def made(argument: Argument) -> Any:
        if argument.name in options:
            return options[argument.name]
        if isinstance(argument, Rows):
            own = rows[argument.name] = widths[argument.width]
            heads = HEADS - 1 if argument.own_heads and argument.like else HEADS
            shape = (*leading, *((heads,) if argument.heads else ()), own + gap)
            size = torch.randn(*shape[:-1], 1, generator=generator).exp()
            return (torch.randn(shape, generator=generator) * size).to(dtype).to(device)[..., :own]
        if isinstance(argument, Weight):
            weight = torch.randn(rows[argument.of], generator=generator) * 0.2 + 1 - offset
            return weight.to(weight_dtype or dtype).to(device)
        if isinstance(argument, StaticScale):
            return torch.tensor([argument.sample], device=device)
        if isinstance(argument, Table) and argument.partial:
            # Of one angle each, so that what is turned keeps its length.
            angles = torch.rand(POSITIONS, rows[argument.of] // 2, generator=torch.Generator().manual_seed(seed)) * 6.3
            first = next(each.name for each in op.args if isinstance(each, Table))
            return (angles.cos() if argument.name == first else angles.sin()).to(device)
        if isinstance(argument, OptionalIndex):
            return torch.randint(0, POSITIONS, (prod(leading),), generator=generator).to(device)
        if isinstance(argument, PaddedWidth):
            return width + 40
        if isinstance(argument, Number):
            return argument.sample
        for kind, value in _VALUES.items():
            if isinstance(argument, kind):
                return value
        if argument.default is not REQUIRED:
            return argument.default
        raise TypeError(f"{op.name}: say what {argument.name}, a {type(argument).__name__}, is to be")

    return [made(argument) for argument in op.args]


_VALUES: dict[type[Argument], Any] = {
    Epsilon: 1e-6,
    QuantDtype: torch.float8_e4m3fn,
    GroupSize: 32,
    Limit: float("inf"),
}


def results_of(results: Any) -> tuple[Tensor, ...]:
    """The results of a call as a tuple; an op that only writes has none."""
    if results is None:
        return ()
    return (results,) if isinstance(results, Tensor) else tuple(results)
