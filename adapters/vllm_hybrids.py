"""vLLM's models that mix tokens with something else than attention, by the file; what each `forward` does was read in vLLM 0.33."""

from __future__ import annotations

from typing import Any

from . import vocabulary as words
from . import vocabulary_streams as streams
from .base import Adapter, Facts
from .hybrids import GATE, MULTIPLIERS, NOT_AS_GIVEN, TRANSFORMERS_MAMBA2, Engine, other, stream_of
from .layer_norm_parts import plain_mlp
from .sources import gated_norm, norm
from .vllm_decoders import FILES, mlp_of
from .vocabulary_mlps import VLLM_MLP

_VLLM = Engine("output_size", {"tp_size": "tp_size", "tp_rank": "tp_rank"}, {"path": "prefix", "as": "name_index"})

VLLM_MAMBA2 = TRANSFORMERS_MAMBA2.but(
    # With fewer groups than ranks its own n_groups counts copies; the norm keeps the model's.
    num_groups="norm.n_groups",
    hidden_size="out_proj.output_size",
    # Falcon-H1's says another layer's in its prefix, so that a name which the caller gives comes first.
    layer_index=[{"name_as": "name_index"}, {"path": "prefix", "as": "name_index"}],
    output_norm=gated_norm(
        "norm",
        width="full_hidden_size",
        epsilon="variance_epsilon",
        group_size="group_size",
        where="use_rms_norm",
        **GATE,
    ),
    tp_weight=None,
    tp_size="tp_size",
    tp_rank="out_proj.tp_rank",
)


_LAYERS = "vllm.model_executor.layers.mamba"
_EPSILON: dict[str, Any] = {"epsilon": "variance_epsilon"}
_NORM = norm("norm", **_EPSILON)
_QKV = (("qkv_proj",), "o_proj")
_IN_OUT = (("in_proj",), "out_proj")
_OF_ATTENTION = {"path": "self_attn.attn.layer_name", "as": "name_index"}
_OF_MAMBA = {"path": "mamba.prefix", "as": "name_index"}


def _norms(*names: str) -> list[Any]:
    return [norm(each, **_EPSILON) for each in names]


_GRANITE = stream_of(
    _VLLM,
    {"mamba": _IN_OUT, "self_attn": _QKV},
    _norms("input_layernorm", "post_attention_layernorm"),
    ["shared_mlp.input_linear"],
    ["shared_mlp.output_linear"],
    ["block_sparse_moe"],
    layer_index=[_OF_MAMBA, _OF_ATTENTION],
    **NOT_AS_GIVEN,
)
_JAMBA = stream_of(
    _VLLM,
    # The attention's decoder layer is its own attention.
    {"mamba": _IN_OUT},
    _norms("input_layernorm", "pre_ff_layernorm"),
    ["feed_forward.gate_up_proj"],
    ["feed_forward.down_proj"],
    ["feed_forward"],
)
_JAMBA_ATTENTION = _JAMBA.but(
    hidden_size="o_proj.output_size",
    layer_index={"path": "attn.layer_name", "as": "name_index"},
    tp_size="o_proj.tp_size",
    tp_rank="o_proj.tp_rank",
    input_norms=[norm("input_layernorm", **_EPSILON, consumers=["qkv_proj"])],
    post_attention_norms=[{**_JAMBA.words["post_attention_norms"][0], "producers": ["o_proj"]}],
)
_JAMBA_EITHER = _JAMBA.but(
    **{name: [*_JAMBA.words[name], _JAMBA_ATTENTION.words[name]] for name in ("hidden_size", "tp_size", "tp_rank")}
)
_FALCON_H1 = stream_of(
    _VLLM,
    {"self_attn": _QKV, "mamba.mamba": _IN_OUT},
    _norms("input_layernorm", "pre_ff_layernorm"),
    ["feed_forward.gate_up_proj"],
    ["feed_forward.down_proj"],
    layer_index=_OF_ATTENTION,
    **NOT_AS_GIVEN,
).but(input_norms=_norms("input_layernorm"))  # a factor stands between it and what reads it
_LFM2 = stream_of(
    _VLLM,
    {"self_attn": (("qkv_proj",), "out_proj"), "short_conv": _IN_OUT},
    _norms("operator_norm", "ffn_norm"),
    ["feed_forward.w13"],
    ["feed_forward.w2"],
    ["feed_forward"],
    layer_index="layer_idx",
)
_ONE_BLOCK = stream_of(_VLLM, {"mixer": _IN_OUT}, [_NORM])
_NEMOTRON_ATTENTION = stream_of(
    _VLLM, {"mixer": _QKV}, [_NORM], layer_index={"path": "mixer.attn.layer_name", "as": "name_index"}
)
_NEMOTRON_MLP = stream_of(
    _VLLM,
    {"mixer": (("up_proj",), "down_proj")},
    [_NORM],
    layer_index={"path": "mixer.down_proj.prefix", "as": "name_index"},
)
_NEMOTRON_MOE = _NEMOTRON_MLP.but(
    hidden_size="norm.hidden_size",
    layer_index={"name_as": "name_index"},
    tp_size="mixer.tp_size",
    tp_rank=None,
    mixture=["mixer"],
)
_NEMOTRON_EITHER = _ONE_BLOCK.but(
    hidden_size="norm.hidden_size",
    **{
        word: [f"mixer.{last}.{word}" for last in ("out_proj", "o_proj", "down_proj")] + more
        for word, more in (("tp_size", ["mixer.tp_size"]), ("tp_rank", []))
    },
)

