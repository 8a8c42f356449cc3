"""vLLM's models that it does not compile, of classes in files of their own; what each `forward` does was read in vLLM 0.33.

Several mix streams in front of their norms, some in one kernel with the norm. The words that say so stand here.
"""

from __future__ import annotations

from typing import Any

from . import vocabulary as words
from . import vocabulary_streams as streams
from .base import Adapter, Facts
from .hybrids import Engine, other
from .sources import const, norm
from .vllm_decoders import stream
from .vocabulary_mlps import VLLM_MLP

_FILES = "vllm.models"
_VLLM = Engine("output_size", {"tp_size": "tp_size", "tp_rank": "tp_rank"}, {"path": "prefix", "as": "name_index"})
_ZERO_CENTRED: dict[str, Any] = {"weight_offset": const(1.0)}
_EPSILON: dict[str, Any] = {"epsilon": "variance_epsilon"}
_ITS_OWN_KERNEL: dict[str, Any] = {
    "v_head_dim": "head_dim",
    "sliding_window": const(None),
    "has_sinks": const(False),
    "layer_index": {"path": "layer_name", "as": "name_index"},
}
"""Of an attention layer that is its own kernel layer."""


def _qk(**more: Any) -> Facts:
    """A grouped-query attention with zero-centred norms of its heads."""
    qk = words.qk_norms("variance_epsilon", **_ZERO_CENTRED)
    return words.VLLM_GQA.but(**qk, rope=words.QK_ROPE_MODULE, **more)


def _mixed(facts: Facts, what: str, **more: Any) -> Facts:
    """A decoder layer in front of whose norms stands no sum."""
    return facts.but(no_sum=const(what), added_as_given=const(False), **more)


def _alone(facts: Facts, what: str, **more: Any) -> Facts:
    """One that calls none of its norms: kernels of the model's own have them in them."""
    return _mixed(facts, what, input_norms=[], post_attention_norms=[], **more)


def _final(facts: Facts, **more: Any) -> Facts:
    """The model around decoder layers in front of whose norms stands no sum."""
    like = facts.but(input_norms=[norm("norm", **_EPSILON, **more)])
    return streams.final_norm(like).but(no_sum=facts.words["no_sum"])


# ---- one stream, and one sum in front of each norm

_MINIMAX_M3 = stream(like=_ZERO_CENTRED, also=["block_sparse_moe.shared_experts.gate_up_proj"]).but(
    layer_index="layer_id", mixture=["block_sparse_moe"]
)
# What its sparse layers read the norm with, no linear of several says: it is never quantised.
_STEP5 = stream(like=_ZERO_CENTRED, also=["moe.share_expert.gate_up_proj"]).but(
    layer_index="layer_idx",
    mixture=["moe"],
    input_norms=[
        norm(
            "input_layernorm",
            **_EPSILON,
            **_ZERO_CENTRED,
            consumers=[f"self_attn.{each}" for each in ("qkvg_proj", "qkv_proj", "g_proj")],
        )
    ],
)
_K3_DSPARK = stream(first="fused_qkv_a_proj").but(layer_index={"path": "self_attn.layer_name", "as": "name_index"})

# ---- hyper-connections: several streams, mixed in front of each norm

HYPER_CONNECTIONS = (
    "hyper-connections mix several streams in front of each norm, so that no sum of one stream stands there"
)
_IN_ONE_KERNEL = f"{HYPER_CONNECTIONS}; the kernel that mixes them norms too"

