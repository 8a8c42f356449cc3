"""vLLM's decoders whose parts have other names than usual, or whose norms do: by the file, because drafts have classes of the same names.

What each `forward` does was read in vLLM 0.33: where norms stand, what is added as it is, which linears read a norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import vocabulary as words
from . import vocabulary_streams as streams
from .base import Adapter, Facts
from .layer_norm_parts import plain_mlp
from .sources import const, layer_norm, norm
from .vocabulary_mlps import VLLM_MLP

FILES = "vllm.model_executor.models"
NAMES = ("input_layernorm", "post_attention_layernorm")
_NOT_AS_GIVEN: dict[str, Any] = {"added_as_given": const(False)}
_AT_ONCE: dict[str, Any] = {"parallel_residual": const(True)}
_ZERO_CENTRED: dict[str, Any] = {"weight_offset": const(1.0)}


def stream(
    norms: Sequence[Any] = NAMES,
    *,
    attention: str = "self_attn",
    out: str = "o_proj",
    first: str = "qkv_proj",
    mlp: str = "mlp",
    up: Sequence[str] = ("gate_up_proj",),
    down: str = "down_proj",
    also: Sequence[str] = (),
    like: dict[str, Any] | None = None,
    **more: Any,
) -> Facts:
    """A decoder layer by the names of its norms, its attention and that one's linears, its MLP or mixture and the linears of that.

    Args:
        norms: names, or norms; one where attention and MLP read the same, none where they stand behind both.
        attention: where it is.
        out: its last linear.
        first: what of it reads the norm in front.
        mlp: where that or the mixture is.
        up: what of it reads the norm in front.
        down: its last linear.
        also: what else reads that norm.
        like: what is said of norms that are given by name.
        more: other words.
    """
    made = [
        norm(each, **{"epsilon": "variance_epsilon", **(like or {})}) if isinstance(each, str) else each
        for each in norms
    ]
    read, behind = [f"{attention}.{first}"], [*(f"{mlp}.{each}" for each in up), *also]
    last = f"{attention}.{out}"
    before, after = made[:1], made[1:]
    return streams.VLLM_RESIDUAL.but(
        hidden_size=f"{last}.output_size",
        layer_index={"path": f"{attention}.attn.layer_name", "as": "name_index"},
        tp_size=f"{last}.tp_size",
        tp_rank=f"{last}.tp_rank",
        last_linear=f"{mlp}.{down}",
        mixture=[mlp],
        input_norms=[{**each, "consumers": read if after else [*read, *behind]} for each in before],
        post_attention_norms=[{**each, "consumers": behind, "producers": [last]} for each in after],
        **more,
    )


def mlp_of(facts: Facts, down: str) -> Facts:
    """The same MLP whose last linear is called so."""
    return facts.but(
        hidden_size=f"{down}.output_size",
        intermediate_size=f"{down}.input_size",
        local_intermediate_size=f"{down}.input_size_per_partition",
        quant=down,
        tp_weight=None,
        tp_size=f"{down}.tp_size",
        tp_rank=f"{down}.tp_rank",
    )


_TORCHS: dict[str, Any] = {"epsilon": "eps"}
"""Of torch's own LayerNorm."""
_COHERE = layer_norm("input_layernorm", epsilon="variance_epsilon")
_1P = [layer_norm(each, epsilon="eps", has_bias=const(True), **_ZERO_CENTRED) for each in NAMES]
_GQA = words.VLLM_GQA
_MLA = streams.VLLM_RESIDUAL.but(layer_index={"path": "self_attn.attn.layer_name", "as": "name_index"})

_INTERN = stream(
    ("attention_norm", "ffn_norm"), attention="attention", out="wo", first="wqkv", mlp="feed_forward", down="w2"
)
_EXAONE = stream(("ln_1", "ln_2"), attention="attn.attention", out="out_proj", down="c_proj")
_BAILING = stream(attention="attention", out="dense", first="query_key_value")
_PANGU = stream(unless=["sandwich_norm", "use_sink_attention"])
_GRANITE_SHARED = stream(mlp="block_sparse_moe", also=["shared_mlp.input_linear"], **_NOT_AS_GIVEN)

