"""The two ops that stand in an MLA layer of vLLM's instead of its norms, ropes, cache write and attention, split as vLLM's own are.

Where all tokens of a step are decoded, `mla_latents` is one launch (both norms, the rope of the key, the cache write), and
`mla_attend` absorbs and ropes the query in one launch (two for more than 64 tokens). In any other step the first gives vLLM's cache write and
its prefill what they take, and the second ropes the query in place.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention as vllm_mla

from ...adapters.errors import LayerfuseError
from ...fusion.backends import steps
from ...fusion.ops import FUNCTIONS
from ...fusion.ops.library import case_maker, declared
from .process import once

REFUSALS = (LayerfuseError, TypeError, ValueError)
"""What an op raises for arguments that it does not take."""

WRITE = "mla_norm_rope_cache_into"
NAMES = ("layerfuse_vllm::mla_latents", "layerfuse_vllm::mla_attend")
"""What vLLM splits its graphs at."""

BLOCKS = (1, 17, 33, 65)
"""Tokens that `mla_query_absorb` is launched for in different ways."""

_write, _rope, _absorb, _absorb_quant = (
    FUNCTIONS[name] for name in (WRITE, "mla_query_rope", "mla_query_absorb", "mla_query_absorb_static_quant")
)


@define(kw_only=True, eq=False)
class Layer:
    """One layer of vLLM's with all that the ops need beside a step's tensors."""

    name: str
    "Of its attention, in vLLM's forward context."
    wrapper: Any = field(repr=False)
    attention: Any = field(repr=False)
    epsilons: tuple[float, float]
    "Of the query's norm and the key/value's."
    offsets: tuple[float, float]
    "Added to their weights."
    pairs: str
    "As `fusion.ops.rope.PAIRS`."
    cache_dtype: torch.dtype | None
    "What a cache that vLLM keeps as bytes is looked at as; None: as it is."
    query_dtype: torch.dtype | None
    "The fp8 dtype that the attention kernel takes its query in; None: that of the layer."
    refused: str | None = None
    "Why an op did not take a step's tensors: from then on vLLM's own way is gone."

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cos and sin: (positions, half the rope's width) each."""
        table: Tensor = self.wrapper.rotary_emb.cos_sin_cache
        half = table.shape[-1] // 2
        return table[:, :half], table[:, half:]

    def decodes(self, metadata: Any, cache: Tensor, slots: Tensor | None, tokens: int) -> bool:
        """Whether every token of a step is decoded, so that nothing but the cache needs its latents."""
        return (
            self.refused is None
            and metadata is not None
            and slots is not None
            and slots.shape[0] == tokens
            and cache.numel() > 0
            and 0 < metadata.num_actual_tokens == metadata.num_decode_tokens
        )

    def seen(self, cache: Tensor) -> Tensor:
        """The cache by the dtype of its values."""
        return cache if self.cache_dtype is None else cache.view(self.cache_dtype)

    def write(
        self, rows: tuple[Tensor, Tensor, Tensor], positions: Tensor, slots: Tensor, cache: Tensor, q_out: Tensor
    ) -> None:
        """Both norms, the rope of the key, and the entries to their slots."""
        wrapper = self.wrapper
        weights = wrapper.q_a_layernorm.weight, wrapper.kv_a_layernorm.weight
        scale = self.attention._k_scale
        _write(
            *rows,
            *weights,
            *self.epsilons,
            *self.tables,
            positions,
            slots,
            cache,
            scale,
            *self.offsets,
            self.pairs,
            q_out,
        )

    def query(self, q: Tensor, positions: Tensor) -> Tensor:
        """The absorbed query beside its roped columns: (tokens, heads, latent + rope).

        Args:
            q: (tokens, heads, nope + rope), not roped.
            positions: (tokens,).
        """
        attention = self.attention
        nope = attention.qk_nope_head_dim
        given = (q[..., :nope], q[..., nope:], attention.W_UK_T, *self.tables, positions)
        if self.query_dtype is not None:
            return _absorb_quant(*given, attention._q_scale, self.pairs, self.query_dtype, steady=True)
        return _absorb(*given, self.pairs, steady=True)

    def rope_in_place(self, q: Tensor, positions: Tensor) -> None:
        """The same rope where nothing is absorbed. q: (tokens, heads, nope + rope)."""
        # The op reads and writes other memory: every pair is read by one program and written by it, but that is no promise.
        _rope(q[..., self.attention.qk_nope_head_dim :].clone(), q, *self.tables, positions, self.pairs)


layers: dict[str, Layer] = {}
"""By name, of this process."""

_numbers: dict[torch.device, Tensor] = {}


def numbers(count: int, device: torch.device) -> Tensor:
    """0, 1, ... as slots of a buffer. Made beforehand for the most tokens: what a CUDA graph allocates is not kept."""
    found = _numbers.get(device)
    if found is None or found.shape[0] < count:
        found = _numbers[device] = torch.arange(count, dtype=torch.int64, device=device)
    return found[:count]


