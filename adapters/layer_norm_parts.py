"""Attention and MLPs of decoders from before RMSNorm and gates, by what their linears are called. All are transformers'."""

from __future__ import annotations

from typing import Any

from .base import Facts
from .sources import const
from .specs import GQASpec, MLPSpec
from .vocabulary import TRANSFORMERS_GQA
from .vocabulary_mlps import TRANSFORMERS_MLP

# ---- attention


def attention(heads: str, out: str, **words: Any) -> Facts:
    """Attention that holds its count of heads, all of which have keys and values of their own unless `words` say otherwise."""
    return Facts(
        GQASpec,
        {
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": "head_dim",
            "v_head_dim": words.get("head_dim", "head_dim"),
            "softmax_scale": "scaling",
            "sliding_window": const(None),
            "has_sinks": const(False),
            "hidden_size": f"{out}.out_features",
            "layer_index": "layer_idx",
            "tp_weight": f"{out}.in_features",
            **words,
        },
    )


_OUT_PROJ = attention("num_heads", "out_proj")
_DENSE = attention("num_heads", "dense")
_SCALE = {"path": "head_dim", "as": "inverse_root"}
_CONV1D = {"hidden_size": "c_proj.nf", "tp_weight": "c_proj"}
_OF_CONFIG = TRANSFORMERS_GQA.but(tp_weight="dense.in_features")
_GPTJ = _OUT_PROJ.but(num_heads="num_attention_heads", num_kv_heads="num_attention_heads", softmax_scale=_SCALE)
_CROSS = {"unless": "is_cross_attention"}

ATTENTIONS = {
    "BioGpt": _OUT_PROJ,
    "Bloom": _DENSE.but(softmax_scale="inv_norm_factor"),
    "CodeGen": _GPTJ,
    "Cohere": TRANSFORMERS_GQA,
    "Cohere2": TRANSFORMERS_GQA.but(sliding_window="sliding_window"),
    "MultiHead": _DENSE,
    "Cohere2Moe": TRANSFORMERS_GQA.but(sliding_window="sliding_window"),
    "CpmAnt": attention(
        "num_heads", "attention_out", head_dim="dim_head", softmax_scale={"path": "dim_head", "as": "inverse_root"}
    ),
    "Falcon": _DENSE.but(num_kv_heads="num_kv_heads", softmax_scale="inv_norm_factor"),
    "GPT2": attention("num_heads", "c_proj", **_CONV1D, **_CROSS),
    "GPTBigCode": attention("num_heads", "c_proj", num_kv_heads="kv_heads", **_CROSS),
    "GPTNeoSelf": _OUT_PROJ.but(
        layer_index="layer_id",
        softmax_scale=const(1.0),
        sliding_window={"path": "config.window_size", "where": "attention_type", "is": "local"},
    ),
    "GPTNeoX": _OF_CONFIG.but(
        head_dim="head_size",
        v_head_dim="head_size",
        num_heads="config.num_attention_heads",
        num_kv_heads="config.num_attention_heads",
    ),
    "GPTNeoXJapanese": attention(
        "num_attention_heads", "dense", head_dim="head_size", softmax_scale={"path": "head_size", "as": "inverse_root"}
    ),
    "GPTJ": _GPTJ,
    "Jais2": TRANSFORMERS_GQA,
    "Mpt": attention("n_heads", "out_proj", softmax_scale="softmax_scale"),
    "MusicgenMelody": _OUT_PROJ,
    "Nemotron": TRANSFORMERS_GQA,
    "Olmo": TRANSFORMERS_GQA,
    "OPT": _OUT_PROJ,
    "Persimmon": _DENSE,
    "Phi": _OF_CONFIG,
    "Phimoe": TRANSFORMERS_GQA.but(sliding_window="config.sliding_window"),
    "StableLm": TRANSFORMERS_GQA,
    "Starcoder2": TRANSFORMERS_GQA.but(sliding_window="config.sliding_window"),
    "XGLM": _OUT_PROJ,
}

NAME_INDEX = {"name_as": "name_index"}
OPENAI_ATTENTION = attention(
    "n_head",
    "c_proj",
    **_CONV1D,
    head_dim="split_size / n_head",
    softmax_scale={"path": "split_size / n_head", "as": "inverse_root"},
    layer_index=NAME_INDEX,
    unless={"path": "scale", "as": "not"},
)

# ---- MLPs


def plain_mlp(up: str, down: str, activation: str, **words: Any) -> Facts:
    """A plain MLP by the names of its linears."""
    return Facts(
        MLPSpec,
        {
            "hidden_size": f"{down}.out_features",
            "layer_index": TRANSFORMERS_MLP.words["layer_index"],
            "intermediate_size": f"{down}.in_features",
            "activation": activation,
            "quant": down,
            "tp_weight": [f"{down}.in_features", f"{up}.out_features"],
            **words,
        },
    )


_4H = plain_mlp("dense_h_to_4h", "dense_4h_to_h", "act")
_UP_DOWN = plain_mlp("up_proj", "down_proj", "act_fn")
FC = plain_mlp("fc1", "fc2", "activation_fn")
_C_FC = plain_mlp("c_fc", "c_proj", "act")
_FC_IN = plain_mlp("fc_in", "fc_out", "act")
C_FC_CONV1D = _C_FC.but(hidden_size="c_proj.nf", intermediate_size="c_proj.nx", tp_weight="c_proj")

MLPS = {
    "Apertus": _UP_DOWN,
    "Arcee": _UP_DOWN,
    "Bloom": _4H.but(activation="gelu_impl"),
    "CodeGen": _FC_IN,
    "Cohere": TRANSFORMERS_MLP,
    "Cohere2": TRANSFORMERS_MLP,
    "Cohere2Moe": TRANSFORMERS_MLP,
    "Falcon": _4H,
    "GPT2": C_FC_CONV1D,
    "GPTBigCode": _C_FC,
    "GPTNeo": _C_FC,
    "GPTNeoX": _4H,
    "GPTNeoXJapanese": _4H,
    "GPTJ": _FC_IN,
    "Jais2": _UP_DOWN,
    "Mpt": plain_mlp("up_proj", "down_proj", "act"),
    "Nemotron": _UP_DOWN,
    "Olmo": TRANSFORMERS_MLP,
    "Persimmon": _4H,
    "Phi": FC,
    "StableLm": TRANSFORMERS_MLP,
    "Starcoder2": _C_FC,
}