_FALCON = stream(
    like=_TORCHS,
    attention="self_attention",
    out="dense",
    first="query_key_value",
    up=["dense_h_to_4h"],
    down="dense_4h_to_h",
    parallel_residual="config.parallel_attn",
    unless="ln_attn",
)
_GPTJ = stream(["ln_1"], like=_TORCHS, attention="attn", out="out_proj", up=["fc_in"], down="fc_out", **_AT_ONCE)
_GPT2 = stream(
    ["ln_1", "ln_2"], like=_TORCHS, attention="attn", out="c_proj", first="c_attn", up=["c_fc"], down="c_proj"
)
_OPT = stream(
    ["self_attn_layer_norm", "final_layer_norm"],
    like=_TORCHS,
    out="out_proj",
    up=[],
    also=["fc1"],
    unless={"path": "do_layer_norm_before", "as": "not"},
).but(last_linear="fc2", mixture=None)
_ALL_HEADS = _GQA.but(num_local_heads="num_heads", num_local_kv_heads="num_heads")
"""Each head has keys and values of its own."""
_APERTUS = stream(("attention_layernorm", "feedforward_layernorm"), up=["up_proj"])
_BAILING_GQA = _GQA.but(num_kv_heads="total_kv_heads", softmax_scale="scale", tp_rank="dense.tp_rank")
_FALCON_GQA = _GQA.but(softmax_scale="inv_norm_factor", tp_rank="dense.tp_rank")
_GPTJ_HEADS = _ALL_HEADS.but(
    head_dim="head_size", num_kv_heads="total_num_heads", softmax_scale="attn.impl.scale", tp_rank="out_proj.tp_rank"
)
_GPT2_HEADS = _ALL_HEADS.but(
    num_heads="c_proj.input_size / head_dim",
    num_kv_heads="c_proj.input_size / head_dim",
    softmax_scale="scale",
    tp_rank="c_proj.tp_rank",
)
_OPT_HEADS = _ALL_HEADS.but(
    num_heads="out_proj.input_size / head_dim",
    num_kv_heads="out_proj.input_size / head_dim",
    hidden_size="embed_dim",
    tp_rank="out_proj.tp_rank",
)
_STABLELM_GQA = _GQA.but(num_kv_heads="total_num_key_value_heads", num_local_kv_heads="num_key_value_heads")

