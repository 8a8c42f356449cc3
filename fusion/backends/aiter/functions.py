"""AITER's functions that layerfuse calls, each with its parameters. Several bindings call some of them.

Read off the sources of the supported releases. `=` marks what may be left out, `?=` what only some of the releases have.
"""

from __future__ import annotations

from .matching import Function

# ---- HIP and CK: outputs are handed in

_ADD = "out, input, residual_in, residual_out"
_QK = "q_out_unquantized=, k_out=, q_res_out=, k=, k_weight=, k_epsilon=, q_residual="
_NORMS = "aiter.ops.rmsnorm"
_QK_QUANT = "aiter.ops.fused_qk_rmsnorm_group_quant"
_ATTENTION = "aiter.ops.attention"
_AR = "aiter.dist.device_communicators.custom_all_reduce:CustomAllreduce"
_TRITON = "aiter.ops.triton"

ADD_NORM = Function(
    f"{_NORMS}:rmsnorm2d_fwd_with_add", f"{_ADD}, weight, epsilon, gemma_norm?=, use_model_sensitive_rmsnorm="
)
NORM_QUANT = Function(
    f"{_NORMS}:rmsnorm_quant", "out, input, scale, weight, epsilon, group_size=, shuffle_scale=, gemma_norm?="
)
ADD_NORM_QUANT = Function(
    f"{_NORMS}:add_rmsnorm_quant", f"{_ADD}, scale, weight, epsilon, group_size=, shuffle_scale=, gemma_norm?="
)
LATENT_NORMS = Function(
    "aiter.ops.fused_qk_norm_rope_cache_quant:_fused_qk_rmsnorm",
    "q_out, q, q_weight, q_eps, k_out, k, k_weight, k_eps",
)
LATENT_TOKEN_QUANT = Function(
    f"{_QK_QUANT}:fused_qk_rmsnorm_per_token_quant",
    f"q_out_quantized, q_out_scale, q, q_weight, q_epsilon, {_QK}, gemma_norm=",
)
LATENT_GROUP_QUANT = Function(
    f"{_QK_QUANT}:fused_qk_rmsnorm_group_quant",
    f"q_out_quantized=, q_out_scale=, q=, q_weight=, q_epsilon=, {_QK}, group_size=, transpose_scale=, gemma_norm=",
)
GATED_GROUP_QUANT = Function(
    "aiter.ops.gated_rmsnorm_fp8_group_quant:gated_rmsnorm_fp8_group_quant",
    "out, scale, x, z, weight, epsilon, group_size, transpose_scale=",
)
GATED_TOKEN_QUANT = Function(
    "aiter.ops.gated_rmsnorm_fp8_per_token_quant:gated_rmsnorm_fp8_per_token_quant",
    "out, scale, x, z, weight, epsilon",
    "v0.1.17-longctx",
)
SILU_QUANT = Function(
    "aiter.ops.activation:silu_and_mul_quant", "out, input, scale, group_size, limit=, shuffle_scale="
)

# ---- MLA decoding, and the plans that it follows

METADATA_INFO = Function(
    f"{_ATTENTION}:get_mla_metadata_info_v1",
    "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=, num_kv_splits=, intra_batch_mode=, "
    "max_split_per_batch=",
)
METADATA = Function(
    f"{_ATTENTION}:get_mla_metadata_v1",
    "seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, is_causal, "
    "work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map, page_size=, "
    "kv_granularity=, max_seqlen_qo=, uni_seqlen_qo=, fast_mode=, topk=, max_split_per_batch=, intra_batch_mode=, "
    "is_cp_round_robin?=, mla_version?=, dtype_q_nope?=, dtype_q_rope?=, dtype_kv_nope?=, dtype_kv_rope?=, dtype_q=, dtype_kv=",
)
DECODE = Function(
    "aiter.mla:mla_decode_fwd",
    "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size=, nhead_kv=, sm_scale=, "
    "logit_cap=, num_kv_splits=, num_kv_splits_indptr=, work_meta_data=, work_indptr=, work_info_set=, reduce_indptr=, "
    "reduce_final_map=, reduce_partial_map=, q_scale=, kv_scale=, intra_batch_mode=, return_logits=, return_lse=, "
    "g_kv_indptr?=, cp_world_size?=, cp_rank?=, causal?=",
)

# ---- all-reduces: methods of AITER's communicator

FUSED_AR = Function(
    f"{_AR}.fused_ar_rms",
    "inp, res_inp, *, res_out=, out=, scale_out=, w, eps, registered=, use_1stage=, post_per_token_quant=, "
    "out_hidden_dim=, gemma_norm?=, emit_bf16?=",
)
FUSED_AR_GROUP = Function(
    f"{_AR}.fused_ar_rms_per_group_quant",
    "inp, res_inp, *, w, eps, group_size=, registered=, use_1stage=, emit_bf16=, transpose_scale?=",
)

# ---- Triton: they allocate what they return

_SECOND = "inp2=, inp2_weight=, inp2_epsilon="

TRITON_ADD_PAD = Function(
    f"{_TRITON}.normalization.fused_add_rmsnorm_pad:fused_add_rmsnorm_pad",
    "x, weight, epsilon, res=, x_pad_to_multiple=",
)
TRITON_GROUP_QUANT = Function(
    f"{_TRITON}.quant.fused_fp8_quant:fused_rms_fp8_group_quant",
    f"inp1, inp1_weight, inp1_epsilon, {_SECOND}, group_size=, dtype_quant=, res1=, output_unquantized_inp1=, "
    "transpose_scale=, is_x_scale_strided?=",
)
TRITON_STATIC_QUANT = Function(
    f"{_TRITON}.quant.fused_fp8_quant:fused_rms_fp8_per_tensor_static_quant",
    f"inp1, inp1_weight, inp1_epsilon, inp1_scale, {_SECOND}, dtype_quant=, res1=, output_unquantized_inp1=, "
    "rmsnorm_convert_to_inp1_type=",
)
TRITON_GATED_QUANT = Function(
    f"{_TRITON}.quant.fused_fp8_quant:fused_rms_gated_fp8_group_quant",
    "x, weight, bias, z, eps, *, norm_before_gate=, use_ue8m0=, activation=, out_dtype=, fp8_min=, fp8_max=, "
    "fp8_min_scaling_factor=, group_size=",
)
TRITON_MXFP8_QUANT = Function(f"{_TRITON}.quant.fused_mxfp8_quant:fused_rms_mxfp8_quant", "x, weight, eps, y=, scale=")
TRITON_MXFP4_QUANT = Function(
    f"{_TRITON}.quant.fused_mxfp4_quant:fused_rms_mxfp4_quant",
    "x1, x1_weight, x1_epsilon, x2=, x2_weight=, x2_epsilon=, res1=, shuffle=, scale_shuffle_padding=, "
    "output_unquantized_inp1=, inargs?=",
)
TRITON_SILU_STATIC_QUANT = Function(
    f"{_TRITON}.quant.fused_fp8_quant:fused_silu_mul_fp8_per_tensor_static_quant",
    "inp, inp_scale, dtype_quant=, silu_convert_to_inp_type=",
)
TRITON_CLAMP_QUANT = Function(
    f"{_TRITON}.fusions.fused_clamp_act_mul:fused_clamp_act_mul",
    "inp, out=, scale=, swiglu_limit=, activation=, weights=, dtype_quant=, transpose_scale=, quant_block_size=, "
    "scale_dtype_fmt=, shuffle_scale=",
)
TRITON_ACT_QUANT = Function(
    f"{_TRITON}.activation:act_mul_and_fp8_group_quant", "x, activation, group_size, dtype_quant="
)
