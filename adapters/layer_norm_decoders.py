"""Decoders from before RMSNorm and gates: LayerNorms, plain MLPs, attention and MLP side by side or norms behind the adds.

Each came with names of its own, so the classes are listed here by what their parts are called. All are transformers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import vocabulary_streams as streams
from .base import Adapter, Facts
from .bert_layers import BERT_LAYERS
from .layer_norm_parts import ATTENTIONS, C_FC_CONV1D, FC, MLPS, NAME_INDEX, OPENAI_ATTENTION, plain_mlp
from .sources import const, layer_norm, norm
from .specs import ResidualSpec
from .vocabulary_mlps import TRANSFORMERS_MLP

_FIRST = {
    "qkv": ["q_proj", "k_proj", "v_proj"],
    "merged": ["query_key_value"],
    "c_attn": ["c_attn"],
}
_4H_UP = "mlp.dense_h_to_4h"
_USUAL = ("input_layernorm", "post_attention_layernorm")
_COHERE = tuple(layer_norm(name, epsilon="variance_epsilon") for name in _USUAL)
_NEMOTRON = tuple(layer_norm(name, epsilon="eps", weight_offset=const(1.0), has_bias=const(True)) for name in _USUAL)
_CPMANT = tuple(
    norm(name, epsilon="eps") for name in ("self_att.layernorm_before_attention", "ffn.layernorm_before_ffn")
)
_OLMO = tuple(
    layer_norm(name, width="normalized_shape.0", epsilon=const(1e-5), has_weight=const(False)) for name in _USUAL
)
_AT_ONCE = {"parallel_residual": const(True)}
"""Attention and MLP read one norm, and what both give is added at once."""


def _layer(attention: str, out: str, first: list[str], norms: Sequence[Any], up: Sequence[str], **words: Any) -> Facts:
    """A decoder layer by the paths of its attention, of that one's last and first linears, of its norms, of its MLP's first linears."""
    out = f"{attention}.{out}"
    before, *after = [norm(each) if isinstance(each, str) else each for each in norms]
    read = [f"{attention}.{each}" for each in first]
    return Facts(
        ResidualSpec,
        {
            "hidden_size": f"{out}.out_features",
            "layer_index": f"{attention}.layer_idx",
            "tp_weight": f"{out}.in_features",
            "input_norms": [{**before, "consumers": read if after else [*read, *up]}],
            "post_attention_norms": [{**each, "consumers": list(up), "producers": [out]} for each in after],
            **words,
        },
    )


def _llama(up: Sequence[str], norms: Sequence[Any] = _USUAL, **words: Any) -> Facts:
    return _layer("self_attn", "o_proj", _FIRST["qkv"], norms, up, **words)


_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_FC1_OF_LAYER = _layer("self_attn", "out_proj", _FIRST["qkv"], ("self_attn_layer_norm", "final_layer_norm"), ["fc1"])
_GPT2 = _layer("attn", "c_proj", _FIRST["c_attn"], ("ln_1", "ln_2"), ["mlp.c_fc"], unless="crossattention")
_NEOX = _layer("attention", "dense", _FIRST["merged"], _USUAL, [_4H_UP])

_FALCON = _layer(
    *("self_attention", "dense", _FIRST["merged"], _USUAL, [_4H_UP]),
    parallel_residual="config.parallel_attn",
    # Of the larger ones, whose two norms have other names.
    unless="ln_attn",
)
_BLOOM = _layer(
    *("self_attention", "dense", _FIRST["merged"], _USUAL, [_4H_UP]),
    unless="apply_residual_connection_post_layernorm",
)
_GPT_NEO = _layer(
    *("attn.attention", "out_proj", _FIRST["qkv"], ("ln_1", "ln_2"), ["mlp.c_fc"]),
    layer_index="attn.attention.layer_id",
)
_COHERE_LAYER = _llama(_GATE_UP, _COHERE[:1], **_AT_ONCE)
_LAYERS: dict[str, tuple[str, Facts, str, str]] = {
    "BioGpt": ("DecoderLayer", _FC1_OF_LAYER, "layers", "layer_norm"),
    "Bloom": ("Block", _BLOOM, "h", "ln_f"),
    "CodeGen": ("Block", _layer("attn", "out_proj", ["qkv_proj"], ["ln_1"], ["mlp.fc_in"], **_AT_ONCE), "h", "ln_f"),
    "Cohere": ("DecoderLayer", _COHERE_LAYER, "layers", "norm"),
    "Cohere2": ("DecoderLayer", _COHERE_LAYER, "layers", "norm"),
    # With RMSNorms where the config says their epsilon.
    "Cohere2Moe": ("DecoderLayer", _COHERE_LAYER.but(unless="self_attn.config.rms_norm_eps"), "layers", "norm"),
    "Falcon": ("DecoderLayer", _FALCON, "h", "ln_f"),
    "GPT2": ("Block", _GPT2.but(hidden_size="attn.embed_dim", tp_weight="attn.c_proj"), "h", "ln_f"),
    "GPTBigCode": ("Block", _GPT2, "h", "ln_f"),
    "GPTJ": ("Block", _layer("attn", "out_proj", _FIRST["qkv"], ["ln_1"], ["mlp.fc_in"], **_AT_ONCE), "h", "ln_f"),
    "GPTNeo": ("Block", _GPT_NEO, "h", "ln_f"),
    "GPTNeoX": ("Layer", _NEOX.but(parallel_residual="use_parallel_residual"), "layers", "final_layer_norm"),
    # The last one's attention has a bias beside it, which is added too.
    "GPTNeoXJapanese": ("Layer", _NEOX.but(added_as_given=const(False)), "layers", "final_layer_norm"),
    "Jais2": ("DecoderLayer", _llama(["mlp.up_proj"]), "layers", "norm"),
    "Mpt": ("Block", _layer("attn", "out_proj", ["Wqkv"], ("norm_1", "norm_2"), ["ffn.up_proj"]), "blocks", "norm_f"),
    "Nemotron": ("DecoderLayer", _llama(["mlp.up_proj"], _NEMOTRON), "layers", "norm"),
    "Olmo": ("DecoderLayer", _llama(_GATE_UP, _OLMO), "layers", "norm"),
    "Persimmon": (
        "DecoderLayer",
        _layer("self_attn", "dense", _FIRST["merged"], _USUAL, [_4H_UP]),
        "layers",
        "final_layernorm",
    ),
    "Phi": (
        "DecoderLayer",
        _layer("self_attn", "dense", _FIRST["qkv"], _USUAL[:1], ["mlp.fc1"], **_AT_ONCE),
        "layers",
        "final_layernorm",
    ),
    "Phimoe": ("DecoderLayer", _llama([]), "layers", "norm"),
    "StableLm": ("DecoderLayer", _llama(_GATE_UP, parallel_residual="use_parallel_residual"), "layers", "norm"),
    "Starcoder2": ("DecoderLayer", _llama(["mlp.c_fc"]), "layers", "norm"),
    "XGLM": ("DecoderLayer", _FC1_OF_LAYER.but(unless="encoder_attn"), "layers", "layer_norm"),
}
"""What a model's class names begin with -> the end of its decoder layer's, the facts of that, and where the model holds its layers and its final norm."""

_CTRL_LAYER = _layer("multi_head_attention", "dense", ["Wq", "Wk", "Wv"], ("layernorm1", "layernorm2"), ["ffn.0"])
_CPMANT_LAYER = _layer(
    *("self_att.self_attention", "attention_out", ["project_q", "project_k", "project_v"], _CPMANT),
    ["ffn.ffn.w_in.w_0", "ffn.ffn.w_in.w_1"],
)
_OPT_LAYER = _FC1_OF_LAYER.but(unless={"path": "do_layer_norm_before", "as": "not"})
_OWN_MLPS = ("BioGpt", "XGLM")
"""Whose decoder layers are their MLPs too."""

# ---- all of them

_CTRL = "transformers.models.ctrl"
_OPENAI = "transformers.models.openai"
_OPENAI_LAYER = Facts(
    ResidualSpec,
    {
        "hidden_size": "attn.split_size",
        "layer_index": NAME_INDEX,
        "tp_weight": "attn.c_proj",
        "input_norms": [],
        "post_attention_norms": [],
        "post_norms": [
            norm("ln_1", consumers=["mlp.c_fc"], producers=["attn.c_proj"]),
            norm("ln_2", producers=["mlp.c_proj"]),
        ],
    },
)

LAYER_NORM_DECODERS = Adapter(
    "layer_norm_decoders",
    layers={
        # A class whose name others have too.
        **{
            f"{_CTRL if name == 'MultiHead' else 'transformers'}:{name}Attention": facts
            for name, facts in ATTENTIONS.items()
        },
        **{f"transformers:{name}MLP": facts for name, facts in MLPS.items()},
        **{
            f"transformers:{name}{end}": (facts, FC) if name in _OWN_MLPS else facts
            for name, (end, facts, *_) in _LAYERS.items()
        },
        **{f"transformers:{name}Model": streams.final_norm(facts, *at) for name, (_, facts, *at) in _LAYERS.items()},
        f"{_CTRL}:EncoderLayer": (_CTRL_LAYER, plain_mlp("ffn.0", "ffn.2", "ffn.1")),
        "transformers:CTRLModel": streams.final_norm(_CTRL_LAYER, "h", "layernorm"),
        "transformers:CpmAntTransformerBlock": _CPMANT_LAYER,
        "transformers:CpmAntEncoder": streams.final_norm(_CPMANT_LAYER, "layers", "output_layernorm"),
        "transformers:MusicgenMelodyDecoderLayer": (_FC1_OF_LAYER, FC),
        "transformers:MusicgenMelodyDecoder": streams.final_norm(_FC1_OF_LAYER, "layers", "layer_norm"),
        "transformers:OPTDecoderLayer": (_OPT_LAYER, FC),
        "transformers:OPTDecoder": streams.final_norm(_OPT_LAYER, "layers", "final_layer_norm"),
        **BERT_LAYERS,
        "transformers:CpmAntFeedForward": TRANSFORMERS_MLP.but(
            hidden_size="w_out.out_features",
            intermediate_size="w_out.in_features",
            activation="w_in.act",
            quant="w_out",
            tp_weight="w_out.in_features",
        ),
        f"{_OPENAI}:Attention": OPENAI_ATTENTION,
        f"{_OPENAI}:MLP": C_FC_CONV1D,
        f"{_OPENAI}:Block": _OPENAI_LAYER,
    },
)
