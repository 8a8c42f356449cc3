"""vLLM's own MLA layers on the CPU with their forward and a paged cache: only the kernels, which need a device, are plain torch here.

`Paged` runs steps as vLLM's scheduler makes them: tokens that are decoded first, then prompts, whole, in chunks or behind a cached
prefix, padded as for a CUDA graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from attrs import define, field
from torch import Tensor

from vllm_started import Started, engine_config, in_engine, load  # isort: skip  (before vllm)
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from layerfuse.engines.vllm import decode_ops

OWN = MLAAttention.forward
"""vLLM's own, before a test puts something in its place."""

SPLIT = ["vllm::unified_mla_attention_with_output", "vllm::unified_mla_kv_cache_update"]
BLOCK = 4
GUARD = 0xA5


written: list[int] = []
"""Tokens of every call of vLLM's cache write."""


def _write(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
    *_: bool,
    **__: bool,
) -> None:
    """In the place of vLLM's CUDA op: slots below 0 are left out."""
    written.append(len(slot_mapping))
    entries = torch.cat([kv_c, k_pe], -1)[: slot_mapping.shape[0]]
    used = slot_mapping >= 0
    where, entries = slot_mapping[used], entries[used]
    if kv_cache_dtype.startswith("fp8"):
        entries = (entries.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    kv_cache.view(-1, kv_cache.shape[-1])[where] = entries.to(kv_cache.dtype)


# vLLM's function calls it as ever: in the place of the function itself nothing of ours would stand.
_CACHE_OPS = torch.library.Library("_C_cache_ops", "FRAGMENT")
_CACHE_OPS.define(
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor scale, "
    "bool skip_scale=False) -> ()"
)
_CACHE_OPS.impl("concat_and_cache_mla", _write, "CompositeExplicitAutograd")


def _read(layer: Any, cache: Tensor, slots: Tensor) -> Tensor:
    held = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    entries = held.view(-1, held.shape[-1])[slots]
    return entries.view(torch.float8_e4m3fn).float() * layer._k_scale if cache.element_size() == 1 else entries.float()


def _decode(impl: Any, q: Any, cache: Tensor, metadata: Any, layer: Any) -> tuple[Tensor, None]:
    query = torch.cat(q, -1) if isinstance(q, tuple) else q
    query = query.float() * layer._q_scale if query.element_size() == 1 else query.float()
    results = []
    for row, slots in zip(query, metadata.decode.slots, strict=True):
        entries = _read(layer, cache, slots)
        weights = (row @ entries.T * impl.scale).softmax(-1)
        results.append(weights @ entries[:, : impl.kv_lora_rank])
    return torch.stack(results).to(torch.float32 if layer.W_UV.dtype == torch.float32 else layer.W_UV.dtype), None


def _prefill(
    impl: Any,
    q: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    cache: Tensor,
    metadata: Any,
    k_scale: Tensor,
    output: Tensor,
    **_: Any,
) -> None:
    """Each prompt by itself: what it has in the cache, then its new tokens, of which the cache is not asked."""
    layer, start = SimpleNamespace(_k_scale=k_scale), 0
    for slots, new in metadata.prefill.requests:
        part = slice(start, start + new)
        start += new
        before = _read(layer, cache, slots)
        own = torch.cat([latent[part], k_pe[part, 0]], -1).float()
        entries = torch.cat([before, own]).to(q.dtype)
        up = impl.kv_b_proj(entries[:, : impl.kv_lora_rank].contiguous())[0]
        up = up.view(-1, impl.num_heads, impl.qk_nope_head_dim + impl.v_head_dim)
        k, v = up.split([impl.qk_nope_head_dim, impl.v_head_dim], -1)
        k = torch.cat([k, entries[:, None, impl.kv_lora_rank :].expand(-1, impl.num_heads, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q[part].float(), k.float()) * impl.scale
        seen = torch.ones(new, len(entries), dtype=torch.bool).tril(len(before))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        output[part] = torch.einsum("hqk,khd->qhd", weights, v.float()).flatten(1).to(output.dtype)


@define
class Paged:
    """A started model with a cache in blocks, one for each layer."""

    engine: Started
    layers: dict[str, Any]
    blocks: int = 24
    drafted: int = 0
    "The most tokens of a sequence that are decoded together beside the first."
    lengths: dict[int, int] = field(factory=dict)
    "Sequence -> tokens of it in the cache. Sequence s has the blocks s, s + 4, s + 8, ..."

    def allocate(self) -> None:
        """The caches, every byte of them a guard."""
        for layer in self.layers.values():
            fp8 = layer.kv_cache_dtype.startswith("fp8")
            item, kind = (1, torch.uint8) if fp8 else (layer.W_UV.element_size(), layer.W_UV.dtype)
            held = torch.full((self.blocks * BLOCK, layer.head_size * item), GUARD, dtype=torch.uint8)
            layer.kv_cache = held.view(kind).view(self.blocks, BLOCK, layer.head_size)
            if fp8:
                layer._k_scale.fill_(0.25)
                layer._q_scale.fill_(0.5)
                layer._k_scale_float = 0.25

    def slots(self, sequence: int, start: int, end: int) -> Tensor:
        """Where the tokens of a sequence are."""
        at = torch.arange(start, end)
        return (at // BLOCK * 4 + sequence) * BLOCK + at % BLOCK

    def step(
        self, requests: Sequence[tuple[int, int]], padded: int = 0, slots_too: bool = True, pieces: bool = False
    ) -> Tensor:
        """The hidden states of a step's tokens.

        Args:
            requests: (sequence, new tokens); those that decode one token come first.
            padded: rows behind the tokens, with slots of -1.
            slots_too: whether those rows have slots: in graphs that are captured in pieces they have none.
            pieces: whether the step is said to be one of such graphs.
        """
        ids, positions, slots, decodes, prefills = [], [], [], [], []
        starts, lengths = [0], []
        for sequence, new in requests:
            before = self.lengths.get(sequence, 0)
            self.lengths[sequence] = before + new
            ids += [(7 * sequence + 3 * i) % 64 for i in range(before, before + new)]
            positions += range(before, before + new)
            slots.append(self.slots(sequence, before, before + new))
            if new <= 1 + self.drafted and before and not prefills:
                decodes += [self.slots(sequence, 0, before + each + 1) for each in range(new)]
                starts.append(len(decodes))
                lengths.append(before + new)
            else:
                prefills.append((self.slots(sequence, 0, before), new))
        count = len(ids)
        metadata = SimpleNamespace(
            num_actual_tokens=count,
            num_decodes=len(lengths),
            num_decode_tokens=len(decodes),
            num_prefills=len(prefills),
            decode=SimpleNamespace(slots=decodes, seq_lens=torch.tensor(lengths)),
            query_start_loc=torch.tensor(starts),
            prefill=SimpleNamespace(requests=prefills, chunked_context=None) if prefills else None,
        )
        mapping = torch.cat([*slots, torch.full((padded if slots_too else 0,), -1)])
        given = torch.tensor(ids + [0] * padded), torch.tensor(list(positions) + [0] * padded)
        with set_forward_context(
            dict.fromkeys(self.layers, metadata),
            self.engine.config,
            num_tokens=count + padded,
            slot_mapping=dict.fromkeys(self.layers, mapping),
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE if pieces else CUDAGraphMode.NONE,
        ):
            return self.engine.model(*given)[:count]

    def layer(self, name: str) -> Any:
        """What of layerfuse's stands in a layer, by the name of its attention."""
        return decode_ops.layer_of(self.layers[name])

    def bytes(self) -> dict[str, Tensor]:
        """All of every cache."""
        return {name: layer.kv_cache.view(torch.uint8).clone() for name, layer in self.layers.items()}


@contextlib.contextmanager
def paged(
    name: str,
    cache: Path,
    *,
    cache_dtype: str = "auto",
    profile: bool = True,
    groups: Any = None,
    drafted: int = 0,
    **config: Any,
) -> Iterator[Paged]:
    """A model that has made its profiling run, with its caches. `groups`: as for `in_engine`; `config`: as for `engine_config`."""
    made = engine_config(name, **config)
    made.cache_config.cache_dtype = cache_dtype
    made.compilation_config.splitting_ops = list(SPLIT)
    with (
        in_engine(made, cache, groups),
        mock.patch.object(MLAAttention, "forward", OWN),
        mock.patch.object(TritonMLAImpl, "forward_mqa", _decode),
        mock.patch.object(TritonMLAImpl, "forward_mha", _prefill),
        mock.patch.object(TritonMLAImpl, "reserve_workspace", return_value=None, create=True),  # 0.33 only
    ):
        engine = load(made)
        layers = {
            n: m for n, m in made.compilation_config.static_forward_context.items() if isinstance(m, MLAAttention)
        }
        for layer in layers.values():
            layer.process_weights_after_loading(
                torch.get_default_dtype() if config.get("dtype") is None else getattr(torch, config["dtype"])
            )
        started = Paged(engine, layers, drafted=drafted)
        if profile:
            engine()
            started.allocate()
        yield started
