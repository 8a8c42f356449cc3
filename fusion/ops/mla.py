"""The references of the ops of an MLA decode layer: what `rope` and `cache_layout` say, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats import Format
from .cache_layout import layout_of
from .norm import normalise
from .quantisation import quantise_static
from .rope import slots_used, turn, write_entries


def norm_rope_cache(form: Format | None, *args: Any) -> Any:
    """`mla_norm_rope_cache`, all arguments by position, with the query latent quantised by further options or not."""
    q, kv, k_rope, q_weight, kv_weight, q_epsilon, kv_epsilon, cos, sin, positions, slots, cache, scale = args[:13]
    q_offset, kv_offset, pairs, *options = args[13:]
    normed = normalise(q, q_weight, q_epsilon, q_offset)
    latent = normalise(kv, kv_weight, kv_epsilon, kv_offset).reshape(-1, kv.shape[-1])
    layout = layout_of(cache, kv.shape[-1], k_rope.shape[-1], kv.dtype)
    used = slots_used(slots, layout.slots)
    rope = turn(k_rope.reshape(-1, k_rope.shape[-1]), cos, sin, positions, pairs, used).to(k_rope.dtype)
    write_entries(cache, latent, rope, slots, scale, kv.dtype)
    return normed if form is None else form.function(normed, *options)


def norm_rope_cache_into(*args: Any) -> None:
    """`mla_norm_rope_cache_into`."""
    *given, q_out = args
    q_out.copy_(norm_rope_cache(None, *given))


def query_concat(q_latent: Tensor, q_rope: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str) -> Tensor:
    """`mla_query_concat`."""
    turned = turn(q_rope.reshape(-1, *q_rope.shape[-2:]), cos, sin, positions, pairs).view(q_rope.shape)
    return torch.cat([q_latent, turned.to(q_latent.dtype)], -1)


def query_concat_static(
    q_latent: Tensor, q_rope: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, scale: Tensor, pairs: str, dtype: Any
) -> Tensor:
    """`mla_query_concat_static_quant`."""
    return quantise_static(query_concat(q_latent, q_rope, cos, sin, positions, pairs), scale, dtype)


def absorbed(q_nope: Tensor, weight: Tensor) -> Tensor:
    """Each head's GEMM, in the dtype of the query: (tokens, heads, latent), in any order in memory."""
    heads = q_nope.reshape(-1, *q_nope.shape[-2:]).transpose(0, 1)
    return torch.bmm(heads, weight).transpose(0, 1).view(*q_nope.shape[:-1], weight.shape[-1])


def query_absorb(q_nope: Tensor, q_rope: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """`mla_query_absorb`."""
    return query_concat(absorbed(q_nope, weight), q_rope, *rest[:-1])


def query_absorb_static(q_nope: Tensor, q_rope: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """`mla_query_absorb_static_quant`."""
    return query_concat_static(absorbed(q_nope, weight), q_rope, *rest[:-1])


def query_rope(q_rope: Tensor, query: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: str) -> None:
    """`mla_query_rope`."""
    turned = turn(q_rope.reshape(-1, *q_rope.shape[-2:]), cos, sin, positions, pairs).view(q_rope.shape)
    query[..., query.shape[-1] - q_rope.shape[-1] :] = turned.to(query.dtype)
