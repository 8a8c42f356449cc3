"""BERT and what was made of it: as decoders they are causal language models. All are transformers'."""

from __future__ import annotations

from collections.abc import Sequence

from . import vocabulary_streams as streams
from .base import Facts
from .layer_norm_parts import attention, plain_mlp
from .sources import norm
from .specs import ResidualSpec

_BERT_ATTENTION = attention(
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
            norm("attention.output.LayerNorm", consumers=["intermediate.dense"], producers=["attention.output.dense"]),
            norm("output.LayerNorm", producers=["output.dense"]),
        ],
        "unless": "crossattention",
    },
)


def _bert_pre(before: str, after: str) -> Facts:
    first = [f"attention.self.{each}" for each in ("query", "key", "value")]
    return _BERT_POST.but(
        post_norms=None,
        input_norms=[norm(before, consumers=first)],
        post_attention_norms=[norm(after, consumers=["intermediate.dense"], producers=["attention.output.dense"])],
    )


_POST = "Bert BertGeneration Camembert Data2VecText Electra Ernie Git RemBert RoCBert RoFormer Roberta XLMRoberta"
_BERTS = {
    **dict.fromkeys(_POST.split(), _BERT_POST),
    "MegatronBert": _bert_pre("attention.ln", "ln"),
    "RobertaPreLayerNorm": _bert_pre("attention.LayerNorm", "intermediate.LayerNorm"),
    "XLMRobertaXL": _bert_pre("attention.self_attn_layer_norm", "LayerNorm"),
}
_BERT_FINALS = {
    "MegatronBertEncoder": ("MegatronBert", "layer", "ln"),
    "RobertaPreLayerNormModel": ("RobertaPreLayerNorm", "encoder.layer", "LayerNorm"),
    "XLMRobertaXLEncoder": ("XLMRobertaXL", "layer", "LayerNorm"),
}

BERT_LAYERS: dict[str, Facts | Sequence[Facts]] = {
    **{f"transformers:{name}SelfAttention": _BERT_ATTENTION for name in _BERTS},
    **{f"transformers:{name}Layer": (facts, _BERT_MLP) for name, facts in _BERTS.items()},
    **{f"transformers:{name}": streams.final_norm(_BERTS[of], *at) for name, (of, *at) in _BERT_FINALS.items()},
}
"""By class."""
