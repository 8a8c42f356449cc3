"""A small, plain MLA layer that decodes over a paged cache, from a spec: what the fused ops are held to.

It is the absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): the query is taken into the latent's columns, attends to
the latents in the cache themselves, and what comes out is taken to the values. One token per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from layerfuse.adapters.specs import MLASpec, NormSpec
from layerfuse.fusion import ops
from layerfuse.fusion.ops.cache_layout import entry_width
from layerfuse.fusion.ops.quantisation import LARGEST
from layerfuse.fusion.ops.rope import read_entries

WAYS = ("plain", "ops", "buffer", "absorb")
"""How a layer does what stands between its GEMMs. plain: in plain torch. ops: by `mla_norm_rope_cache` and `mla_query_concat`.
buffer: the absorbing GEMM writes into the query's columns, and `mla_query_rope` does the rest. absorb: by `mla_query_absorb`, the GEMM
in it."""

CACHES = {"plain": None, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}
"""The forms of a cache, and the dtype of each but the first, which has the layer's."""


class MLADecodeLayer(nn.Module):  # type: ignore[misc]  # torch is untyped
    """One MLA layer of a rank, with its cache. Made by `mla_decode_layer`."""

    def __init__(
        self, spec: MLASpec, cache: Tensor, cos_sin: Tensor, way: str, dtype: torch.dtype, query_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec, self.way, self.dtype, self.query_dtype = spec, way, dtype, query_dtype
        heads, latent = spec.num_local_heads, spec.kv_lora_rank
        query = spec.q_lora_rank or heads * spec.qk_head_dim
        self._split = (query, latent, spec.qk_rope_head_dim)
        made = {"dtype": dtype, "device": cache.device}
        self.down = _random(sum(self._split), spec.hidden_size, **made)
        self.q_weight = nn.Parameter(torch.rand(query, **made) + 0.5, requires_grad=False)
        self.kv_weight = nn.Parameter(torch.rand(latent, **made) + 0.5, requires_grad=False)
        self.q_up = None if spec.q_lora_rank is None else _random(heads * spec.qk_head_dim, query, **made)
        self.absorb = _random(heads, latent, spec.qk_nope_head_dim, **made)
        self.expand = _random(heads, spec.v_head_dim, latent, **made)
        self.out = _random(spec.hidden_size, heads * spec.v_head_dim, **made)
        self.register_buffer("cache", cache)
        self.register_buffer("cos_sin", cos_sin)
        self.register_buffer("cache_scale", torch.ones(1, device=cache.device))
        self.register_buffer("query_scale", torch.ones(1, device=cache.device))

    cache: Tensor
    cos_sin: Tensor
    "(positions, rope): cos and then sin, the rope's attention scaling in them."
    cache_scale: Tensor
    query_scale: Tensor
    "What an fp8 query is divided by."

    def load(self, state: Mapping[str, Tensor]) -> MLADecodeLayer:
        """Take published weights (`q_a_proj.weight`, `kv_b_proj.weight`, ...), this rank's, and return itself."""
        spec = self.spec
        first = "q_proj.weight" if spec.q_lora_rank is None else "q_a_proj.weight"
        with torch.no_grad():
            self.down.copy_(torch.cat([state[first], state["kv_a_proj_with_mqa.weight"]]))
            self.kv_weight.copy_(state["kv_a_layernorm.weight"])
            if self.q_up is not None:
                self.q_up.copy_(state["q_b_proj.weight"])
                self.q_weight.copy_(state["q_a_layernorm.weight"])
            both = state["kv_b_proj.weight"].view(spec.num_local_heads, -1, spec.kv_lora_rank)
            keys, values = both.split([spec.qk_nope_head_dim, spec.v_head_dim], 1)
            self.absorb.copy_(keys.transpose(1, 2))
            self.expand.copy_(values)
            self.out.copy_(state["o_proj.weight"])
        return self

    def query(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """All in front of the attention kernel: writes the tokens' entries, and gives (tokens, heads, latent + rope).

        Args:
            hidden: (tokens, hidden_size).
            positions: (tokens,), int64.
            slots: (tokens,), int64: where each token's entry goes. `plain` takes no slots below 0.
        """
        q, kv, k_rope = nn.functional.linear(hidden, self.down).split(self._split, -1)
        cos, sin = self.cos_sin.chunk(2, -1)
        if self.way == "plain":
            return self._plain_query(q, kv, k_rope, positions, slots)
        spec = self.spec
        assert spec.q_norm is not None
        q = ops.mla_norm_rope_cache(
            q, kv, k_rope, self.q_weight, self.kv_weight, spec.q_norm.epsilon, spec.kv_norm.epsilon, cos, sin, positions,
            slots, self.cache, self.cache_scale, spec.q_norm.weight_offset, spec.kv_norm.weight_offset, self._pairs,
        )  # fmt: skip
        nope, rope = self._heads(q)
        if self.way == "absorb":
            given = (nope, rope, self.absorb.transpose(1, 2), cos, sin, positions)
            if self.query_dtype in LARGEST:
                return ops.mla_query_absorb_static_quant(*given, self.query_scale, self._pairs, self.query_dtype, True)
            return ops.mla_query_absorb(*given, self._pairs, True)
        if self.way == "ops" and self.query_dtype in LARGEST:
            return ops.mla_query_concat_static_quant(
                self._absorbed(nope), rope, cos, sin, positions, self.query_scale, self._pairs, self.query_dtype
            )
        if self.way == "ops":
            return ops.mla_query_concat(self._absorbed(nope), rope, cos, sin, positions, self._pairs)
        query = torch.empty((*rope.shape[:2], spec.latent_width), dtype=self.dtype, device=hidden.device)
        torch.bmm(
            nope.transpose(0, 1), self.absorb.transpose(1, 2), out=query[..., : spec.kv_lora_rank].transpose(0, 1)
        )
        ops.mla_query_rope(rope, query, cos, sin, positions, self._pairs)
        return query

    def attended(self, query: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
        """Attention to the cache, in float32: (tokens, heads, latent).

        Args:
            query: (tokens, heads, latent + rope).
            page_table: (tokens, pages), the pages of each token's sequence in order; of a cache without pages its slots.
            lengths: (tokens,), how many tokens each sequence has, this one included.
        """
        spec, size = self.spec, 1 if self.cache.dim() == 2 else self.cache.shape[1]
        place = torch.arange(page_table.shape[1] * size, device=query.device)
        slots = page_table[:, place // size] * size + place % size
        entries = read_entries(
            self.cache, slots, spec.kv_lora_rank, spec.qk_rope_head_dim, self.cache_scale, self.dtype
        )
        query = query.float() * self.query_scale if self.query_dtype in LARGEST else query.float()
        scores = torch.einsum("thd,tnd->thn", query, entries) * spec.softmax_scale
        scores = scores.masked_fill(place >= lengths[:, None, None], float("-inf"))
        # What lies behind a sequence's end may be anything, NaN too.
        entries = entries.masked_fill((place >= lengths[:, None])[..., None], 0.0)
        return torch.einsum("thn,tnd->thd", scores.softmax(-1), entries[..., : spec.kv_lora_rank]).to(self.dtype)

    def projected(self, latent: Tensor) -> Tensor:
        """What comes behind the attention kernel: (tokens, heads, latent) to (tokens, hidden_size)."""
        values = torch.bmm(latent.transpose(0, 1), self.expand.transpose(1, 2)).transpose(0, 1)
        return nn.functional.linear(values.flatten(1), self.out)

    def forward(self, hidden: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
        """One decode step, (tokens, hidden_size) to the same; the arguments are those of `query` and `attended`."""
        return self.projected(self.attended(self.query(hidden, positions, slots), page_table, lengths))

    # ---- in plain torch

    def _plain_query(self, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        spec = self.spec
        if spec.q_norm is not None:
            q = _normed(q, self.q_weight, spec.q_norm)
        kv = _normed(kv, self.kv_weight, spec.kv_norm)
        nope, rope = self._heads(q)
        self._write(kv, self._turned(k_rope, positions), slots)
        query = torch.cat([self._absorbed(nope), self._turned(rope, positions)], -1)
        return _fp8(query, self.query_scale, self.query_dtype) if self.query_dtype in LARGEST else query

    def _heads(self, q: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        if self.q_up is not None:
            q = nn.functional.linear(q, self.q_up)
        nope, rope = q.view(-1, spec.num_local_heads, spec.qk_head_dim).split(
            [spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1
        )
        return nope, rope

    def _absorbed(self, nope: Tensor) -> Tensor:
        return torch.bmm(nope.transpose(0, 1), self.absorb.transpose(1, 2)).transpose(0, 1)

    @property
    def _pairs(self) -> str:
        rope = self.spec.rope
        assert rope is not None
        return "none" if rope.width == 0 else "interleaved" if rope.interleaved else "halves"

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        if self._pairs == "none":
            return x
        cos, sin = self.cos_sin[positions].view(-1, *[1] * (x.dim() - 2), self.cos_sin.shape[1]).chunk(2, -1)
        first, second = (x[..., 0::2], x[..., 1::2]) if self._pairs == "interleaved" else x.chunk(2, -1)
        parts = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(parts, -1).flatten(-2) if self._pairs == "interleaved" else torch.cat(parts, -1)
        return turned.to(x.dtype)

    def _write(self, kv: Tensor, k_rope: Tensor, slots: Tensor) -> None:
        entries = torch.cat([kv, k_rope], -1)
        if self.cache.dtype in LARGEST:
            entries = _fp8(entries, self.cache_scale, self.cache.dtype)
        if self.cache.dim() == 2:
            self.cache[slots] = entries
        else:
            self.cache[slots // self.cache.shape[1], slots % self.cache.shape[1]] = entries


def _normed(x: Tensor, weight: Tensor, norm: NormSpec) -> Tensor:
    wide = x.float()
    factor = weight.float() + norm.weight_offset if norm.weight_offset else weight.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon) * factor).to(x.dtype)


def _fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Weights that keep what they multiply about as large as it was."""
    weight = torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5
    return nn.Parameter(weight, requires_grad=False)


def mla_decode_layer(
    spec: MLASpec,
    *,
    pages: int,
    page_size: int | None = 64,
    cache: str = "plain",
    way: str = "plain",
    query_dtype: torch.dtype | None = None,
) -> MLADecodeLayer:
    """A layer in float32 with random weights, always the same, and an empty cache.

    `cache` is a word of `CACHES`, `way` one of `WAYS`. `pages` counts slots where `page_size` is None. `query_dtype`: of what the attention
    kernel is given, where it is an fp8 one.
    """
    assert spec.rope is not None
    width = entry_width(cache, spec.kv_lora_rank, spec.qk_rope_head_dim)
    shape = (pages, width) if page_size is None else (pages, page_size, width)
    half = torch.arange(0, spec.qk_rope_head_dim, 2).double() / max(spec.qk_rope_head_dim, 1)
    angles = torch.arange(4096).double()[:, None] * 10000.0**-half
    table = torch.cat([angles.cos(), angles.sin()], -1) * spec.rope.attention_scaling
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        held = torch.zeros(shape).to(CACHES[cache] or torch.float32)
        return MLADecodeLayer(spec, held, table.float(), way, torch.float32, query_dtype or torch.float32)