_H = ("h", "ln_f")
_MODELS: tuple[tuple[Any, ...], ...] = (
    ("afmoe", "Afmoe", _GQA, stream(("input_layernorm", "pre_mlp_layernorm"), **_NOT_AS_GIVEN)),
    ("apertus", "Apertus", _GQA.but(hidden_size="hidden_size"), _APERTUS),
    ("bailing_moe", "Bailing", _BAILING_GQA, _BAILING, "Attention MoeBlock MoeModel"),
    ("commandr", "Cohere", _GQA, stream([_COHERE], **_AT_ONCE)),
    # With RMSNorms where the config says their epsilon.
    ("cohere2_moe", "Cohere2Moe", _GQA, stream([_COHERE], **_AT_ONCE, unless="uses_rms_norm")),
    ("exaone", "Exaone", _GQA.but(tp_rank="out_proj.tp_rank"), _EXAONE, streams.USUAL_ENDS, _H),
    ("exaone4", "Exaone4", _GQA, stream((), **_NOT_AS_GIVEN)),
    ("exaone_moe", "ExaoneMoe", _GQA, stream()),
    ("falcon", "Falcon", _FALCON_GQA, _FALCON, streams.USUAL_ENDS, _H),
    ("glm4_moe_lite", "Glm4MoeLite", None, streams.VLLM_RESIDUAL),
    ("gpt_j", "GPTJ", _GPTJ_HEADS, _GPTJ, "Attention Block Model", _H),
    ("gpt2", "GPT2", _GPT2_HEADS, _GPT2, "Attention Block Model", _H),
    ("granitemoe", "GraniteMoe", _GQA, stream(mlp="block_sparse_moe", **_NOT_AS_GIVEN)),
    ("granitemoeshared", "GraniteMoeShared", None, _GRANITE_SHARED),
    ("hy_v3", "HYV3", _GQA, stream(also=["mlp.shared_mlp.gate_up_proj"])),
    ("internlm2", "InternLM", _GQA.but(tp_rank="wo.tp_rank"), _INTERN, "2Attention DecoderLayer 2Model"),
    ("laguna", "Laguna", _GQA, stream(up=["gate_proj", "up_proj"])),
    ("mimo_v2", "MiMoV2", _GQA, stream(), "Attention FlashDecoderLayer Model"),
    ("minicpm", "MiniCPM", _GQA, stream(**_NOT_AS_GIVEN)),
    ("minicpm3", "MiniCPM3", words.VLLM_MLA_EXPANDED, _MLA.but(**_NOT_AS_GIVEN)),
    ("nemotron", "Nemotron", _GQA, stream(_1P, up=["up_proj"])),
    ("openpangu", "OpenPangu", _GQA, _PANGU, "EmbeddedAttention DecoderLayer Model"),
    ("opt", "OPT", _OPT_HEADS, _OPT, "Attention DecoderLayer Decoder", ("layers", "final_layer_norm")),
    ("orion", "Orion", _GQA, stream(like=_TORCHS)),
    ("phimoe", "PhiMoE", _GQA, stream(like=_TORCHS, mlp="block_sparse_moe")),
    ("solar", "Solar", _GQA, stream()),
    ("stablelm", "", _STABLELM_GQA, stream(like=_TORCHS), "StablelmAttention StablelmDecoderLayer StableLMEpochModel"),
    ("step1", "Step", _GQA.but(softmax_scale="scale"), stream(), "Attention DecoderLayer DecoderModel"),
)
"""As `vocabulary_streams.classes_of` takes them."""

_PLAIN = mlp_of(plain_mlp("up_proj", "down_proj", "act_fn"), "down_proj")
_GATED = (
    "bailing_moe:BailingMLP commandr:CohereMLP cohere2_moe:Cohere2MoeMLP exaone4:Exaone4GatedMLP hy_v3:HYV3FeedForward minicpm:MiniCPMMLP"
    " mimo_v2:MiMoV2MLP openpangu:OpenPanguMLP orion:OrionMLP solar:SolarMLP stablelm:StablelmMLP step1:StepMLP"
)
_MLPS: dict[str, Facts | tuple[Facts, ...]] = {
    **dict.fromkeys(_GATED.split(), VLLM_MLP),
    "apertus:ApertusMLP": _PLAIN,
    "exaone:ExaoneGatedMLP": mlp_of(VLLM_MLP, "c_proj"),
    "granitemoeshared:GraniteMoeSharedMLP": mlp_of(VLLM_MLP, "output_linear"),
    "falcon:FalconMLP": mlp_of(plain_mlp("dense_h_to_4h", "dense_4h_to_h", "act"), "dense_4h_to_h"),
    "gpt_j:GPTJMLP": mlp_of(plain_mlp("fc_in", "fc_out", "act"), "fc_out"),
    "gpt2:GPT2MLP": mlp_of(plain_mlp("c_fc", "c_proj", "act"), "c_proj"),
    "internlm2:InternLM2MLP": mlp_of(VLLM_MLP, "w2"),
    "laguna:LagunaMLP": VLLM_MLP.but(activation=const("silu"), swiglu_limit=const(None)),
    "nemotron:NemotronMLP": _PLAIN,
    "opt:OPTDecoderLayer": (_OPT, mlp_of(plain_mlp("fc1", "fc2", "activation_fn"), "fc2")),
}

VLLM_DECODERS = Adapter(
    "vllm_decoders",
    layers={
        **{f"{FILES}.{place}": facts for place, facts in {**streams.classes(_MODELS), **_MLPS}.items()},
        f"{FILES}.deepseek_v2:DeepseekAttention": _GQA,
    },
)
