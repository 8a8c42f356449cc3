"""Whether a layer's own norms, ropes, cache write and attention compute what `mla_decode` does: tried out as it is loaded.

VLLM's own forwards are run for a few tokens, on numbers and a cache that are made for it. Projections and the
attention kernel are replaced by fixed results: a kernel would need a step's metadata.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..trial import ROWS, raised, random, why_apart
from .decode_ops import Layer


class With:
    """An object as it is, but for some of what it has."""

    def __init__(self, held: Any, **instead: Any) -> None:
        self.__dict__.update(instead, _held=held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)


def difference(made: Iterable[Layer], vllm_config: Any) -> str | None:
    """How what runs in some layer differs from our ops, as a sentence, or None where it does nowhere.

    Layers in which the same code runs with the same settings are tried once.
    """
    kinds = {(layer.kind(), code_of(layer)): layer for layer in made}
    for layer in kinds.values():
        try:
            with torch.inference_mode():
                problem = why_apart(_results(layer, vllm_config))
        except Exception as error:  # of anybody's
            problem = raised(error)
        if problem is not None:
            return f"{layer.name}: {problem}"
    return None


def code_of(layer: Layer) -> frozenset[Hashable]:
    """What layers share in which the same code runs with the same settings."""
    names = {(f"layer_name of this {type(layer.attention).__qualname__}", layer.name)}
    return layer.around.alike.union(layer.stood.alike).difference(names)


def _results(layer: Layer, vllm_config: Any) -> Iterator[tuple[Any, Tensor]]:
    """Pairs of what vLLM's own way gives and what ours does: latents, query, cache, absorbed query, output."""
    wrapper, attention = layer.wrapper, layer.attention
    weight, table = attention.W_UK_T, layer.tables[0]
    heads, nope, rope, latent = (
        attention.num_heads,
        attention.qk_nope_head_dim,
        attention.qk_rope_head_dim,
        attention.kv_lora_rank,
    )
    rows = random(weight.new_empty(ROWS, sum(layer.widths)))
    query = random(weight.new_empty(ROWS, heads * (nope + rope)))
    attended = random(weight.new_empty(ROWS, heads, latent))
    positions = torch.linspace(0, table.shape[0] - 1, ROWS, device=rows.device).long()
    form = attention.get_kv_cache_spec(vllm_config)
    caches = weight.new_zeros(2, ROWS, form.block_size or 1, attention.head_size, dtype=form.dtype)
    slots = torch.arange(ROWS, device=rows.device) * caches.shape[2]
    output = weight.new_zeros(2, ROWS, heads * attention.v_head_dim)
    seen: dict[str, Any] = {}

    def project(normed: Tensor) -> tuple[Tensor]:
        seen["normed"] = normed
        return (query.clone(),)

    def kernel(absorbed: Any, *_: Any) -> tuple[Tensor, None]:
        seen["absorbed"] = torch.cat(absorbed, -1) if isinstance(absorbed, tuple) else absorbed
        return attended, None

    step = SimpleNamespace(
        num_actual_tokens=ROWS, num_decodes=ROWS, num_decode_tokens=ROWS, num_prefills=0, decode=True, prefill=None
    )

    def attend(q: Tensor, normed: Tensor, k_rope: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.update(q=q, entries=torch.cat([normed, k_rope.view(ROWS, rope)], -1))
        scale = attention._k_scale
        attention.impl.do_kv_cache_update(normed, k_rope, caches[0], slots, attention.kv_cache_dtype, scale)
        inside = With(attention, impl=With(attention.impl, forward_mqa=kernel, dcp_world_size=1))
        type(attention).forward_impl(inside, q, normed, k_rope, caches[0], step, output=output[0])
        return output[0]

    standing = With(wrapper, fused_qkv_a_proj=lambda x: (x,), q_b_proj=project, mla_attn=attend, o_proj=lambda x: (x,))
    type(wrapper).forward(standing, positions, rows.clone())

    split = rows.split(layer.widths, -1)
    normed, entries = split[0].new_empty(split[0].shape), rows.new_empty(ROWS, latent + rope)
    layer.write(split, positions, layer.buffer_slots(ROWS), entries, normed)
    yield seen["normed"], normed
    yield seen["entries"], entries
    layer.write(split, positions, slots, layer.seen(caches[1]), normed)
    yield tuple(map(layer.seen, caches))
    turned = layer.heads(query.clone())
    layer.rope_in_place(turned, positions)
    yield seen["q"], turned
    yield seen["absorbed"], layer.query(layer.heads(query), positions)
    attention._v_up_proj(attended, out=output[1])
    yield tuple(output)
