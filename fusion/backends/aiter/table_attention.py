"""What layerfuse calls of AITER's MLA decoding and of the plans that it follows."""

from __future__ import annotations

from .conventions import Binding, Function
from .conventions import Convention as C  # noqa: N817 - it stands in front of every line below

_DECODE_HEAD = "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q"
_DECODE_SCALE = "sm_scale=, logit_cap=, num_kv_splits="
_DECODE_PLAN = (
    "num_kv_splits_indptr=, work_meta_data=, work_indptr=, work_info_set=, reduce_indptr=, reduce_final_map=, "
    "reduce_partial_map=, q_scale=, kv_scale="
)
_DECODE_FULL = f"{_DECODE_SCALE}, {_DECODE_PLAN}, intra_batch_mode=, return_logits=, return_lse="
_PLAN_HEAD = "seqlens_qo_indptr, seqlens_kv_indptr"
_PLAN_HEADS = "num_heads_per_head_k, num_heads_k, is_causal, work_metadata_ptrs"
_PLAN_REDUCE = "reduce_indptr, reduce_final_map, reduce_partial_map"
_PLAN_OPTIONS = "kv_granularity=, max_seqlen_qo=, uni_seqlen_qo=, fast_mode=, topk="
_PLAN_MORE = f"{_PLAN_OPTIONS}, max_split_per_batch="
_SIZES = "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode="
_NO_ORDER = (
    "its declaration and the compiled function behind it disagree about the order of work_indptr and work_info, two "
    "int32 buffers, and neither takes the other's names"
)

ATTENTION_BINDINGS: tuple[Binding, ...] = (
    Binding(
        name="mla_metadata_info",
        calls="mla.metadata_info",
        functions=(
            Function(
                "aiter.ops.attention:get_mla_metadata_info_v1",
                (
                    C("v0.1.6.post2", _SIZES),
                    C("v0.1.7.post5", f"{_SIZES}, num_kv_splits=, intra_batch_mode="),
                    C("v0.1.16", f"{_SIZES}, num_kv_splits=, intra_batch_mode=, max_split_per_batch="),
                ),
            ),
        ),
    ),
    Binding(
        name="mla_metadata",
        calls="mla.metadata",
        functions=(
            Function(
                "aiter.ops.attention:get_mla_metadata_v1",
                (
                    C(
                        "v0.1.6.post2",
                        f"{_PLAN_HEAD}, {_PLAN_HEADS}, work_indptr, work_info, {_PLAN_REDUCE}, {_PLAN_OPTIONS}",
                        refused=_NO_ORDER,
                    ),
                    C(
                        "v0.1.7.post3",
                        f"{_PLAN_HEAD}, {_PLAN_HEADS}, work_indptr, work_info, {_PLAN_REDUCE}, {_PLAN_MORE}, "
                        "dtype_q=, dtype_kv=",
                        refused=_NO_ORDER,
                    ),
                    C(
                        "v0.1.7.post5",
                        f"{_PLAN_HEAD}, {_PLAN_HEADS}, work_indptr, work_info, {_PLAN_REDUCE}, {_PLAN_MORE}, "
                        "intra_batch_mode=, dtype_q=, dtype_kv=",
                        refused=_NO_ORDER,
                    ),
                    C(
                        "v0.1.8",
                        f"{_PLAN_HEAD}, {_PLAN_HEADS}, work_info_set, work_indptr, {_PLAN_REDUCE}, {_PLAN_MORE}, "
                        "intra_batch_mode=, dtype_q=, dtype_kv=",
                    ),
                    C(
                        "v0.1.10.post2",
                        f"{_PLAN_HEAD}, kv_last_page_lens, {_PLAN_HEADS}, work_info_set, work_indptr, {_PLAN_REDUCE}, "
                        f"page_size=, {_PLAN_MORE}, intra_batch_mode=, dtype_q=, dtype_kv=",
                    ),
                    C(
                        "v0.1.17-rc0",
                        f"{_PLAN_HEAD}, kv_last_page_lens, {_PLAN_HEADS}, work_info_set, work_indptr, {_PLAN_REDUCE}, "
                        f"page_size=, {_PLAN_MORE}, intra_batch_mode=, dtype_q=, dtype_kv=, is_cp_round_robin=",
                    ),
                    C(
                        "v0.1.17-longctx",
                        f"{_PLAN_HEAD}, kv_last_page_lens, {_PLAN_HEADS}, work_info_set, work_indptr, {_PLAN_REDUCE}, "
                        f"page_size=, {_PLAN_MORE}, intra_batch_mode=, is_cp_round_robin=, mla_version=, dtype_q_nope=, "
                        "dtype_q_rope=, dtype_kv_nope=, dtype_kv_rope=, dtype_q=, dtype_kv=",
                    ),
                ),
            ),
        ),
    ),
    Binding(
        name="ps_metadata_info",
        calls="mla.ps_metadata_info",
        functions=(
            Function(
                "aiter.ops.attention:get_ps_metadata_info_v1",
                (C("v0.1.10.post1", "batch_size, num_head_k, max_qlen, qlen_granularity="),),
            ),
        ),
    ),
    Binding(
        name="mla_decode",
        calls="mla.decode",
        functions=(
            Function(
                "aiter.mla:mla_decode_fwd",
                (
                    C("v0.1.5", f"{_DECODE_HEAD}, {_DECODE_SCALE}"),
                    C("v0.1.6.post2", f"{_DECODE_HEAD}, {_DECODE_SCALE}, {_DECODE_PLAN}"),
                    C("v0.1.7.post5", f"{_DECODE_HEAD}, {_DECODE_SCALE}, {_DECODE_PLAN}, intra_batch_mode="),
                    C("v0.1.9", f"{_DECODE_HEAD}, {_DECODE_FULL}"),
                    C("v0.1.10.post2", f"{_DECODE_HEAD}, page_size=, nhead_kv=, {_DECODE_FULL}"),
                    C(
                        "v0.1.17-rc0",
                        f"{_DECODE_HEAD}, page_size=, nhead_kv=, {_DECODE_FULL}, g_kv_indptr=, cp_world_size=, cp_rank=",
                    ),
                    C(
                        "v0.1.20",
                        f"{_DECODE_HEAD}, page_size=, nhead_kv=, {_DECODE_FULL}, g_kv_indptr=, cp_world_size=, "
                        "cp_rank=, causal=",
                    ),
                ),
            ),
        ),
    ),
)