_MHC = streams.VLLM_RESIDUAL.but(unless=[{"path": "mhc", "as": "not"}, "is_mtp_layer"])
_GLM5_NEXT = _alone(_MHC, _IN_ONE_KERNEL)
_DEEPSEEK_V4 = _alone(
    streams.VLLM_RESIDUAL,
    _IN_ONE_KERNEL,
    layer_index={"path": "attn.prefix", "as": "name_index"},
    tp_size="attn.wo_b.tp_size",
    tp_rank="attn.wo_b.tp_rank",
    mixture=["ffn"],
    last_linear=[],
)
_HY_V4 = _mixed(
    stream(first="fused_qkv_a_proj", also=["mlp.shared_experts.gate_up_proj"]),
    HYPER_CONNECTIONS,
    layer_index="layer_idx",
    unless={"path": "enable_ihc", "as": "not"},
)
_QWEN4_OUT = ("linear_attn.out_proj", "self_attn.o_proj")
_QWEN4 = _alone(
    streams.VLLM_RESIDUAL,
    f"{HYPER_CONNECTIONS}; each stream is normed before that",
    hidden_size=[f"{each}.output_size" for each in _QWEN4_OUT],
    tp_size=[f"{each}.tp_size" for each in _QWEN4_OUT],
    tp_rank=[f"{each}.tp_rank" for each in _QWEN4_OUT],
)

# ---- sums of another kind

_ALICE_OUT = ("linear_attn.o_proj", "self_attn.o_proj")
_ALICE = _mixed(
    streams.VLLM_RESIDUAL,
    "attention residuals weigh the sums of several blocks of layers in front of each norm",
    hidden_size=[f"{each}.output_size" for each in _ALICE_OUT],
    tp_size=[f"{each}.tp_size" for each in _ALICE_OUT],
    tp_rank=[f"{each}.tp_rank" for each in _ALICE_OUT],
    **streams.norms(
        "variance_epsilon",
        ["linear_attn.in_proj_qkvgfab", "self_attn.qkv_proj"],
        ["mlp.shared_expert.gate_up_proj"],
        **_ZERO_CENTRED,
    ),
)
_MUSE_SPARK = _alone(
    streams.VLLM_RESIDUAL,
    "a gate for each column weighs the stream and what is added to it, which is normed first; that and the norm of the sum are one kernel of the model's where they can be",
    mixture=["feed_forward"],
    last_linear="feed_forward.down_proj",
)
_INKLING = _alone(
    streams.VLLM_RESIDUAL,
    "a convolution over the tokens of what attention and MLP give stands in front of the add",
    hidden_size="attn.hidden_size",
    layer_index={"path": "attn.prefix", "as": "name_index"},
    tp_size="attn.wo_ud.tp_size",
    tp_rank="attn.wo_ud.tp_rank",
    last_linear="mlp.down_proj",
)

_BEAM_EPSILON: dict[str, Any] = {"layer_epsilon": "rms_norm_eps"}
_BEAM_MLP = VLLM_MLP.but(activation=const("silu"), swiglu_limit=const(None))
_BEAM = _alone(
    stream(),
    "what attention and MLP give is normed, and that and the stream are scaled in front of the add; the kernel that does it norms the sum",
    layer_index="layer_id",
)

