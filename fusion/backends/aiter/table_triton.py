"""The Triton functions of AITER that layerfuse calls. Most moved to other modules at v0.1.10."""

from __future__ import annotations

from .conventions import Binding, Function
from .conventions import Convention as C  # noqa: N817 - it stands in front of every line below

_TRITON_RMS = (
    "inp1, inp1_weight, inp1_epsilon, inp2=, inp2_weight=, inp2_epsilon=, group_size=, dtype_quant=, res1=, "
    "output_unquantized_inp1=, transpose_scale="
)
TRITON = "aiter.ops.triton"

TRITON_BINDINGS: tuple[Binding, ...] = (
    Binding(
        name="triton_gated_rms_norm_quant",
        calls="triton_ops.gated_rms_norm_quant",
        kind="triton",
        functions=(
            Function(
                f"{TRITON}.quant.fused_fp8_quant:fused_rms_gated_fp8_group_quant",
                (
                    C(
                        "v0.1.13-rc2",
                        "x, weight, bias, z, eps, *, norm_before_gate=, use_ue8m0=, activation=, out_dtype=, fp8_min=, "
                        "fp8_max=, fp8_min_scaling_factor=, group_size=",
                    ),
                ),
            ),
        ),
    ),
    Binding(
        name="triton_rms_norm",
        calls="triton_ops.rms_norm",
        kind="triton",
        functions=(
            Function(f"{TRITON}.normalization.rmsnorm:rms_norm", (C("v0.1.10", "input, weight, epsilon"),)),
            Function(f"{TRITON}.rmsnorm:rms_norm", (C("v0.1.5", "input, weight, epsilon"),), gone="v0.1.10"),
        ),
    ),
    Binding(
        name="triton_rms_norm_group_quant",
        calls="triton_ops.rms_norm_group_quant",
        kind="triton",
        functions=(
            Function(
                f"{TRITON}.quant.fused_fp8_quant:fused_rms_fp8_group_quant",
                (C("v0.1.10", _TRITON_RMS), C("v0.1.19.post1", f"{_TRITON_RMS}, is_x_scale_strided=")),
            ),
            Function(
                f"{TRITON}.fused_fp8_quant:fused_rms_fp8_group_quant", (C("v0.1.6.post2", _TRITON_RMS),), gone="v0.1.10"
            ),
        ),
    ),
    Binding(
        name="triton_add_rms_norm_pad",
        calls="triton_ops.add_rms_norm_pad",
        kind="triton",
        functions=(
            Function(
                f"{TRITON}.normalization.fused_add_rmsnorm_pad:fused_add_rmsnorm_pad",
                (C("v0.1.10", "x, weight, epsilon, res=, x_pad_to_multiple="),),
            ),
            Function(
                f"{TRITON}.fused_add_rmsnorm_pad:fused_add_rmsnorm_pad",
                (C("v0.1.6.post2", "x, weight, epsilon, res=, x_pad_to_multiple="),),
                gone="v0.1.10",
            ),
        ),
    ),
    Binding(
        name="triton_act_mul_group_quant",
        calls="triton_ops.act_mul_group_quant",
        kind="triton",
        functions=(
            Function(
                f"{TRITON}.activation:act_mul_and_fp8_group_quant",
                (C("v0.1.6.post2", "x, activation, group_size, dtype_quant="),),
            ),
        ),
    ),
)
