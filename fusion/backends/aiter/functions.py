"""AITER's functions around norms, where each is, and every parameter list it has had. Several bindings call each of them."""

from __future__ import annotations

from .conventions import Convention as C  # noqa: N817 - it stands in front of every line below
from .conventions import Function

_ADD = "out, input, residual_in, residual_out"
_QK = "q_out_unquantized=, k_out=, q_res_out=, k=, k_weight=, k_epsilon=, q_residual="
_QK_QUANT = f"q_out_quantized, q_out_scale, q, q_weight, q_epsilon, {_QK}"
_NORMS = "aiter.ops.rmsnorm"
_TRITON = "aiter.ops.triton"

# ---- HIP and CK: outputs are handed in

ADD_NORM = Function(
    f"{_NORMS}:rmsnorm2d_fwd_with_add",
    (
        C("v0.1.5", f"{_ADD}, weight, epsilon, use_model_sensitive_rmsnorm="),
        C("v0.1.17-rc0", f"{_ADD}, weight, epsilon, gemma_norm=, use_model_sensitive_rmsnorm="),
    ),
)
NORM_QUANT = Function(
    f"{_NORMS}:rmsnorm_quant",
    (
        C("v0.1.10.post1", "out, input, scale, weight, epsilon, group_size=, shuffle_scale="),
        C("v0.1.17-rc0", "out, input, scale, weight, epsilon, group_size=, shuffle_scale=, gemma_norm="),
    ),
)
ADD_NORM_QUANT = Function(
    f"{_NORMS}:add_rmsnorm_quant",
    (
        C("v0.1.10.post1", f"{_ADD}, scale, weight, epsilon, group_size=, shuffle_scale="),
        C("v0.1.17-rc0", f"{_ADD}, scale, weight, epsilon, group_size=, shuffle_scale=, gemma_norm="),
    ),
)
LATENT_NORMS = (
    Function(
        "aiter.ops.fused_qk_norm_rope_cache_quant:_fused_qk_rmsnorm",
        (C("v0.1.14-rc0", "q_out, q, q_weight, q_eps, k_out, k, k_weight, k_eps"),),
    ),
    Function(
        "aiter.ops.fused_qk_norm_rope_cache_quant:fused_qk_rmsnorm",
        (C("v0.1.12", "q, q_weight, q_eps, k, k_weight, k_eps"),),
        gone="v0.1.14-rc0",
    ),
)
LATENT_TOKEN_QUANT = Function(
    "aiter.ops.fused_qk_rmsnorm_group_quant:fused_qk_rmsnorm_per_token_quant",
    (C("v0.1.14-rc0", f"{_QK_QUANT}, gemma_norm="),),
)
LATENT_GROUP_QUANT = Function(
    "aiter.ops.fused_qk_rmsnorm_group_quant:fused_qk_rmsnorm_group_quant",
    (
        C("v0.1.12", f"{_QK_QUANT}, group_size=, transpose_scale="),
        C("v0.1.13.dev0", f"{_QK_QUANT}, group_size=, transpose_scale=, gemma_norm="),
        C(
            "v0.1.14-rc0",
            "q_out_quantized=, q_out_scale=, q=, q_weight=, q_epsilon=, "
            f"{_QK}, group_size=, transpose_scale=, gemma_norm=",
        ),
    ),
)
GATED_GROUP_QUANT = Function(
    "aiter.ops.gated_rmsnorm_fp8_group_quant:gated_rmsnorm_fp8_group_quant",
    (C("v0.1.12.post1", "out, scale, x, z, weight, epsilon, group_size, transpose_scale="),),
)
GATED_TOKEN_QUANT = Function(
    "aiter.ops.gated_rmsnorm_fp8_per_token_quant:gated_rmsnorm_fp8_per_token_quant",
    (C("v0.1.17-longctx", "out, scale, x, z, weight, epsilon"),),
)
SILU_QUANT = Function(
    "aiter.ops.activation:silu_and_mul_quant",
    (C("v0.1.15-rc0", "out, input, scale, group_size, limit=, shuffle_scale="),),
)

# ---- Triton: they allocate what they return. Most moved to other modules at v0.1.10

_GROUP = (
    "inp1, inp1_weight, inp1_epsilon, inp2=, inp2_weight=, inp2_epsilon=, group_size=, dtype_quant=, res1=, "
    "output_unquantized_inp1=, transpose_scale="
)
_STATIC = (
    "inp1, inp1_weight, inp1_epsilon, inp1_scale, inp2=, inp2_weight=, inp2_epsilon=, dtype_quant=, res1=, "
    "output_unquantized_inp1="
)
_MXFP4 = "x1, x1_weight, x1_epsilon, x2=, x2_weight=, x2_epsilon=, res1=, shuffle=, scale_shuffle_padding="
_CLAMP = "inp, out=, scale=, swiglu_limit=, activation=, weights=, dtype_quant=, transpose_scale="
_PAD = "x, weight, epsilon, res=, x_pad_to_multiple="
_SILU_STATIC = "inp, inp_scale, dtype_quant=, silu_convert_to_inp_type="