_CLASSES: dict[str, Facts] = {
    "beam.nvidia.attention:BeamAttention": words.VLLM_GQA.but(
        q_norm=norm("q_norm", **_BEAM_EPSILON),
        k_norm=norm("k_norm", **_BEAM_EPSILON),
        rope=words.QK_ROPE_MODULE,
        hidden_size="o_proj.output_size",
        layer_index="layer_id",
    ),
    "beam.nvidia.moe:BeamMLP": _BEAM_MLP,
    "beam.nvidia.model:BeamDecoderLayer": _BEAM,
    "beam.nvidia.model:BeamModel": _final(_BEAM).but(final_norm=norm("norm", layer_epsilon="config.rms_norm_eps")),
    "minimax_m3.nvidia.model:MiniMaxM3Attention": _qk(),
    "minimax_m3.nvidia.model:MiniMaxM3SparseAttention": _qk(**_ITS_OWN_KERNEL),
    "minimax_m3.nvidia.model:MiniMaxM3MLP": VLLM_MLP,
    "minimax_m3.nvidia.model:MiniMaxM3DecoderLayer": _MINIMAX_M3,
    "minimax_m3.nvidia.model:MiniMaxM3Model": streams.final_norm(_MINIMAX_M3),
    "step5.nvidia.model:Step5Attention": _qk(),
    "step5.nvidia.model:Step5MLP": VLLM_MLP,
    "step5.nvidia.model:Step5DecoderLayer": _STEP5,
    "step5.nvidia.model:Step5Model": streams.final_norm(_STEP5),
    "kimi_k3.nvidia.dspark_mla:K3DSparkDecoderLayer": _K3_DSPARK,
    "kimi_k3.nvidia.dspark_mla:K3DSparkModel": streams.final_norm(_K3_DSPARK, module="final_norm"),
    # A factor stands between the query latent's norm and what reads it.
    "dots3_note.nvidia.model:Dots3NoteFullAttention": words.VLLM_MLA.but(q_norm=norm("q_a_layernorm", **_EPSILON)),
    "dots3_note.nvidia.model:Dots3NoteSlidingAttention": other(
        _VLLM,
        "MLA with a sliding window",
        "o_proj",
        layer_index={"path": "mla_attn.layer_name", "as": "name_index"},
    ),
    "glm5next.common.model:Glm5NextDecoderLayer": _GLM5_NEXT,
    "glm5next.common.model:Glm5NextModel": _final(_GLM5_NEXT),
    "deepseek_v4.nvidia.model:DeepseekV4DecoderLayer": _DEEPSEEK_V4,
    "deepseek_v4.nvidia.model:DeepseekV4MLP": VLLM_MLP,
    "deepseek_v4.nvidia.model:DeepseekV4Model": _final(_DEEPSEEK_V4),
    "deepseek_v4.attention:DeepseekV4Attention": other(
        _VLLM, "attention over one normed latent of each token, and over compressed ones", "wo_b"
    ),
    "deepseek_v41.nvidia.model:DeepseekV4DecoderLayer": _DEEPSEEK_V4,
    "deepseek_v41.nvidia.model:DeepseekV4Model": _final(_DEEPSEEK_V4),
    "deepseek_v41.attention:DeepseekV4Attention": other(
        _VLLM, "attention over one normed latent of each token, and over compressed ones", "wo_b"
    ),
    "hy_v4.nvidia.attention:HYV4MLAAttention": words.VLLM_MLA.but(
        layer_index="layer_idx", rope=words.rope_module("rotary_emb", "cos_sin")
    ),
    "hy_v4.nvidia.moe:HYV4FeedForward": VLLM_MLP,
    "hy_v4.nvidia.model:HYV4DecoderLayer": _HY_V4,
    "hy_v4.nvidia.model:HYV4Model": _final(_HY_V4),
    "qwen4_exp.nvidia.qsa:Qwen4ExpQSAAttention": _qk(**_ITS_OWN_KERNEL),
    "qwen4_exp.nvidia.model:Qwen4ExpDecoderLayer": _QWEN4,
    "muse_spark.nvidia.model:MuseSpark1xAttention": words.VLLM_GQA,
    "muse_spark.nvidia.model:MuseSpark1xDecoderLayer": _MUSE_SPARK,
    "muse_spark.nvidia.model:MuseSpark1xModel": _final(_MUSE_SPARK, weight_offset="gain_center"),
    "inkling.nvidia.attention:InklingAttention": other(
        _VLLM, "attention with convolutions of its keys and values", "wo_ud"
    ),
    "inkling.nvidia.model:InklingDecoderLayer": _INKLING,
    "inkling.nvidia.model:InklingModel": _final(_INKLING),
}

VLLM_UNCOMPILED = Adapter(
    "vllm_uncompiled",
    layers={
        "vllm.model_executor.models.alice_ai:AliceAIDecoderBlock": _ALICE,
        "vllm.model_executor.models.alice_ai:AliceAIModel": _final(_ALICE, **_ZERO_CENTRED),
        **{f"{_FILES}.{place}": facts for place, facts in _CLASSES.items()},
    },
    # Its product is a kernel of the model's own, and one number of the checkpoint's multiplies what it gives.
    ignored=[
        "vllm.models.inkling.nvidia.mlp:InklingDenseMLP",
        # Its norms are of each of several streams.
        "vllm.models.qwen4_exp.nvidia.hyperconnection:GatedResidual",
    ],
)
