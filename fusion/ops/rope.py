"""The rope, of heads and of the columns of a latent, and the write to a cache of latents in plain torch: what every backend does, rules for broken input included.

- A token whose slot is below 0 is padding: nothing of it is written, and its query is given all the same. So is one whose
  slot lies behind the end of the cache.
- Of tokens with the same slot each column of the entry is that of one of them.
- A position outside the tables of cos and sin is an error here. Kernels, which cannot raise one, take cos and sin for NaN:
  they read nothing outside the tables and write nothing but the token's own entry and query.
- cos and sin hold the rope's attention scaling already. Everything is computed in float32 and rounded once, when it is
  stored; an fp8 entry is quantised from what a cache that is not quantised holds, as `quantisation` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache_layout import DS_GROUP, layout_of
from .norm import accumulator
from .quantisation import quantise, quantise_static


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str, used: Tensor | None = None) -> Tensor:
    """The rope of x, in the accumulator dtype.

    Args:
        x: (tokens, width) or (tokens, heads, width).
        cos: (positions, width / 2).
        sin: of the same shape.
        positions: (tokens,).
        pairs: a word of `PAIRS`.
        used: (tokens,), False for tokens whose position is not looked at; None: all are.

    Raises:
        ValueError: a position outside the tables, on the CPU; on other devices an assertion fails there.
    """
    wide = x.to(accumulator(x.dtype))
    if pairs == "none":
        return wide
    rows = min(cos.shape[0], sin.shape[0])
    outside = (positions < 0) | (positions >= rows)
    if used is not None:
        outside = outside & used
        positions = positions.where(used, 0)
    _refuse(outside, positions, rows)
    if rows == 0:
        return wide  # of no tokens, or of none that is used
    c, s = (table[positions].to(wide.dtype) for table in (cos, sin))
    if x.dim() == 3:
        c, s = c.unsqueeze(1), s.unsqueeze(1)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if pairs != "halves" else wide.chunk(2, -1)
    turned = first * c - second * s, second * c + first * s
    return torch.stack(turned, -1).flatten(-2) if pairs == "interleaved" else torch.cat(turned, -1)


def turn_heads(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, pairs: str) -> Tensor:
    """The rope of the first columns of heads, in the accumulator dtype; the others are as they were.

    Args:
        x: (..., heads, width).
        cos: (positions, half of the columns that are turned).
        sin: of the same shape.
        positions: one for each token; None: token t takes row t, counted anew behind the last row.
        pairs: a word of `PAIRS`.
    """
    heads, width = x.reshape(-1, *x.shape[-2:]), 2 * cos.shape[1]
    if positions is None:
        rows = max(1, min(cos.shape[0], sin.shape[0]))
        positions = torch.arange(heads.shape[0], device=x.device) % rows
    turned = turn(heads[..., :width], cos, sin, positions, pairs)
    return torch.cat([turned, heads[..., width:].to(turned.dtype)], -1).view(x.shape)


def _refuse(outside: Tensor, positions: Tensor, rows: int) -> None:
    if outside.device.type != "cpu":
        torch._assert_async(~outside.any(), f"a position lies outside the {rows} rows of the tables of cos and sin")
    elif bool(outside.any()):
        wrong = int(positions[outside][0])
        raise ValueError(f"position {wrong} lies outside the {rows} rows of the tables of cos and sin")


def slots_used(slots: Tensor, count: int) -> Tensor:
    """Which tokens have an entry: (tokens,), bool."""
    return (slots >= 0) & (slots < count)


def write_entries(
    cache: Tensor, latent: Tensor, rope: Tensor, slots: Tensor, scale: Tensor, dtype: torch.dtype
) -> None:
    """Write the entries of tokens.

    Args:
        cache: see `cache_layout`.
        latent: (tokens, width), normed.
        rope: (tokens, width), turned.
        slots: (tokens,).
        scale: one float32 element: what an fp8 cache's values are divided by.
        dtype: of the latent.
    """
    layout = layout_of(cache, latent.shape[-1], rope.shape[-1], dtype)
    used = slots_used(slots, layout.slots)
    where, latent, rope = slots[used].long(), latent[used], rope[used]
    if layout.form == "fp8_ds_mla":
        values, scales = quantise(latent, torch.float8_e4m3fn, DS_GROUP, False, False)
        # Of no token they have strides that torch 2.11 does not view as bytes.
        scales = scales.clone(memory_format=torch.contiguous_format)
        parts = (values, scales, rope.to(torch.bfloat16).contiguous())
        entries = torch.cat([part.view(torch.uint8) for part in parts], -1)
    else:
        entries = torch.cat([latent, rope], -1)
        entries = quantise_static(entries, scale, cache.dtype) if layout.form == "fp8" else entries.to(cache.dtype)
    if cache.dim() == 2:
        _bytes(cache)[where] = _bytes(entries)
    else:
        _bytes(cache)[where // layout.page_size, where % layout.page_size] = _bytes(entries)


def _bytes(x: Tensor) -> Tensor:
    """fp8 as bytes: torch cannot index all fp8 dtypes on all devices."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
