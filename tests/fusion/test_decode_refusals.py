"""Decode layers that the ops of the decode chain cannot take: each says why, keeps its numbers, and takes the dual norm where it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine_ops
import pytest
import torch
from decode_support import (
    CONCAT,
    DUAL,
    HALVES,
    INTERLEAVED,
    PAGE,
    PAGES,
    WRITE,
    Decoding,
    compiled,
    decode_layer,
    decode_spec,
    inputs,
    placed,
)
from torch import Tensor

from layerfuse.adapters import NO_ROPE
from layerfuse.testing import MLADecodeLayer


class Odd(MLADecodeLayer):
    """A layer of which a test writes one part in another way."""

    change: Callable[..., Any]

    def _plain_query(self, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor) -> Any:
        return self.change(q, kv, k_rope, positions, slots)


def parts(layer: Any, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The absorbed query, its rope columns, and the normed latent."""
    normed = [
        torch.nn.functional.rms_norm(x, x.shape[-1:], weight, layer.spec.kv_norm.epsilon)
        for x, weight in ((q, layer.q_weight), (kv, layer.kv_weight))
    ]
    nope, rope = layer._heads(normed[0])
    return layer._absorbed(nope), rope, normed[1]


def decoded(layer: Any, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor, write: Any) -> Tensor:
    absorbed, rope, latent = parts(layer, q, kv)
    write(layer, latent, layer._turned(k_rope, positions), slots)
    return torch.cat([absorbed, layer._turned(rope, positions)], -1)


def writing(write: Callable[..., Any]) -> Callable[..., Any]:
    return lambda layer, *given: decoded(layer, *given, write)


def page_and_row(slots: Tensor) -> tuple[Tensor, Tensor]:
    return slots // PAGE, slots % PAGE


