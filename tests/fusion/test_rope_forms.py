"""Ropes and cache writes as engines write them: each form is known for what it is, and runs as the ops of the decode chain."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import engine_ops
import pytest
import torch
from decode_support import (
    CONCAT,
    HALVES,
    INTERLEAVED,
    PAGE,
    SLOTS,
    WRITE,
    Decoding,
    bytes_of,
    compiled,
    decode_layer,
    decode_spec,
    inputs,
    placed,
)
from torch import Tensor

from layerfuse.testing import MLADecodeLayer

LOOSE = {"rtol": 0.02, "atol": 0.06}


def swapped(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def rows_of(table: Tensor, positions: Tensor, x: Tensor) -> Tensor:
    rows = table[positions]
    return rows.unsqueeze(-2) if x.dim() > 2 else rows


def with_repeated_halves(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = rows_of(layer.cos_sin, positions, x).chunk(2, -1)
    wide = [torch.cat([each, each], -1) for each in (cos, sin)]
    return (x * wide[0] + swapped(x, False) * wide[1]).to(x.dtype)


def with_repeated_columns(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (each.repeat_interleave(2, -1) for each in rows_of(layer.cos_sin, positions, x).chunk(2, -1))
    return (x * cos + swapped(x, True) * sin).to(x.dtype)


def by_two_tables(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (torch.nn.functional.embedding(positions, table) for table in (layer.cos, layer.sin))
    if x.dim() > 2:
        cos, sin = cos[:, None], sin[:, None]
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def in_the_dtype_of_the_rows(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    rows = layer.cos_sin.to(x.dtype).index_select(0, positions.flatten())
    cos, sin = rows.unsqueeze(-2).chunk(2, -1)
    heads = x.view(positions.shape[0], -1, x.shape[-1])
    first, second = heads[..., ::2], heads[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).reshape(x.shape)


def with_heads_first(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    """As transformers holds them, (batch, heads, tokens, width), pairs taken apart first and left so."""
    heads = x.view(1, positions.shape[0], -1, x.shape[-1]).transpose(1, 2)
    apart = heads.view(*heads.shape[:-1], -1, 2).transpose(-1, -2).reshape(heads.shape)
    cos, sin = (torch.cat([each, each], -1)[None, None] for each in layer.cos_sin[positions].chunk(2, -1))
    turned = apart * cos + swapped(apart, False) * sin
    return turned.transpose(1, 2).reshape(x.shape).to(x.dtype)


FORMS: dict[str, tuple[Callable[..., Tensor], bool, str]] = {
    "halves, cos and sin repeated": (with_repeated_halves, False, "halves"),
    "interleaved, cos and sin repeated": (with_repeated_columns, True, "interleaved"),
    "two tables, looked up as embeddings": (by_two_tables, False, "halves"),
    "a table in bfloat16": (in_the_dtype_of_the_rows, True, "interleaved"),
    "pairs taken apart, heads first": (with_heads_first, True, "interleaved_to_halves"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_rope_is_known_however_it_is_written(form: str) -> None:
    function, interleaved, pairs = FORMS[form]

    class Turning(MLADecodeLayer):
        def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
            return function(self, x, positions)

    spec = decode_spec(rope=INTERLEAVED if interleaved else HALVES)
    layer, unfused = decode_layer(spec), decode_layer(spec)
    for each in (layer, unfused):
        each.__class__ = Turning
        each.register_buffer("cos", each.cos_sin[:, :32].clone())
        each.register_buffer("sin", each.cos_sin[:, 32:].clone())
    traced = compiled(Decoding(layer), *inputs(), specs=placed(spec))
    assert not traced.report.missed()
    (text,) = traced.after
    called = [line for line in text.splitlines() if "layerfuse" in line]
    assert [re.split(r"[ =]", line.partition(")")[0])[-1] for line in called] == [pairs, pairs]
    with torch.inference_mode():
        torch.testing.assert_close(traced.output[0], unfused.query(*inputs()), **LOOSE)
    torch.testing.assert_close(layer.cache, unfused.cache, **LOOSE)


# ---- vLLM's own ops --------------------------------------------------------------------------------------------------


class Rotary(MLADecodeLayer):
    """Turned by vLLM's op, both at once and in place, and written by its op for caches."""

    form = "auto"

    def _plain_query(self, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        q, kv = (_normed(self, *each) for each in ((q, self.q_weight), (kv, self.kv_weight)))
        nope, rope = self._heads(q)
        rope, key = rope.contiguous(), k_rope.unsqueeze(1).contiguous()
        halves = not self.spec.rope.interleaved
        torch.ops._C.rotary_embedding(positions, rope, key, 64, self.cos_sin.to(rope.dtype), halves)
        torch.ops._C_cache_ops.concat_and_cache_mla(kv, key.squeeze(1), self.cache, slots, self.form, self.cache_scale)
        return torch.cat([self._absorbed(nope), rope], -1)


def _normed(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.layerfuse.rms_norm(x, weight, layer.spec.kv_norm.epsilon, 0.0)


@pytest.mark.parametrize("v2", [False, True], ids=["vLLM's graphs", "torch's graphs"])
@pytest.mark.parametrize("cache", ["plain", "fp8"])
@pytest.mark.parametrize("rope", [INTERLEAVED, HALVES], ids=["interleaved", "halves"])
def test_vllm_ops_for_rope_and_cache(rope: Any, cache: str, v2: bool) -> None:
    assert engine_ops.rotary_embedding
    spec = decode_spec(rope=rope)
    layer, unfused = decode_layer(spec, cache=cache), decode_layer(spec, cache=cache)
    for each in (layer, unfused):
        each.__class__ = Rotary
        each.form = "auto" if cache == "plain" else "fp8"
    hidden, positions, _ = inputs()
    slots = torch.tensor([SLOTS[0], -1, SLOTS[2]])  # padding is nowhere
    from torch._inductor import config as inductor_config

    with inductor_config.patch(enable_auto_functionalized_v2=v2):
        traced = compiled(Decoding(layer), hidden, positions, slots, specs=placed(spec))
    assert not traced.report.missed()
    assert "rotary_embedding" not in traced.after[0]
    assert "concat_and_cache_mla" not in traced.after[0]
    with torch.inference_mode():
        torch.testing.assert_close(traced.output[0], unfused.query(hidden, positions, slots), **LOOSE)
    step = 0.02 if cache == "plain" else 0.13
    torch.testing.assert_close(layer.cache.float(), unfused.cache.float(), rtol=step, atol=0.06)
    fresh = decode_layer(spec, cache=cache)
    others = [slot for slot in range(layer.cache.shape[0] * PAGE) if slot not in (SLOTS[0], SLOTS[2])]
    kept, before = (bytes_of(each.cache).flatten(0, 1)[others] for each in (layer, fresh))
    assert torch.equal(kept, before)
    assert {WRITE, CONCAT} == {name for _, name in traced.report.last.ran}
