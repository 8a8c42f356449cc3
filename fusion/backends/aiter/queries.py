"""The query of an MLA layer beside its turned rope columns, by AITER's Triton functions, which take a key and give one too.

For the key they get the query's first head, so that one head in so many is done twice. What they return for it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import AiterCallError
from .resolved import Resolved

REACH = 2**31
"""Elements that the kernels can count: they compute addresses in int32."""

Concat = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str], Tensor]
_Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From the latent and the rope columns, (tokens, heads, width), and positions."""


def turned(found: Resolved) -> Concat:
    """`mla_query_concat(q_latent, q_rope, cos, sin, positions, pairs)`.

    The kernel looks at no position. So they are brought into the tables before it, and a query of one outside is made NaN behind
    it: three small launches more.

    Raises:
        AiterCallError: tables without a row.
    """
    name, function = found.name, found.function

    def call(q_latent: Tensor, q_rope: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str) -> Tensor:
        last = min(cos.shape[0], sin.shape[0]) - 1
        if last < 0:
            raise AiterCallError(name, "cos and sin have no rows: there is no position")
        if cos.stride() != sin.stride():  # sin is read by the strides of cos
            cos, sin = cos.contiguous(), sin.contiguous()
        is_neox = pairs == "halves"

        def kernel(latent: Tensor, rope: Tensor, at: Tensor) -> Tensor:
            inside = at.clamp(0, last)
            query: Tensor = function(
                q_nope=latent,
                q_pe=rope,
                k_nope=latent[:, :1],
                k_pe=rope[:, :1],
                pos=inside,
                cos=cos,
                sin=sin,
                is_neox=is_neox,
            )[0]
            query[..., latent.shape[2] :].masked_fill_((inside != at)[:, None, None], float("nan"))
            return query

        return _by_tokens(kernel, q_latent, q_rope, positions)

    return call


def unturned(found: Resolved) -> Concat:
    """The same where nothing is turned: one launch, and no table is read."""
    function = found.function

    def kernel(latent: Tensor, rope: Tensor, _at: Tensor) -> Tensor:
        query: Tensor = function(q1=latent, q2=rope, k1=latent[:, :1], k2=rope[:, :1])[0]
        return query

    def call(q_latent: Tensor, q_rope: Tensor, _cos: Tensor, _sin: Tensor, positions: Tensor, _pairs: str) -> Tensor:
        return _by_tokens(kernel, q_latent, q_rope, positions)

    return call


def _by_tokens(kernel: _Kernel, q_latent: Tensor, q_rope: Tensor, positions: Tensor) -> Tensor:
    """One launch, or several over fewer tokens where one would count too far."""
    latent, rope = (x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:]) for x in (q_latent, q_rope))
    tokens, heads, columns = latent.shape
    width = columns + rope.shape[2]
    shape = (*q_latent.shape[:-1], width)
    if max(tokens * heads * width, _extent(latent), _extent(rope)) <= REACH:
        return kernel(latent, rope, positions).view(shape)
    step = max(1, REACH // (heads * width))
    parts = zip(*(x.split(step) for x in (latent, rope, positions)), strict=True)
    return torch.cat([kernel(x.contiguous(), y.contiguous(), at) for x, y, at in parts]).view(shape)


def _extent(x: Tensor) -> int:
    """Elements from the first of a tensor to its last."""
    reach: int = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return reach
