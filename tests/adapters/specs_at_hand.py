"""One valid spec of each type, for tests to vary, and hypothesis strategies that draw valid ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from layerfuse.adapters.specs import (
    WHOLE,
    FinalNormSpec,
    GatedDeltaNetKernelSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    GatedNormSpec,
    GQAKernelSpec,
    GQASpec,
    LinearSpec,
    Mamba2Spec,
    MLAKernelSpec,
    MLASpec,
    NormSpec,
    OtherMixerSpec,
    Parallel,
    ResidualSpec,
    WeightSpec,
    shard_kv_heads,
)

_LAYER: dict[str, Any] = {"hidden_size": 7168, "layer_index": 3, "parallel": WHOLE}
_SPLIT: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "softmax_scale": 192**-0.5,
}
_MLA = {
    **_LAYER,
    **_SPLIT,
    "num_heads": 128,
    "num_local_heads": 128,
    "q_norm": NormSpec(width=1536, epsilon=1e-6),
    "kv_norm": NormSpec(width=512, epsilon=1e-6),
}
_GATED = {"width": 128, "epsilon": 1e-5, "activation": "silu", "norm_before_gate": True, "group_size": None}
_DELTA = {
    **_LAYER,
    "num_k_heads": 16,
    "num_v_heads": 32,
    "num_local_k_heads": 16,
    "num_local_v_heads": 32,
    "head_k_dim": 128,
    "head_v_dim": 128,
    "conv_kernel_size": 4,
    "output_norm": GatedNormSpec(**_GATED),
}
_GQA = {
    **_LAYER,
    "num_heads": 64,
    "num_local_heads": 64,
    "num_kv_heads": 8,
    "num_local_kv_heads": 8,
    "head_dim": 64,
    "v_head_dim": 64,
    "softmax_scale": 0.125,
    "sliding_window": 128,
    "has_sinks": True,
}
_MAMBA2 = {
    **_LAYER,
    "num_heads": 64,
    "num_local_heads": 64,
    "head_dim": 64,
    "ssm_state_size": 128,
    "num_groups": 8,
    "num_local_groups": 8,
    "conv_kernel_size": 4,
    "output_norm": GatedNormSpec(**{**_GATED, "width": 4096, "group_size": 512}),
}
_MLP = {
    **_LAYER,
    "intermediate_size": 18432,
    "local_intermediate_size": 18432,
    "activation": "silu",
    "swiglu_limit": None,
}
_RESIDUAL = {
    **_LAYER,
    "input_norms": (NormSpec(width=7168, epsilon=1e-6),),
    "post_attention_norms": (NormSpec(width=7168, epsilon=1e-6),),
}
_KERNEL = {"layer_index": 3, "outer": "the layer model.layers.3.self_attn"}


def mla(**changes: Any) -> MLASpec:
    return MLASpec(**{**_MLA, **changes})


def delta_net(**changes: Any) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(**{**_DELTA, **changes})


def gqa(**changes: Any) -> GQASpec:
    return GQASpec(**{**_GQA, **changes})


def mamba2(**changes: Any) -> Mamba2Spec:
    return Mamba2Spec(**{**_MAMBA2, **changes})


def other_mixer(**changes: Any) -> OtherMixerSpec:
    return OtherMixerSpec(**{**_LAYER, "mixer": "mamba", **changes})


def gated_mlp(**changes: Any) -> GatedMLPSpec:
    return GatedMLPSpec(**{**_MLP, **changes})


def residual(**changes: Any) -> ResidualSpec:
    return ResidualSpec(**{**_RESIDUAL, **changes})


def final(**changes: Any) -> FinalNormSpec:
    return FinalNormSpec(**{**_LAYER, "final_norm": NormSpec(width=7168, epsilon=1e-6), **changes})


def gated_norm(**changes: Any) -> GatedNormSpec:
    return GatedNormSpec(**{**_GATED, **changes})


PLAIN = WeightSpec(dtype="bfloat16", scheme="plain", block=None)


def linear(**changes: Any) -> LinearSpec:
    values: dict[str, Any] = {
        "path": "o_proj",
        "in_features": 16384,
        "local_in_features": 2048,
        "out_features": 7168,
        "local_out_features": 7168,
        "local_outputs": (7168,),
        "style": "row",
        "weight": PLAIN,
        "activation": None,
        "takes_quantised": False,
        "shares_input": (),
    }
    return LinearSpec(**{**values, **changes})


def mla_kernel(**changes: Any) -> MLAKernelSpec:
    return MLAKernelSpec(**{**_KERNEL, **_SPLIT, "num_local_heads": 16, **changes})


def gqa_kernel(**changes: Any) -> GQAKernelSpec:
    fields = {
        "num_local_heads": 8,
        "num_local_kv_heads": 1,
        "head_dim": 64,
        "v_head_dim": 64,
        "softmax_scale": 0.125,
        "sliding_window": None,
    }
    return GQAKernelSpec(**{**_KERNEL, **fields, **changes})


def delta_net_kernel(**changes: Any) -> GatedDeltaNetKernelSpec:
    fields = {"num_local_k_heads": 2, "num_local_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
    return GatedDeltaNetKernelSpec(**{**_KERNEL, **fields, **changes})


OUTER = {
    "mla": mla,
    "gated_delta_net": delta_net,
    "gqa": gqa,
    "mamba2": mamba2,
    "other": other_mixer,
    "gated_mlp": gated_mlp,
    "residual": residual,
    "final": final,
}
KERNELS = {"mla_kernel": mla_kernel, "gqa_kernel": gqa_kernel, "gated_delta_net_kernel": delta_net_kernel}
EVERY = {**OUTER, **KERNELS}

# ---- drawing valid specs ---------------------------------------------------------------------------------------------

widths = st.integers(1, 4096)
epsilons = st.floats(1e-12, 1e-2)


@st.composite
def parallels(draw: st.DrawFn, most: int = 16) -> Parallel:
    size = draw(st.integers(1, most))
    rank = draw(st.integers(0, size - 1)) if size == 1 else draw(st.none() | st.integers(0, size - 1))
    return Parallel(size=size, rank=rank)


@st.composite
def whole_mla(draw: st.DrawFn) -> MLASpec:
    """One that is not sharded, with or without a query latent."""
    q_lora_rank = draw(st.none() | widths)
    kv_lora_rank, heads = draw(widths), draw(st.integers(1, 256))
    return mla(
        num_heads=heads,
        num_local_heads=heads,
        q_lora_rank=q_lora_rank,
        q_norm=None if q_lora_rank is None else NormSpec(width=q_lora_rank, epsilon=draw(epsilons)),
        kv_lora_rank=kv_lora_rank,
        kv_norm=NormSpec(width=kv_lora_rank, epsilon=draw(epsilons)),
        qk_nope_head_dim=draw(widths),
        qk_rope_head_dim=2 * draw(st.integers(0, 64)),
        v_head_dim=draw(widths),
        layer_index=draw(st.integers(0, 100)),
    )


@st.composite
def whole_gqa(draw: st.DrawFn) -> GQASpec:
    kv_heads = draw(st.integers(1, 32))
    heads = kv_heads * draw(st.integers(1, 16))
    return gqa(
        num_heads=heads,
        num_local_heads=heads,
        num_kv_heads=kv_heads,
        num_local_kv_heads=shard_kv_heads(kv_heads, 1),
        head_dim=draw(widths),
        sliding_window=draw(st.none() | widths),
        has_sinks=draw(st.booleans()),
    )


@st.composite
def whole_delta_net(draw: st.DrawFn) -> GatedDeltaNetSpec:
    k_heads, v_dim = draw(st.integers(1, 64)), draw(widths)
    v_heads = k_heads * draw(st.integers(1, 4))
    return delta_net(
        num_k_heads=k_heads,
        num_local_k_heads=k_heads,
        num_v_heads=v_heads,
        num_local_v_heads=v_heads,
        head_v_dim=v_dim,
        output_norm=gated_norm(width=v_dim),
    )


@st.composite
def whole_mamba2(draw: st.DrawFn) -> Mamba2Spec:
    """With its norm or without."""
    groups, each, width = draw(st.integers(1, 16)), draw(st.integers(1, 16)), draw(widths)
    norm = gated_norm(width=groups * each * width, group_size=each * width)
    return mamba2(
        num_heads=groups * each,
        num_local_heads=groups * each,
        num_groups=groups,
        num_local_groups=groups,
        head_dim=width,
        output_norm=draw(st.none() | st.just(norm)),
    )


@st.composite
def whole_mlp(draw: st.DrawFn) -> GatedMLPSpec:
    width = draw(widths)
    return gated_mlp(
        intermediate_size=width,
        local_intermediate_size=width,
        layer_index=draw(st.none() | st.integers(0, 100)),
        swiglu_limit=draw(st.none() | st.floats(1.0, 20.0)),
    )


whole = st.one_of(whole_mla(), whole_gqa(), whole_delta_net(), whole_mamba2(), whole_mlp())
