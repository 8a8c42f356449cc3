"""The launch of the query ops, see `family` for what all launches have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...declare import PAIRS, Joined, Op, QuantDtype
from ...ops.quantisation import LARGEST
from .. import repeatable
from . import launcher, tuning
from .query_kernel import query


def function_of(op: Op) -> Callable[..., Any]:
    """The function that takes the op's arguments by position and launches the kernel."""
    name = op.name
    if not any(isinstance(result, Joined) for result in op.results):
        return rope_into
    static = any(isinstance(argument, QuantDtype) for argument in op.args)

    def function(
        q_latent: Tensor, q_rope: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *options: Any
    ) -> Tensor:
        scale, pairs, dtype = options if static else (None, options[0], q_latent.dtype)
        width = q_latent.shape[-1] + q_rope.shape[-1]
        out = torch.empty((*q_latent.shape[:-1], width), dtype=dtype, device=q_latent.device)
        _launch(name, (q_latent, q_rope, out), (cos, sin, positions), scale, pairs)
        return out

    return function


def rope_into(q_rope: Tensor, query: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str) -> None:
    """`mla_query_rope`."""
    # A view: what a reshape copied would take the writes. Torch refuses leading dimensions that cannot be counted as one.
    _launch_rope(q_rope, query, cos, sin, positions, pairs)


def _launch_rope(
    q_rope: Tensor, query: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str
) -> launcher.Launch | None:
    rows = (None, q_rope, query.view(-1, *query.shape[-2:]))
    launch = _launch("mla_query_rope", rows, (cos, sin, positions), None, pairs)
    return launch if q_rope.dim() == 3 else None


repeatable[rope_into] = lambda: launcher.repeated(
    _launch_rope,
    lambda q_rope, query, cos, sin, positions, _: (query, q_rope, cos, sin, positions, query, query),
)


def heads_of(x: Tensor) -> Tensor:
    """Rows of heads with the tokens' leading dimensions counted as one: (tokens, heads, width)."""
    return x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])


def unit_of(x: Tensor) -> int:
    """The largest power of two, up to 16, that divides the strides of tokens and of heads."""
    strides = x.stride(0) | x.stride(1)
    return strides & -strides & 15 or 16


def _launch(
    name: str,
    rows: tuple[Tensor | None, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    scale: Tensor | None,
    pairs: str,
) -> launcher.Launch | None:
    q_rope, out = heads_of(rows[1]), heads_of(rows[2])
    latent = out if rows[0] is None else heads_of(rows[0])
    cos, sin, positions = tables
    tokens, heads, rope_width = q_rope.shape
    if tokens == 0 or heads == 0:
        return None
    kv_width = out.shape[2] - rope_width
    scale_in = out if scale is None else scale
    latent_unit, rope_unit, out_unit = unit_of(latent), unit_of(q_rope), unit_of(out)
    strides = [
        stride // unit
        for x, unit in ((latent, latent_unit), (q_rope, rope_unit), (out, out_unit))
        for stride in x.stride()[:2]
    ]
    numbers = (tokens * heads, *strides, min(cos.shape[0], sin.shape[0]), cos.stride(0), sin.stride(0))
    every = (latent, q_rope, cos, sin, positions, scale_in, out)
    addresses = tuple(tensor.data_ptr() for tensor in every)
    special = launcher.special(max(numbers), addresses, every)
    step, device = tuning.regime(tokens * heads), out.get_device()
    key = (
        name, device, step, q_rope.dtype, cos.dtype, sin.dtype, positions.dtype, out.dtype, heads, kv_width, rope_width,
        latent_unit, rope_unit, out_unit, pairs, special,
    )  # fmt: skip
    launch = launcher.Launch(key, device, numbers)
    if launcher.again(key, device, addresses, numbers):
        return launch
    width = rope_width if rows[0] is None else kv_width
    plan = tuning.launch_query(step, width, scale is not None, launcher.wave(out.device))
    constants = (
        heads, kv_width, rope_width, latent_unit, rope_unit, out_unit, rows[0] is not None, scale is not None,
        LARGEST.get(out.dtype, 0.0), PAIRS.index(pairs), tuning.power_of_two(rope_width // 2), plan.chunk, plan.rows,
    )  # fmt: skip
    launcher.first(query, key, every, numbers, constants, rows=plan.rows, sides=1, warps=plan.warps)
    return None
