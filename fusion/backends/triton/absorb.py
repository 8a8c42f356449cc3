"""The launch of `mla_query_absorb`, see `family` for what all launches have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...declare import PAIRS, Op, QuantDtype
from ...ops.mla import absorbed
from ...ops.quantisation import LARGEST
from . import launcher, queries, tuning
from . import steps_of as rows_steps
from .absorb_kernel import query_absorb

LEAST = 16
"""Tokens of a program: one block of a tensor core or more."""
DEEPEST = 256
"""Columns of a head that a program holds at once."""


def steps_of(case: Any) -> tuple[int, ...]:
    """As `Backend.steps`: its own launches, that of what is behind torch's GEMM, and those of that."""
    behind, own = rows_steps(case), most(case.heads, case.nope_width)
    blocks = (LEAST << step for step in range((own // LEAST).bit_length()))
    return (*blocks, *(tokens for tokens in behind if tokens > own))


def most(heads: int, nope: int) -> int:
    """Tokens up to which the GEMM is ours, for heads of so many columns.

    Beyond, a whole decode layer is faster with torch's and one more launch (bench/results/mla_chain-*.json; 16 and 128 heads).
    """
    return 0 if nope > DEEPEST else 64 if heads <= 32 else 32


def function_of(op: Op) -> Callable[..., Any]:
    """The function that takes the op's arguments by position and launches the kernel."""
    name = op.name
    static = any(isinstance(argument, QuantDtype) for argument in op.args)
    concat = queries.function_of(op)

    def function(
        q_nope: Tensor, q_rope: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *options: Any
    ) -> Tensor:
        tokens, latent = q_nope.shape[:-2].numel(), weight.shape[-1]
        scale, pairs, dtype, steady = options if static else (None, options[0], q_nope.dtype, options[1])
        large = tokens > most(*q_nope.shape[-2:])
        if large and static:
            return concat(absorbed(q_nope, weight), q_rope, cos, sin, positions, scale, pairs, dtype)
        shape = (*q_nope.shape[:-1], latent + q_rope.shape[-1])
        out = torch.empty(shape, dtype=dtype, device=q_nope.device)
        if large:
            into = out.view(-1, *shape[-2:])[..., :latent].transpose(0, 1)
            torch.bmm(queries.heads_of(q_nope).transpose(0, 1), weight, out=into)
            queries.rope_into(q_rope, out, cos, sin, positions, pairs)
        elif out.numel():
            _launch(name, tokens, (q_nope, q_rope, weight, out), (cos, sin, positions), scale, pairs, steady)
        return out

    return function


def _launch(
    name: str,
    tokens: int,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    scale: Tensor | None,
    pairs: str,
    steady: bool,
) -> None:
    q_nope, q_rope, weight, out = queries.heads_of(tensors[0]), queries.heads_of(tensors[1]), *tensors[2:]
    cos, sin, positions = tables
    heads, nope, latent = weight.shape
    rope_width, scale_in = q_rope.shape[2], out if scale is None else scale
    transposed = weight.stride(2) != 1
    row = weight.stride(2) if transposed else weight.stride(1)
    nope_unit, rope_unit = queries.unit_of(q_nope), queries.unit_of(q_rope)
    both = weight.stride(0) | row
    weight_unit = both & -both & 15 or 16
    numbers = (
        tokens, q_nope.stride(0) // nope_unit, q_nope.stride(1) // nope_unit, q_rope.stride(0) // rope_unit,
        q_rope.stride(1) // rope_unit, weight.stride(0) // weight_unit, row // weight_unit,
        min(cos.shape[0], sin.shape[0]), cos.stride(0), sin.stride(0),
    )  # fmt: skip
    every = (q_nope, q_rope, weight, cos, sin, positions, scale_in, out)
    addresses = tuple(tensor.data_ptr() for tensor in every)
    special = launcher.special(max(numbers), addresses, every)
    block, device = max(LEAST, tuning.power_of_two(tokens)), out.get_device()
    key = (
        name, device, block, q_nope.dtype, cos.dtype, sin.dtype, positions.dtype, out.dtype, heads, nope, latent, rope_width,
        nope_unit, rope_unit, weight_unit, transposed, pairs, steady, special,
    )  # fmt: skip
    if launcher.again(key, device, addresses, numbers):
        return
    deep = max(16, tuning.power_of_two(nope))
    wave = launcher.wave(out.device)
    columns, warps, together = tuning.launch_absorb(block, heads, latent, deep * weight.element_size(), wave)
    constants = (
        heads, nope, latent, rope_width, nope_unit, rope_unit, weight_unit, transposed, scale is not None,
        LARGEST.get(out.dtype, 0.0), PAIRS.index(pairs), tuning.power_of_two(rope_width // 2),
        block, together, deep, columns, launcher.interpreted(out.device), steady,
    )  # fmt: skip
    launcher.first(
        query_absorb, key, every, numbers, constants,
        rows=1, sides=-(-heads // together), warps=warps, beside=heads * -(-latent // columns),
    )  # fmt: skip