TRITON_ADD_PAD = (
    Function(f"{_TRITON}.normalization.fused_add_rmsnorm_pad:fused_add_rmsnorm_pad", (C("v0.1.10", _PAD),)),
    Function(f"{_TRITON}.fused_add_rmsnorm_pad:fused_add_rmsnorm_pad", (C("v0.1.6.post2", _PAD),), gone="v0.1.10"),
)
TRITON_GROUP_QUANT = (
    Function(
        f"{_TRITON}.quant.fused_fp8_quant:fused_rms_fp8_group_quant",
        (C("v0.1.10", _GROUP), C("v0.1.19.post1", f"{_GROUP}, is_x_scale_strided=")),
    ),
    Function(f"{_TRITON}.fused_fp8_quant:fused_rms_fp8_group_quant", (C("v0.1.6.post2", _GROUP),), gone="v0.1.10"),
)
TRITON_STATIC_QUANT = (
    Function(
        f"{_TRITON}.quant.fused_fp8_quant:fused_rms_fp8_per_tensor_static_quant",
        (C("v0.1.10", f"{_STATIC}, rmsnorm_convert_to_inp1_type="),),
    ),
    Function(
        f"{_TRITON}.fused_fp8_quant:fused_rms_fp8_per_tensor_static_quant",
        (C("v0.1.6.post2", _STATIC), C("v0.1.9.post1", f"{_STATIC}, rmsnorm_convert_to_inp1_type=")),
        gone="v0.1.10",
    ),
)
TRITON_GATED_QUANT = (
    Function(
        f"{_TRITON}.quant.fused_fp8_quant:fused_rms_gated_fp8_group_quant",
        (
            C(
                "v0.1.13-rc2",
                "x, weight, bias, z, eps, *, norm_before_gate=, use_ue8m0=, activation=, out_dtype=, fp8_min=, "
                "fp8_max=, fp8_min_scaling_factor=, group_size=",
            ),
        ),
    ),
)
TRITON_MXFP8_QUANT = (
    Function(f"{_TRITON}.quant.fused_mxfp8_quant:fused_rms_mxfp8_quant", (C("v0.1.16", "x, weight, eps, y=, scale="),)),
)


def _mxfp4(refused: str | None) -> tuple[Function, ...]:
    """`refused`: why the parameter list without `output_unquantized_inp1` cannot be used."""
    return (
        Function(
            f"{_TRITON}.quant.fused_mxfp4_quant:fused_rms_mxfp4_quant",
            (
                C("v0.1.10", f"{_MXFP4}, output_unquantized_inp1="),
                C("v0.1.20", f"{_MXFP4}, output_unquantized_inp1=, inargs="),
            ),
        ),
        Function(
            f"{_TRITON}.fused_mxfp4_quant:fused_rms_mxfp4_quant",
            (
                C(
                    "v0.1.5",
                    "inp1, inp1_weight, inp1_epsilon, inp2=, inp2_weight=, inp2_epsilon=, res1=",
                    refused="its scales lie column by column",
                ),
                C("v0.1.6.post2", _MXFP4, refused=refused),
                C("v0.1.7.post3", f"{_MXFP4}, output_unquantized_inp1="),
            ),
            gone="v0.1.10",
        ),
    )


TRITON_MXFP4_QUANT = _mxfp4(None)
TRITON_MXFP4_KEPT = _mxfp4("it does not return the plain norm")
TRITON_SILU_STATIC_QUANT = (
    Function(
        f"{_TRITON}.quant.fused_fp8_quant:fused_silu_mul_fp8_per_tensor_static_quant", (C("v0.1.10", _SILU_STATIC),)
    ),
    Function(
        f"{_TRITON}.fused_fp8_quant:fused_silu_mul_fp8_per_tensor_static_quant",
        (C("v0.1.9.post1", _SILU_STATIC),),
        gone="v0.1.10",
    ),
)
TRITON_CLAMP_QUANT = (
    Function(
        f"{_TRITON}.fusions.fused_clamp_act_mul:fused_clamp_act_mul",
        (
            C("v0.1.14-rc0", _CLAMP),
            C("v0.1.16", f"{_CLAMP}, quant_block_size=, scale_dtype_fmt=, shuffle_scale="),
        ),
    ),
)
TRITON_ACT_QUANT = (
    Function(
        f"{_TRITON}.activation:act_mul_and_fp8_group_quant",
        (C("v0.1.6.post2", "x, activation, group_size, dtype_quant="),),
    ),
)
