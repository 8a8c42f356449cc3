"""The norms of AITER that layerfuse calls: where each is, and every parameter list it has had."""

from __future__ import annotations

from .conventions import Binding, Function
from .conventions import Convention as C  # noqa: N817 - it stands in front of every line below

_ADD = "out, input, residual_in, residual_out"
_QK = "q_out_unquantized=, k_out=, q_res_out=, k=, k_weight=, k_epsilon=, q_residual="
_QK_QUANT = f"q_out_quantized, q_out_scale, q, q_weight, q_epsilon, {_QK}"
NORMS = "aiter.ops.rmsnorm"

NORM_BINDINGS: tuple[Binding, ...] = (
    Binding(
        name="mla_dual_rms_norm",
        calls="dual_norms.mla_dual_rms_norm",
        functions=(
            Function(
                "aiter.ops.fused_qk_norm_rope_cache_quant:_fused_qk_rmsnorm",
                (C("v0.1.14-rc0", "q_out, q, q_weight, q_eps, k_out, k, k_weight, k_eps"),),
            ),
            Function(
                "aiter.ops.fused_qk_norm_rope_cache_quant:fused_qk_rmsnorm",
                (C("v0.1.12", "q, q_weight, q_eps, k, k_weight, k_eps"),),
                gone="v0.1.14-rc0",
            ),
        ),
    ),
    Binding(
        name="mla_dual_rms_norm_per_token_quant",
        calls="dual_norms.per_token_quant",
        functions=(
            Function(
                "aiter.ops.fused_qk_rmsnorm_group_quant:fused_qk_rmsnorm_per_token_quant",
                (C("v0.1.14-rc0", f"{_QK_QUANT}, gemma_norm="),),
            ),
        ),
    ),
    Binding(
        name="mla_dual_rms_norm_group_quant",
        calls="dual_norms.group_quant",
        functions=(
            Function(
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
            ),
        ),
    ),
    Binding(
        name="rms_norm",
        calls="norms.rms_norm",
        functions=(
            Function(f"{NORMS}:rmsnorm2d_fwd", (C("v0.1.5", "input, weight, epsilon, use_model_sensitive_rmsnorm="),)),
        ),
        with_=(
            Function(
                f"{NORMS}:rmsnorm",
                (
                    C("v0.1.10.post1", "out, input, weight, epsilon"),
                    C("v0.1.17-rc0", "out, input, weight, epsilon, gemma_norm="),
                ),
            ),
        ),
    ),
    Binding(
        name="add_rms_norm",
        calls="norms.add_rms_norm",
        functions=(
            Function(
                f"{NORMS}:rmsnorm2d_fwd_with_add",
                (
                    C("v0.1.5", f"{_ADD}, weight, epsilon, use_model_sensitive_rmsnorm="),
                    C("v0.1.17-rc0", f"{_ADD}, weight, epsilon, gemma_norm=, use_model_sensitive_rmsnorm="),
                ),
            ),
        ),
    ),
    Binding(
        name="rms_norm_quant",
        calls="norms.rms_norm_quant",
        functions=(
            Function(
                f"{NORMS}:rmsnorm_quant",
                (
                    C("v0.1.10.post1", "out, input, scale, weight, epsilon, group_size=, shuffle_scale="),
                    C("v0.1.17-rc0", "out, input, scale, weight, epsilon, group_size=, shuffle_scale=, gemma_norm="),
                ),
            ),
        ),
    ),
    Binding(
        name="add_rms_norm_quant",
        calls="norms.add_rms_norm_quant",
        functions=(
            Function(
                f"{NORMS}:add_rmsnorm_quant",
                (
                    C("v0.1.10.post1", f"{_ADD}, scale, weight, epsilon, group_size=, shuffle_scale="),
                    C("v0.1.17-rc0", f"{_ADD}, scale, weight, epsilon, group_size=, shuffle_scale=, gemma_norm="),
                ),
            ),
        ),
    ),
    Binding(
        name="gated_rms_norm_group_quant",
        calls="gated.group_quant",
        functions=(
            Function(
                "aiter.ops.gated_rmsnorm_fp8_group_quant:gated_rmsnorm_fp8_group_quant",
                (C("v0.1.12.post1", "out, scale, x, z, weight, epsilon, group_size, transpose_scale="),),
            ),
        ),
    ),
    Binding(
        name="gated_rms_norm_per_token_quant",
        calls="gated.per_token_quant",
        functions=(
            Function(
                "aiter.ops.gated_rmsnorm_fp8_per_token_quant:gated_rmsnorm_fp8_per_token_quant",
                (C("v0.1.17-longctx", "out, scale, x, z, weight, epsilon"),),
            ),
        ),
    ),
)