def _latents(q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, q_out: Tensor, layer_name: str) -> Tensor:
    layer = layers[layer_name]
    metadata, attention, cache, slots = vllm_mla.get_attention_context(layer_name)
    tokens = kv.shape[0]
    rows = (q, kv, k_rope)
    entries = kv.new_empty(tokens, kv.shape[-1] + k_rope.shape[-1])
    if layer.decodes(metadata, cache, slots, tokens):
        try:
            layer.write(rows, positions, slots, layer.seen(cache), q_out)
        except REFUSALS as error:
            layer.refused = str(error)
            once(logging.WARNING, "layerfuse: mla_decode: %s: %s", layer_name, error)
        else:
            return entries
    layer.write(rows, positions, numbers(tokens, kv.device), entries, q_out)
    if slots is not None:
        latent, rope = entries.split([kv.shape[-1], k_rope.shape[-1]], -1)
        vllm_mla.unified_mla_kv_cache_update(
            latent, rope.unsqueeze(1), layer_name, attention.kv_cache_dtype, attention._k_scale
        )
    return entries


def _attend(q: Tensor, entries: Tensor, positions: Tensor, output: Tensor, layer_name: str) -> None:
    layer = layers[layer_name]
    metadata, attention, cache, slots = vllm_mla.get_attention_context(layer_name)
    heads = q.view(-1, attention.num_heads, attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    if layer.decodes(metadata, cache, slots, entries.shape[0]):
        count = metadata.num_actual_tokens
        query = layer.query(heads[:count], positions[:count])
        attended, _ = attention.impl.forward_mqa(query, layer.seen(cache), metadata, attention)
        attention._v_up_proj(attended, out=output[:count])
        return
    if metadata is not None:
        layer.rope_in_place(heads, positions)
    latent, rope = entries.split([attention.kv_lora_rank, attention.qk_rope_head_dim], -1)
    # Quantising projections want rows without gaps.
    attention.forward_impl(heads, latent.contiguous(), rope.unsqueeze(1), cache, metadata, output=output)


_LIBRARY = torch.library.Library("layerfuse_vllm", "FRAGMENT")
_LIBRARY.define(
    "mla_latents(Tensor q, Tensor kv, Tensor k_rope, Tensor positions, Tensor(a!) q_out, str layer_name) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.define(
    "mla_attend(Tensor(a!) q, Tensor entries, Tensor positions, Tensor(b!) output, str layer_name) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("mla_latents", _latents, "CompositeExplicitAutograd")
# Where a cache comes from elsewhere, vLLM waits for it and sends it on around its attention.
_LIBRARY.impl("mla_attend", vllm_mla.maybe_transfer_kv_layer(_attend), "CompositeExplicitAutograd")
torch.library.register_fake(
    NAMES[0],
    lambda q, kv, k_rope, positions, q_out, layer_name: kv.new_empty(kv.shape[0], kv.shape[-1] + k_rope.shape[-1]),  # noqa: ARG005
    lib=_LIBRARY,
)
torch.library.register_fake(NAMES[1], lambda *_: None, lib=_LIBRARY)
latents = torch.ops.layerfuse_vllm.mla_latents.default
attend = torch.ops.layerfuse_vllm.mla_attend.default


def try_out(layer: Layer, most: int) -> int:
    """Call each op with what a layer has: what refuses or does not compile says so before anything stands.

    Once for each way to launch it, so that no kernel is compiled later but the cache write of a decode step, which waits for a cache.

    Args:
        layer: any of a model's.
        most: tokens of a step.

    Returns:
        How many numbers of tokens that was.

    Raises:
        Exception: whatever is wrong.
    """
    attention, weight = layer.attention, layer.wrapper.q_a_layernorm.weight
    widths = (weight.shape[0], attention.kv_lora_rank, attention.qk_rope_head_dim)
    heads, width = attention.num_heads, attention.qk_nope_head_dim + attention.qk_rope_head_dim
    with torch.inference_mode():
        every = numbers(most, weight.device)
        few = weight.new_zeros(1, heads, widths[2], dtype=attention.W_UK_T.dtype)
        case = case_maker(declared("mla_query_rope"))(few, few, *layer.tables, every[:1], layer.pairs)
        blocks = [n for n in BLOCKS if n <= most]
        counts = [n for n in (2, *(step + 1 for step in steps("mla_query_rope", few.device.type, case))) if n <= most]
        for count in counts:
            positions = torch.zeros_like(every[:count])
            q, kv, rope = few.new_zeros(count, sum(widths)).split(widths, -1)
            entries = few.new_empty(count, sum(widths[1:]))
            layer.write((q, kv, rope), positions, every[:count], entries, few.new_empty(q.shape))
            query = few.new_zeros(-(-count // heads), heads, width)
            layer.query(query, positions[: len(query)])
            layer.rope_in_place(query, positions[: len(query)])
        for count in blocks:
            layer.query(few.new_zeros(count, heads, width), torch.zeros_like(every[:count]))
    return len(counts) + len(blocks)