_CLASSES: dict[str, Facts | tuple[Facts, ...]] = {
    "falcon_h1:FalconH1AttentionDecoderLayer": words.VLLM_GQA,
    "falcon_h1:FalconH1MLP": VLLM_MLP.but(**MULTIPLIERS),
    "falcon_h1:FalconH1ParallelHybrid": _FALCON_H1,
    "falcon_h1:FalconH1Model": streams.final_norm(_FALCON_H1, module="final_layernorm"),
    "granitemoehybrid:GraniteMoeHybridAttention": words.VLLM_GQA.but(
        num_local_kv_heads="num_key_value_heads", softmax_scale="attention_multiplier"
    ),
    "granitemoehybrid:GraniteMoeHybridAttentionDecoderLayer": _GRANITE,
    "granitemoehybrid:GraniteMoeHybridMambaDecoderLayer": _GRANITE,
    "granitemoehybrid:GraniteMoeHybridModel": streams.final_norm(_GRANITE),
    "jamba:JambaAttentionDecoderLayer": (words.VLLM_GQA, _JAMBA_ATTENTION),
    "jamba:JambaMambaDecoderLayer": _JAMBA,
    "jamba:JambaModel": streams.final_norm(_JAMBA_EITHER, module="final_layernorm"),
    "lfm2:Lfm2Attention": words.VLLM_GQA.but(tp_rank="out_proj.tp_rank"),
    "lfm2:Lfm2AttentionDecoderLayer": _LFM2,
    "lfm2:Lfm2MLP": mlp_of(VLLM_MLP, "w2"),
    "lfm2:Lfm2Model": streams.final_norm(_LFM2, module="embedding_norm"),
    "lfm2:Lfm2ShortConvDecoderLayer": _LFM2,
    "mamba:MambaDecoderLayer": _ONE_BLOCK,
    "mamba:MambaModel": streams.final_norm(_ONE_BLOCK, module="norm_f"),
    "mamba2:Mamba2DecoderLayer": _ONE_BLOCK,
    "mamba2:Mamba2Model": streams.final_norm(_ONE_BLOCK, module="norm_f"),
    "nemotron_h:NemotronHAttention": words.VLLM_GQA,
    "nemotron_h:NemotronHAttentionDecoderLayer": _NEMOTRON_ATTENTION,
    "nemotron_h:NemotronHMLP": mlp_of(plain_mlp("up_proj", "down_proj", "act_fn"), "down_proj"),
    "nemotron_h:NemotronHMLPDecoderLayer": _NEMOTRON_MLP,
    "nemotron_h:NemotronHMambaDecoderLayer": _ONE_BLOCK,
    "nemotron_h:NemotronHMoEDecoderLayer": _NEMOTRON_MOE,
    "nemotron_h:NemotronHModel": streams.final_norm(_NEMOTRON_EITHER, module="norm_f"),
}

VLLM_HYBRIDS = Adapter(
    "vllm_hybrids",
    layers={
        f"{_LAYERS}.mamba_mixer:MambaMixer": other(_VLLM, "mamba"),
        f"{_LAYERS}.mamba_mixer2:MambaMixer2": VLLM_MAMBA2,
        f"{_LAYERS}.short_conv:ShortConv": other(_VLLM, "short convolution"),
        **{f"{FILES}.{place}": facts for place, facts in _CLASSES.items()},
    },
)
