"""Decoders from before RMSNorm and gates: LayerNorms, plain MLPs, attention and MLP side by side or norms behind the adds.

Each came with names of its own, so the classes are listed here by what their parts are called. All are transformers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import vocabulary_streams as streams
from .base import Adapter, Facts
from .sources import const, layer_norm, norm
from .specs import GQASpec, MLPSpec, ResidualSpec
from .vocabulary import TRANSFORMERS_GQA
from .vocabulary_mlps import TRANSFORMERS_MLP

# ---- attention


def _attention(heads: str, out: str, **words: Any) -> Facts:
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


_OUT_PROJ = _attention("num_heads", "out_proj")
_DENSE = _attention("num_heads", "dense")
_SCALE = {"path": "head_dim", "as": "inverse_root"}
_CONV1D = {"hidden_size": "c_proj.nf", "tp_weight": "c_proj"}
_OF_CONFIG = TRANSFORMERS_GQA.but(tp_weight="dense.in_features")
_GPTJ = _OUT_PROJ.but(num_heads="num_attention_heads", num_kv_heads="num_attention_heads", softmax_scale=_SCALE)
_CROSS = {"unless": "is_cross_attention"}

_ATTENTIONS = {
    "BioGpt": _OUT_PROJ,
    "Bloom": _DENSE.but(softmax_scale="inv_norm_factor"),
    "CodeGen": _GPTJ,
    "Cohere": TRANSFORMERS_GQA,
    "Cohere2": TRANSFORMERS_GQA.but(sliding_window="sliding_window"),
    "MultiHead": _DENSE,
    "Cohere2Moe": TRANSFORMERS_GQA.but(sliding_window="sliding_window"),
    "CpmAnt": _attention(
        "num_heads", "attention_out", head_dim="dim_head", softmax_scale={"path": "dim_head", "as": "inverse_root"}
    ),
    "Falcon": _DENSE.but(num_kv_heads="num_kv_heads", softmax_scale="inv_norm_factor"),
    "GPT2": _attention("num_heads", "c_proj", **_CONV1D, **_CROSS),
    "GPTBigCode": _attention("num_heads", "c_proj", num_kv_heads="kv_heads", **_CROSS),
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
    "GPTNeoXJapanese": _attention(
        "num_attention_heads", "dense", head_dim="head_size", softmax_scale={"path": "head_size", "as": "inverse_root"}
    ),
    "GPTJ": _GPTJ,
    "Jais2": TRANSFORMERS_GQA,
    "Mpt": _attention("n_heads", "out_proj", softmax_scale="softmax_scale"),
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

_NAME_INDEX = {"name_as": "name_index"}
_OPENAI_ATTENTION = _attention(
    "n_head",
    "c_proj",
    **_CONV1D,
    head_dim="split_size / n_head",
    softmax_scale={"path": "split_size / n_head", "as": "inverse_root"},
    layer_index=_NAME_INDEX,
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
_FC = plain_mlp("fc1", "fc2", "activation_fn")
_C_FC = plain_mlp("c_fc", "c_proj", "act")
_FC_IN = plain_mlp("fc_in", "fc_out", "act")
_C_FC_CONV1D = _C_FC.but(hidden_size="c_proj.nf", intermediate_size="c_proj.nx", tp_weight="c_proj")

_MLPS = {
    "Apertus": _UP_DOWN,
    "Arcee": _UP_DOWN,
    "Bloom": _4H.but(activation="gelu_impl"),
    "CodeGen": _FC_IN,
    "Cohere": TRANSFORMERS_MLP,
    "Cohere2": TRANSFORMERS_MLP,
    "Cohere2Moe": TRANSFORMERS_MLP,
    "Falcon": _4H,
    "GPT2": _C_FC_CONV1D,
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
    "Phi": _FC,
    "StableLm": TRANSFORMERS_MLP,
    "Starcoder2": _C_FC,
}

# ---- decoder layers

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
            "input_norms": [{**before, "feeds": read if after else [*read, *up]}],
            "post_attention_norms": [{**each, "feeds": list(up), "fed_by": [out]} for each in after],
            **words,
        },
    )


def _llama(up: Sequence[str], norms: Sequence[Any] = _USUAL, **words: Any) -> Facts:
    return _layer("self_attn", "o_proj", _FIRST["qkv"], norms, up, **words)


_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_FC1_OF_LAYER = _layer("self_attn", "out_proj", _FIRST["qkv"], ("self_attn_layer_norm", "final_layer_norm"), ["fc1"])
_GPT2 = _layer("attn", "c_proj", _FIRST["c_attn"], ("ln_1", "ln_2"), ["mlp.c_fc"], unless="crossattention")
_NEOX = _layer("attention", "dense", _FIRST["merged"], _USUAL, [_4H_UP])

_LAYERS: dict[str, tuple[Facts, ...]] = {
    "BioGptDecoderLayer": (_FC1_OF_LAYER, _FC),
    "BloomBlock": (
        _layer(
            *("self_attention", "dense", _FIRST["merged"], _USUAL, [_4H_UP]),
            unless="apply_residual_connection_post_layernorm",
        ),
    ),
    "CodeGenBlock": (_layer("attn", "out_proj", ["qkv_proj"], ["ln_1"], ["mlp.fc_in"], **_AT_ONCE),),
    "CohereDecoderLayer": (_llama(_GATE_UP, _COHERE[:1], **_AT_ONCE),),
    "Cohere2DecoderLayer": (_llama(_GATE_UP, _COHERE[:1], **_AT_ONCE),),
    # With RMSNorms where the config says their epsilon.
    "Cohere2MoeDecoderLayer": (_llama(_GATE_UP, _COHERE[:1], **_AT_ONCE, unless="self_attn.config.rms_norm_eps"),),
    "CpmAntTransformerBlock": (
        _layer(
            *("self_att.self_attention", "attention_out", ["project_q", "project_k", "project_v"], _CPMANT),
            ["ffn.ffn.w_in.w_0", "ffn.ffn.w_in.w_1"],
        ),
    ),
    "EncoderLayer": (
        _layer("multi_head_attention", "dense", ["Wq", "Wk", "Wv"], ("layernorm1", "layernorm2"), ["ffn.0"]),
        plain_mlp("ffn.0", "ffn.2", "ffn.1"),
    ),
    "FalconDecoderLayer": (
        _layer(
            *("self_attention", "dense", _FIRST["merged"], _USUAL, [_4H_UP]),
            parallel_residual="config.parallel_attn",
            # Of the larger ones, whose two norms have other names.
            unless="ln_attn",
        ),
    ),
    "GPT2Block": (_GPT2.but(hidden_size="attn.embed_dim", tp_weight="attn.c_proj"),),
    "GPTBigCodeBlock": (_GPT2,),
    "GPTJBlock": (_layer("attn", "out_proj", _FIRST["qkv"], ["ln_1"], ["mlp.fc_in"], **_AT_ONCE),),
    "GPTNeoBlock": (
        _layer(
            *("attn.attention", "out_proj", _FIRST["qkv"], ("ln_1", "ln_2"), ["mlp.c_fc"]),
            layer_index="attn.attention.layer_id",
        ),
    ),
    "GPTNeoXLayer": (_NEOX.but(parallel_residual="use_parallel_residual"),),
    # The last one's attention has a bias beside it, which is added too.
    "GPTNeoXJapaneseLayer": (_NEOX.but(added_as_given=const(False)),),
    "Jais2DecoderLayer": (_llama(["mlp.up_proj"]),),
    "MptBlock": (_layer("attn", "out_proj", ["Wqkv"], ("norm_1", "norm_2"), ["ffn.up_proj"]),),
    "MusicgenMelodyDecoderLayer": (_FC1_OF_LAYER, _FC),
    "NemotronDecoderLayer": (_llama(["mlp.up_proj"], _NEMOTRON),),
    "OlmoDecoderLayer": (_llama(_GATE_UP, _OLMO),),
    "OPTDecoderLayer": (_FC1_OF_LAYER.but(unless={"path": "do_layer_norm_before", "as": "not"}), _FC),
    "PersimmonDecoderLayer": (_layer("self_attn", "dense", _FIRST["merged"], _USUAL, [_4H_UP]),),
    "PhiDecoderLayer": (_layer("self_attn", "dense", _FIRST["qkv"], _USUAL[:1], ["mlp.fc1"], **_AT_ONCE),),
    "PhimoeDecoderLayer": (_llama([]),),
    "StableLmDecoderLayer": (_llama(_GATE_UP, parallel_residual="use_parallel_residual"),),
    "Starcoder2DecoderLayer": (_llama(["mlp.c_fc"]),),
    "XGLMDecoderLayer": (_FC1_OF_LAYER.but(unless="encoder_attn"), _FC),
}

_MODELS = {
    "BioGpt": ("BioGptDecoderLayer", "layers", "layer_norm"),
    "Bloom": ("BloomBlock", "h", "ln_f"),
    "CTRL": ("EncoderLayer", "h", "layernorm"),
    "CodeGen": ("CodeGenBlock", "h", "ln_f"),
    "Cohere": ("CohereDecoderLayer", "layers", "norm"),
    "Cohere2": ("Cohere2DecoderLayer", "layers", "norm"),
    "Cohere2Moe": ("Cohere2MoeDecoderLayer", "layers", "norm"),
    "Falcon": ("FalconDecoderLayer", "h", "ln_f"),
    "GPT2": ("GPT2Block", "h", "ln_f"),
    "GPTBigCode": ("GPTBigCodeBlock", "h", "ln_f"),
    "GPTJ": ("GPTJBlock", "h", "ln_f"),
    "GPTNeo": ("GPTNeoBlock", "h", "ln_f"),
    "GPTNeoX": ("GPTNeoXLayer", "layers", "final_layer_norm"),
    "GPTNeoXJapanese": ("GPTNeoXJapaneseLayer", "layers", "final_layer_norm"),
    "Jais2": ("Jais2DecoderLayer", "layers", "norm"),
    "Mpt": ("MptBlock", "blocks", "norm_f"),
    "Nemotron": ("NemotronDecoderLayer", "layers", "norm"),
    "Olmo": ("OlmoDecoderLayer", "layers", "norm"),
    "Persimmon": ("PersimmonDecoderLayer", "layers", "final_layernorm"),
    "Phi": ("PhiDecoderLayer", "layers", "final_layernorm"),
    "Phimoe": ("PhimoeDecoderLayer", "layers", "norm"),
    "StableLm": ("StableLmDecoderLayer", "layers", "norm"),
    "Starcoder2": ("Starcoder2DecoderLayer", "layers", "norm"),
    "XGLM": ("XGLMDecoderLayer", "layers", "layer_norm"),
}

# ---- BERT and what was made of it: as decoders they are causal language models

_BERT_ATTENTION = _attention(
    "num_attention_heads",
    "query",
    head_dim="attention_head_size",
    softmax_scale=["scaling", {"path": "attention_head_size", "as": "inverse_root"}],
    hidden_size="query.in_features",
    tp_weight="query.out_features",
)
_BERT_MLP = plain_mlp("intermediate.dense", "output.dense", "intermediate.intermediate_act_fn")
_BERT_POST = Facts(
    ResidualSpec,
    {
        "hidden_size": "output.dense.out_features",
        "layer_index": "attention.self.layer_idx",
        "tp_weight": "attention.output.dense.in_features",
        "input_norms": [],
        "post_attention_norms": [],
        "post_norms": [
            norm("attention.output.LayerNorm", feeds=["intermediate.dense"], fed_by=["attention.output.dense"]),
            norm("output.LayerNorm", fed_by=["output.dense"]),
        ],
        "unless": "crossattention",
    },
)


def _bert_pre(before: str, after: str) -> Facts:
    first = [f"attention.self.{each}" for each in ("query", "key", "value")]
    return _BERT_POST.but(
        post_norms=None,
        input_norms=[norm(before, feeds=first)],
        post_attention_norms=[norm(after, feeds=["intermediate.dense"], fed_by=["attention.output.dense"])],
    )


_BERTS = {
    **dict.fromkeys(
        [
            "Bert",
            "BertGeneration",
            "Camembert",
            "Data2VecText",
            "Electra",
            "Ernie",
            "Git",
            "RemBert",
            "RoCBert",
            "RoFormer",
            "Roberta",
            "XLMRoberta",
        ],
        _BERT_POST,
    ),
    "MegatronBert": _bert_pre("attention.ln", "ln"),
    "RobertaPreLayerNorm": _bert_pre("attention.LayerNorm", "intermediate.LayerNorm"),
    "XLMRobertaXL": _bert_pre("attention.self_attn_layer_norm", "LayerNorm"),
}
_BERT_FINALS = {
    "MegatronBertEncoder": ("MegatronBert", "layer", "ln"),
    "RobertaPreLayerNormModel": ("RobertaPreLayerNorm", "encoder.layer", "LayerNorm"),
    "XLMRobertaXLEncoder": ("XLMRobertaXL", "layer", "LayerNorm"),
}

# ---- all of them

_CTRL = "transformers.models.ctrl"
_OPENAI = "transformers.models.openai"
_SHARED_NAMES = {"EncoderLayer": _CTRL, "MultiHeadAttention": _CTRL}
"""Classes whose names others have too."""


def _key(name: str) -> str:
    return f"{_SHARED_NAMES.get(name, 'transformers')}:{name}"


_OPENAI_LAYER = Facts(
    ResidualSpec,
    {
        "hidden_size": "attn.split_size",
        "layer_index": _NAME_INDEX,
        "tp_weight": "attn.c_proj",
        "input_norms": [],
        "post_attention_norms": [],
        "post_norms": [
            norm("ln_1", feeds=["mlp.c_fc"], fed_by=["attn.c_proj"]),
            norm("ln_2", fed_by=["mlp.c_proj"]),
        ],
    },
)

LAYER_NORM_DECODERS = Adapter(
    "layer_norm_decoders",
    layers={
        **{_key(f"{name}Attention"): facts for name, facts in _ATTENTIONS.items()},
        **{_key(f"{name}MLP"): facts for name, facts in _MLPS.items()},
        **{_key(name): facts for name, facts in _LAYERS.items()},
        **{f"transformers:{name}Model": streams.final_norm(_LAYERS[of][0], *at) for name, (of, *at) in _MODELS.items()},
        "transformers:MusicgenMelodyDecoder": streams.final_norm(_FC1_OF_LAYER, "layers", "layer_norm"),
        "transformers:OPTDecoder": streams.final_norm(_LAYERS["OPTDecoderLayer"][0], "layers", "final_layer_norm"),
        **{f"transformers:{name}SelfAttention": _BERT_ATTENTION for name in _BERTS},
        **{f"transformers:{name}Layer": (facts, _BERT_MLP) for name, facts in _BERTS.items()},
        **{f"transformers:{name}": streams.final_norm(_BERTS[of], *at) for name, (of, *at) in _BERT_FINALS.items()},
        "transformers:CpmAntFeedForward": TRANSFORMERS_MLP.but(
            hidden_size="w_out.out_features",
            intermediate_size="w_out.in_features",
            activation="w_in.act",
            quant="w_out",
            tp_weight="w_out.in_features",
        ),
        "transformers:CpmAntEncoder": streams.final_norm(
            _LAYERS["CpmAntTransformerBlock"][0], "layers", "output_layernorm"
        ),
        f"{_OPENAI}:Attention": _OPENAI_ATTENTION,
        f"{_OPENAI}:MLP": _C_FC_CONV1D,
        f"{_OPENAI}:Block": _OPENAI_LAYER,
    },
)