def adding(layer: Any, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    layer.cache.index_put_(page_and_row(slots), torch.cat([latent, rope], -1), accumulate=True)


def by_a_mask(layer: Any, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    mask = torch.zeros(PAGES * PAGE, dtype=torch.bool)
    mask[:3] = True
    flat = layer.cache.view(-1, 576)
    flat[mask] = torch.cat([latent, rope], -1)


def to_other_rows(layer: Any, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    layer.cache[slots // 8, slots % 8 // 2] = torch.cat([latent, rope], -1)


def to_a_part(layer: Any, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    layer.cache[1:][page_and_row(slots % 8)] = torch.cat([latent, rope], -1)


def in_two_steps(layer: Any, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    page, row = page_and_row(slots)
    layer.cache[page, row, :512] = latent
    layer.cache[page, row, 512:] = rope


def rope_first(layer: Any, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    layer.cache[page_and_row(slots)] = torch.cat([rope, latent], -1)


def with_a_second_reader(layer: Any, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor) -> Any:
    absorbed, rope, latent = parts(layer, q, kv)
    layer._write(latent, layer._turned(k_rope, positions), slots)
    return torch.cat([absorbed, layer._turned(rope, positions)], -1), latent * 2


def reading_before(layer: Any, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor) -> Any:
    absorbed, rope, latent = parts(layer, q, kv)
    held = layer.cache.float().sum() + absorbed.float().sum()
    layer._write(latent, layer._turned(k_rope, positions), slots)
    return torch.cat([absorbed, layer._turned(rope, positions)], -1), held


def in_another_graph(layer: Any, *given: Tensor) -> Any:
    absorbed, _, latent = parts(layer, *given[:2])
    return absorbed, latent


def by_the_layers_name(layer: Any, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor) -> Any:
    absorbed, rope, latent = parts(layer, q, kv)
    key = layer._turned(k_rope, positions)
    token = torch.ops.vllm.unified_mla_kv_cache_update(latent, key, "layers.0", "auto", layer.cache_scale)
    return absorbed, layer._turned(rope, positions), token


WRITES = {
    "adds to the cache": (writing(adding), "adds to what is in the cache"),
    "by a mask": (writing(by_a_mask), "int32 or int64"),
    "other pages": (writing(to_other_rows), "are not the page of a slot and its row there"),
    "a part of the cache": (writing(to_a_part), "is a part or another form of"),
    "in two steps": (writing(in_two_steps), "neither joined with rope columns behind it nor a write to a cache"),
    "rope first": (writing(rope_first), "neither joined with rope columns behind it nor a write to a cache"),
    "a second reader": (with_a_second_reader, "which the fused op gives to the cache only"),
    "the cache is read before": (reading_before, "as it was before the write, which the fused op does earlier"),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes_that_are_not_taken(case: str) -> None:
    change, reason = WRITES[case]
    spec = decode_spec()
    layer, unfused = decode_layer(spec), decode_layer(spec)
    for each in (layer, unfused):
        each.__class__ = type("Other", (Odd,), {"change": change})
    traced = compiled(Decoding(layer), *inputs(), specs=placed(spec))
    assert reason in traced.report.of(WRITE).missed["layers.0:latents"]
    assert f"; {DUAL} was fused there instead" in traced.report.of(WRITE).missed["layers.0:latents"]
    assert (traced.report.of(DUAL).last_call, traced.report.of(CONCAT).last_call) == (1, 1)
    with torch.inference_mode():
        wanted = unfused.query(*inputs())
    torch.testing.assert_close(traced.output[0], wanted, rtol=0.02, atol=0.06)
    torch.testing.assert_close(layer.cache, unfused.cache, rtol=0.02, atol=0.06)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (in_another_graph, "is a result of the graph: the cache is written in another one"),
        (
            by_the_layers_name,
            "vllm::unified_mla_kv_cache_update writes the latent to the cache that it finds by the layer's",
        ),
    ],
    ids=["another graph", "an op that finds it by name"],
)
def test_what_an_engine_splits_off_is_a_reason(change: Any, reason: str) -> None:
    assert engine_ops.unified_mla_kv_cache_update
    spec = decode_spec()
    layer = decode_layer(spec)
    layer.__class__ = type("Other", (Odd,), {"change": change})
    traced = compiled(Decoding(layer), *inputs(), specs=placed(spec))
    assert reason in traced.report.of(WRITE).missed["layers.0:latents"]
    assert traced.report.of(DUAL).last_call == 1
    (missed,) = traced.report.of(CONCAT).missed.values()
    assert missed == (
        "no graph joins the layer's absorbed latent with its rope columns: an attention kernel's own op does that, or it stands "
        "outside of the compiled graphs"
    )


# ---- ropes -----------------------------------------------------------------------------------------------------------


def by_values(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    """cos and sin were looked up outside."""
    cos, sin = layer.rows.view(-1, *[1] * (x.dim() - 2), 64).chunk(2, -1)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


def by_whole_tables(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (table[positions].view(-1, *[1] * (x.dim() - 2), 64) for table in (layer.cos, layer.sin))
    return (x * cos + torch.cat([-x[..., 32:], x[..., :32]], -1) * sin).to(x.dtype)


def turned_back(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = layer.cos_sin[positions].view(-1, *[1] * (x.dim() - 2), 64).chunk(2, -1)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos + second * sin, second * cos - first * sin], -1).flatten(-2).to(x.dtype)


def of_other_tokens(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Heads are turned by positions, as many as there are tokens."""
    cos, sin = layer.cos_sin[positions].chunk(2, -1)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


ROPES = {
    "by values": (by_values, INTERLEAVED, "its cos and sin come as values that were looked up before"),
    "by whole tables": (by_whole_tables, HALVES, "that each holds its half twice is not in the graph"),
    "turned back": (turned_back, INTERLEAVED, "is no rope of a known form"),
    "other pairs than the spec's": (MLADecodeLayer._turned, HALVES, "are interleaved; the spec says in halves"),
    "a rope where the spec has none": (MLADecodeLayer._turned, NO_ROPE, "the spec says that the layer has no rope"),
    "no rope where the spec has one": (
        lambda _layer, x, _positions: x,
        INTERLEAVED,
        "the rope stands in another graph",
    ),
}


@pytest.mark.parametrize("case", ROPES)
def test_ropes_that_are_not_taken(case: str) -> None:
    function, rope, reason = ROPES[case]
    layer, unfused = decode_layer(decode_spec()), decode_layer(decode_spec())
    for each in (layer, unfused):
        each.__class__ = type("Other", (MLADecodeLayer,), {"_turned": function})
        cos, sin = (torch.cat([half, half], -1) for half in each.cos_sin.chunk(2, -1))
        for name, table in (("rows", each.cos_sin[inputs()[1]]), ("cos", cos), ("sin", sin)):
            each.register_buffer(name, table.clone())
    traced = compiled(Decoding(layer), *inputs(), specs=placed(decode_spec(rope=rope)))
    assert reason in traced.report.of(WRITE).missed["layers.0:latents"]
    assert reason in traced.report.of(CONCAT).missed["layers.0:query"]
    assert (traced.report.of(DUAL).last_call, traced.report.of(CONCAT).last_call) == (1, 0)
    with torch.inference_mode():
        torch.testing.assert_close(traced.output[0], unfused.query(*inputs()), rtol=0.02, atol=0.06)
    torch.testing.assert_close(layer.cache, unfused.cache, rtol=0.02, atol=0.06)


def test_heads_that_are_turned_by_the_positions_of_tokens() -> None:
    """As many heads as tokens: shapes do not tell them apart."""

    class Wrong(MLADecodeLayer):
        def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
            return of_other_tokens(self, x, positions) if x.dim() > 2 else super()._turned(x, positions)

    spec = decode_spec(num_heads=3, num_local_heads=3)
    layer = decode_layer(spec)
    layer.__class__ = Wrong
    traced = compiled(Decoding(layer), *inputs(), specs=placed(spec), dynamic=False)
    assert traced.report.of(WRITE).last_call == 1
    assert "has its tokens elsewhere than" in traced.report.of(CONCAT).missed["layers.0:query"]
