"""The bindings of gated norms and of gated activations, which all quantise."""

from __future__ import annotations

from . import functions as known
from .conventions import Binding

ACTIVATION_BINDINGS: tuple[Binding, ...] = (
    Binding(name="gated_rms_norm_per_token_quant", calls="gated.hip_per_token", functions=(known.GATED_TOKEN_QUANT,)),
    Binding(name="gated_rms_norm_group_quant", calls="gated.hip_group", functions=(known.GATED_GROUP_QUANT,)),
    Binding(
        name="gated_rms_norm_group_quant.triton",
        calls="gated.triton_group",
        functions=known.TRITON_GATED_QUANT,
        kind="triton",
    ),
    Binding(
        name="silu_mul_static_quant",
        calls="silu_mul.triton_static",
        functions=known.TRITON_SILU_STATIC_QUANT,
        kind="triton",
    ),
    Binding(
        name="silu_mul_per_token_quant.clamp",
        calls="silu_mul.clamp_per_token",
        functions=known.TRITON_CLAMP_QUANT,
        kind="triton",
    ),
    Binding(
        name="silu_mul_per_token_quant.triton",
        calls="silu_mul.triton_per_token",
        functions=known.TRITON_ACT_QUANT,
        kind="triton",
    ),
    Binding(name="silu_mul_group_quant", calls="silu_mul.hip_group", functions=(known.SILU_QUANT,)),
    Binding(
        name="silu_mul_group_quant.clamp",
        calls="silu_mul.clamp_group",
        functions=known.TRITON_CLAMP_QUANT,
        kind="triton",
    ),
    Binding(
        name="silu_mul_group_quant.triton",
        calls="silu_mul.triton_group",
        functions=known.TRITON_ACT_QUANT,
        kind="triton",
    ),
)
