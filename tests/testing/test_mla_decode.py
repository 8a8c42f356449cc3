"""The plain MLA decode layer against transformers' own attention, and the fused ops inside it against itself."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from mla_decode_layer import mla_decode_layer

from layerfuse import registry
from layerfuse.adapters import NO_ROPE, MLASpec, RopeSpec
from layerfuse.testing import config_of, small_entry

PAGE = 4


def small_spec(**changes: Any) -> MLASpec:
    entry = small_entry(registry.model("deepseek-v3"), layers=1)
    spec = next(spec for _, spec in entry.specs() if isinstance(spec, MLASpec))
    return attrs.evolve(spec, **changes)


def decoded(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Sequences token by token, (batch, tokens, hidden) to the same; their pages lie mixed up in the cache."""
    batch, length, _ = hidden.shape
    pages = -(-length // PAGE)
    table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(3)).view(batch, pages)
    steps = []
    for place in range(length):
        slots = table[:, place // PAGE] * PAGE + place % PAGE
        positions = torch.full((batch,), place)
        steps.append(layer(hidden[:, place], positions, slots, table, positions + 1))
    return torch.stack(steps, 1)


@pytest.mark.parametrize("way", ["plain", "ops", "buffer"])
def test_decoding_gives_what_transformers_attention_gives_at_once(way: str) -> None:
    source = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    torch.manual_seed(0)
    config = config_of(small_entry(registry.model("deepseek-v3"), layers=1))
    attention = source.DeepseekV3Attention(config, layer_idx=0).eval()
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    spec = registry.spec_for(attention)
    layer = mla_decode_layer(spec, pages=8, page_size=PAGE, way=way).load(attention.state_dict())
    hidden = torch.randn(2, 10, config.hidden_size)
    rotary = source.DeepseekV3RotaryEmbedding(config)
    with torch.no_grad():
        cos, sin = rotary(hidden, torch.arange(10)[None])
        half = spec.qk_rope_head_dim // 2
        layer.cos_sin = torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)
        mask = torch.full((10, 10), float("-inf")).triu(1)[None, None]
        wanted = attention(hidden, (cos.expand(2, -1, -1), sin.expand(2, -1, -1)), mask)[0]
        torch.testing.assert_close(decoded(layer, hidden), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rope", [RopeSpec(width=64, interleaved=False, attention_scaling=1.0), NO_ROPE], ids=["halves", "none"]
)
@pytest.mark.parametrize("way", ["ops", "buffer"])
def test_the_ways_agree(way: str, rope: RopeSpec) -> None:
    spec, hidden = small_spec(rope=rope), torch.randn(2, 6, 128)
    outputs = []
    for one in ("plain", way):
        layer = mla_decode_layer(spec, pages=4, page_size=PAGE, way=one)
        with torch.no_grad():
            outputs.append((decoded(layer, hidden), layer.cache))
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["plain", "ops"])
def test_an_fp8_query_is_attended_with_by_its_scale(way: str) -> None:
    spec, hidden = small_spec(), torch.randn(2, 6, 128)
    exact = mla_decode_layer(spec, pages=4, page_size=PAGE)
    fp8 = {"query_dtype": torch.float8_e4m3fn, "way": way}
    rounded = mla_decode_layer(spec, pages=4, page_size=PAGE, **fp8)
    rounded.query_scale.fill_(0.02)
    with torch.no_grad():
        wanted, got = decoded(exact, hidden), decoded(rounded, hidden)
        assert rounded.query(hidden[:, 0], torch.zeros(2).long(), torch.arange(2)).dtype == torch.float8_e4m3fn
    assert 1e-5 < (got - wanted).norm() / wanted.norm() < 0.06


@pytest.mark.parametrize(("cache", "step"), [("fp8", 0.06), ("fp8_ds_mla", 0.06)])
def test_an_fp8_cache_is_attended_to_with_its_scales(cache: str, step: float) -> None:
    spec, hidden = small_spec(), torch.randn(2, 6, 128)
    exact = mla_decode_layer(spec, pages=4, page_size=PAGE)
    rounded = mla_decode_layer(spec, pages=4, page_size=PAGE, cache=cache, way="ops")
    rounded.cache_scale.fill_(0.02)
    with torch.no_grad():
        wanted, got = decoded(exact, hidden), decoded(rounded, hidden)
    assert 1e-4 < (got - wanted).norm() / wanted.norm() < step


def test_a_cache_without_pages_and_a_query_without_a_latent() -> None:
    spec, hidden = small_spec(q_lora_rank=None, q_norm=None), torch.randn(3, 128)
    layer = mla_decode_layer(spec, pages=8, page_size=None)
    slots = torch.tensor([5, 0, 2])
    with torch.no_grad():
        out = layer(hidden, torch.zeros(3, dtype=torch.int64), slots, slots[:, None], torch.ones(3, dtype=torch.int64))
    # Alone in its sequence, a token attends to its own latent.
    latent = layer.cache[slots, : spec.kv_lora_rank][:, None].expand(-1, spec.num_local_heads, -1)
    torch.testing.assert_close(out, layer.projected(latent), rtol=1e-5, atol=1e-6)
