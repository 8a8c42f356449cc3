"""MLA decoding and the plans it follows: sizes, buffers and the decode itself.

Sizes differ from release to release and with every argument, so they are always asked for, never computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import AiterCallError
from .table import Resolved

PLAN = ("work_metadata_ptrs", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
"""The buffers of a plan, in the order in which AITER's sizes come. Its planner takes another order."""

Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def metadata_info(found: Resolved) -> Callable[..., Sizes]:
    """`mla_metadata_info(batch, max_seqlen_qo, num_heads, q_dtype, kv_dtype, is_sparse, ...)`; the options are AITER's own.

    Returns buffer name -> (shape, dtype), for the names of `PLAN`.
    """
    function = found.function

    def call(
        batch: int,
        max_seqlen_qo: int,
        num_heads: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        is_sparse: bool,
        **options: Any,
    ) -> Sizes:
        sizes = function(
            batch_size=batch,
            max_seqlen_qo=max_seqlen_qo,
            num_head_qo=num_heads,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            is_sparse=is_sparse,
            **options,
        )
        return {
            name: ((shape,) if isinstance(shape, int) else tuple(shape), dtype)
            for name, (shape, dtype) in zip(PLAN, sizes, strict=True)
        }

    return call


def metadata(found: Resolved) -> Callable[..., None]:
    """`mla_metadata(qo_indptr, kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, is_causal, buffers)`.

    Fills the buffers, a mapping with the names of `PLAN`, allocated as `metadata_info` said for the same options.
    qo_indptr and kv_indptr: (batch + 1,) int32; kv_last_page_lens: (batch,) int32. Options are AITER's own.

    Raises:
        AiterCallError: an index tensor that it would misread, or a size that is no power of two.
    """
    name, function = found.name, found.function

    def call(
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_last_page_lens: Tensor,
        num_heads_per_head_k: int,
        num_heads_k: int,
        is_causal: bool,
        buffers: Mapping[str, Tensor],
        *,
        page_size: int = 1,
        kv_granularity: int = 16,
        **options: Any,
    ) -> None:
        _check_indices(name, qo_indptr, kv_indptr, kv_last_page_lens)
        if kv_granularity & (kv_granularity - 1) or page_size & (page_size - 1):
            raise AiterCallError(name, f"kv_granularity {kv_granularity} and page_size {page_size}: powers of two only")
        function(
            seqlens_qo_indptr=qo_indptr,
            seqlens_kv_indptr=kv_indptr,
            kv_last_page_lens=kv_last_page_lens,
            num_heads_per_head_k=num_heads_per_head_k,
            num_heads_k=num_heads_k,
            is_causal=is_causal,
            page_size=page_size,
            kv_granularity=kv_granularity,
            **{buffer: buffers[buffer] for buffer in PLAN},
            **options,
        )

    return call


def decode(found: Resolved) -> Callable[..., Tensor]:
    """`mla_decode(q, kv_buffer, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, v_head_dim, ...)`.

    q: (tokens, heads, qk width), bfloat16 or fp8; kv_buffer: (pages, page size, 1, qk width). `softmax_scale` has no
    default; `buffers` is a filled plan, or None. Returns (tokens, heads, v_head_dim) in bfloat16. The output is ours
    to allocate, because some releases point the tensor they are given at other storage.

    Raises:
        AiterCallError: another dtype, no scale where one is needed, or tensors that it would misread.
    """
    name, function = found.name, found.function

    def call(
        q: Tensor,
        kv_buffer: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_lens: Tensor,
        max_seqlen_q: int,
        v_head_dim: int,
        *,
        softmax_scale: float,
        page_size: int = 1,
        buffers: Mapping[str, Tensor] | None = None,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        _check_indices(name, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
        if q.dtype == torch.float16 or (q.element_size() == 1 and (q_scale is None or kv_scale is None)):
            raise AiterCallError(name, f"q is {q.dtype}: bfloat16, or fp8 with q_scale and kv_scale")
        if not kv_buffer.is_contiguous() or kv_buffer.dim() != 4 or kv_buffer.shape[1:3] != (page_size, 1):
            raise AiterCallError(
                name, f"kv_buffer must be (pages, {page_size}, 1, width) without gaps, got {tuple(kv_buffer.shape)}"
            )
        plan = {} if buffers is None else {each: buffers[each] for each in PLAN[1:]}
        if buffers is not None:
            plan["work_meta_data"] = buffers["work_metadata_ptrs"]
        out = torch.empty((q.shape[0], q.shape[1], v_head_dim), dtype=torch.bfloat16, device=q.device)
        if not q.shape[0]:
            return out
        function(
            q=q.contiguous(),
            kv_buffer=kv_buffer,
            o=out,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_lens=kv_last_page_lens,
            max_seqlen_q=max_seqlen_q,
            sm_scale=softmax_scale,
            page_size=page_size,
            q_scale=q_scale,
            kv_scale=kv_scale,
            **plan,
            **options,
        )
        return out

    return call


def _check_indices(binding: str, *indices: Tensor) -> None:
    for index in indices:
        if index.dtype != torch.int32 or (index.numel() > 1 and index.stride(-1) != 1):
            raise AiterCallError(binding, f"index tensors are int32 without gaps, got {index.dtype} {index.stride()}")
