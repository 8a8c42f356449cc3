"""SGLang's fa3 backend for MLA without a GPU: its own methods and cache, with plain torch in the place of the kernels of attention, cache write and page table."""

from __future__ import annotations

import os
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

ASKED = "LAYERFUSE_TEST_FA3_ON_CPU"
"""Set where every process of an engine is to have it."""


def attended(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, qv: Tensor, page_table: Tensor, cache_seqlens: Tensor, cu_seqlens_q: Tensor,
    softmax_scale: float, **_: Any,
) -> Tensor:  # fmt: skip
    """What fa3's kernel computes where a page is one slot: each sequence's last tokens attend to it up to themselves."""
    found = torch.empty(qv.shape, dtype=qv.dtype)
    starts = cu_seqlens_q.tolist()
    for slots, length, start, end in zip(page_table, cache_seqlens.tolist(), starts, starts[1:], strict=False):
        keys, values = (each[slots[:length].long()].reshape(length, -1).float() for each in (k_cache, v_cache))
        for row in range(start, end):
            seen = length - (end - row) + 1
            scores = (q[row].float() @ keys[:seen].t() + qv[row].float() @ values[:seen].t()) * softmax_scale
            found[row] = (scores.softmax(-1) @ values[:seen]).to(qv.dtype)
    return found


def written(buffer: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    """What SGLang's Triton kernels do."""
    buffer[slots] = torch.cat([latent, rope], -1).view(len(slots), *buffer.shape[1:])


WRITES = ("set_mla_kv_buffer_triton", "set_mla_kv_buffer_dcp_sharded_triton")
"""Their names in `sglang.srt.mem_cache.memory_pool`."""


def backend_of(pool: Any, **more: Any) -> Any:
    """A `FlashAttentionBackend` with what its methods ask for."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    made = FlashAttentionBackend.__new__(FlashAttentionBackend)
    vars(made).update(
        fa_impl_ver=3, use_mla=True, token_to_kv_pool=pool, local_attn_builder=None, topk=0, kv_cache_is_mxfp8=False, kv_cache_dtype_str="auto",
        kv_cache_dtype=pool.dtype, page_size=1, num_splits=0, decode_attention_backend_str="fa3", prefill_attention_backend_str="fa3",
        fa_skip_kv_cache=False, attn_cp_size=1, full_cg_prefill_metadata=None, use_sliding_window_kv_pool=False, needs_cpu_seq_lens=False, **more,
    )  # fmt: skip
    return made


def _metadata(self: Any, batch: Any) -> None:
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionMetadata

    lengths = batch.extend_seq_lens if batch.forward_mode.is_extend() else torch.ones_like(batch.seq_lens)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    self.forward_metadata = FlashAttentionMetadata(
        cache_seqlens_int32=batch.seq_lens.int(), max_seq_len_q=int(lengths.max()), cu_seqlens_q=starts,
        page_table=self.req_to_token_pool.req_to_token[batch.req_pool_indices],
    )  # fmt: skip


def _register(registry: ModuleType) -> None:
    from sglang.srt.layers.attention import flashattention_backend

    def create(runner: Any) -> Any:
        made = backend_of(runner.token_to_kv_pool, req_to_token_pool=runner.req_to_token_pool)
        made.init_forward_metadata = MethodType(_metadata, made)
        return made

    vars(flashattention_backend)["flash_attn_with_kvcache"] = attended
    registry.ATTENTION_BACKENDS["fa3"] = create


def _absorbed(handler: ModuleType) -> None:
    """Prompts too, as with deterministic inference: the kernels of the other ways are fa3's as well."""
    handler.AttentionBackendRegistry.register("fa3", lambda *_: handler.AttnForwardMethod.MLA)


def _roped(factory: ModuleType) -> None:
    """Ropes as on a GPU: SGLang's factory for CPUs wants one that is scaled."""
    factory.get_rope_cpu = lambda *given: factory.get_rope(*given[:-1])


def stand_in() -> None:
    """In a process of an engine, before it imports SGLang."""
    if not os.environ.get(ASKED):
        return
    from layerfuse.engines.imports import when_imported

    when_imported("sglang.srt.layers.attention.attention_registry", _register)
    when_imported("sglang.srt.layers.rotary_embedding.factory", _roped)
    when_imported("sglang.srt.models.deepseek_common.attention_backend_handler", _absorbed)
    when_imported("sglang.srt.mem_cache.memory_pool", lambda pool: vars(pool).update(dict.fromkeys(WRITES, written)))
