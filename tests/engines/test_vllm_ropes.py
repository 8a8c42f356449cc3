"""vLLM's own rotary embeddings, and its own call for the write to a cache, in front of a plain attention layer: found and fused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from layerfuse import registry
from layerfuse.adapters import MLASpec, RopeSpec
from layerfuse.fusion import FusionConfig, Target
from layerfuse.fusion import compile as fuse
from layerfuse.testing import MLADecodeLayer, mla_decode_layer, small_entry

vllm_host = pytest.importorskip("vllm_host")
from vllm import _custom_ops as vllm_ops  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (  # noqa: E402
    DeepseekScalingRotaryEmbedding,
)

WRITE, CONCAT = "mla_norm_rope_cache", "mla_query_concat"
PAGE = 4


def _concat_and_cache_mla(
    latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor, _form: str, _scale: Tensor, _skip: bool = False
) -> None:
    """vLLM's binary op in plain torch, for a cache in the model's dtype."""
    for entry, slot in zip(torch.cat([latent, rope], -1), slots.tolist(), strict=True):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = entry


@pytest.fixture(scope="module", autouse=True)
def around() -> Iterator[None]:
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    name = "_C_cache_ops::concat_and_cache_mla"
    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        library.define(
            "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
            "Tensor scale, bool skip_scale=False) -> ()"
        )
        library.impl("concat_and_cache_mla", _concat_and_cache_mla, "CPU")
        torch.library.register_fake(name, lambda *_: None, lib=library)
    config = vllm_host.vllm_config("deepseek-v3", tp=1, rank=0, overrides={})
    with set_current_vllm_config(config):
        yield


def rotary(kind: str, halves: bool) -> Any:
    if kind == "yarn":
        return DeepseekScalingRotaryEmbedding(64, 64, 32, 10000.0, halves, 4.0, torch.bfloat16)
    return RotaryEmbedding(64, 64, 128, 10000.0, halves, torch.bfloat16)


class Layer(MLADecodeLayer):
    """Turned by vLLM, query and key at once; written by vLLM or by indexing."""

    rotary: Any
    by_op: bool

    def _plain_query(self, q: Tensor, kv: Tensor, k_rope: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        q, kv = (
            nn.functional.rms_norm(x, x.shape[-1:], weight, self.spec.kv_norm.epsilon)
            for x, weight in ((q, self.q_weight), (kv, self.kv_weight))
        )
        nope, rope = self._heads(q)
        turned, key = self.rotary.forward_native(positions, rope, k_rope.unsqueeze(1))
        if self.by_op:
            vllm_ops.concat_and_cache_mla(kv, key.squeeze(1).to(kv.dtype), self.cache, slots, "auto", self.cache_scale)
        else:
            self._write(kv, key.squeeze(1).to(kv.dtype), slots)
        return torch.cat([self._absorbed(nope), turned.to(q.dtype)], -1)


class Decoding(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention = layer

    def forward(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return self.attention.query(hidden, positions, slots)


def layer_of(spec: MLASpec, kind: str, halves: bool, by_op: bool) -> Any:
    layer = mla_decode_layer(spec, pages=6, page_size=PAGE)
    layer.__class__ = Layer
    layer.rotary, layer.by_op = rotary(kind, halves), by_op
    return layer


@pytest.mark.parametrize("by_op", [False, True], ids=["index_put", "concat_and_cache_mla"])
@pytest.mark.parametrize("halves", [False, True], ids=["interleaved", "halves"])
@pytest.mark.parametrize("kind", ["yarn", "plain"])
def test_vllm_ropes_and_writes_become_the_decode_chain(kind: str, halves: bool, by_op: bool) -> None:
    torch._dynamo.reset()
    entry = small_entry(registry.model("deepseek-v3"), layers=1)
    spec = next(spec for _, spec in entry.specs() if isinstance(spec, MLASpec))
    spec = attrs.evolve(spec, rope=RopeSpec(width=64, interleaved=not halves, attention_scaling=1.0))
    layer, unfused = (layer_of(spec, kind, halves, by_op) for _ in range(2))
    config = FusionConfig(switches={WRITE: True, CONCAT: True})
    fast = fuse(
        Decoding(layer), specs=[("attention", spec)], target=Target.named("sm90"), config=config, strict=True,
    )  # fmt: skip
    hidden = torch.randn(3, spec.hidden_size, dtype=torch.bfloat16)
    args = hidden, torch.tensor([3, 17, 5]), torch.tensor([9, 2, 22])
    with torch.inference_mode():
        got, wanted = fast(*args), unfused.query(*args)
        audit = fast.audit(*args)
    assert audit.ok, audit
    assert {name: each.profiled for name, each in audit.fusions.items()} == {WRITE: 1, CONCAT: 1}
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.06)
    torch.testing.assert_close(layer.cache, unfused.cache, rtol=0.02, atol=0.06)
