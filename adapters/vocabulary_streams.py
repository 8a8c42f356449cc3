"""How each engine names the parts of a decoder layer: its norms, its index, and where its attention says the sharding.

The model around the decoder layers holds one more norm, of the same class.
"""

from __future__ import annotations

from .base import PARALLEL_WORDS, Facts
from .sources import below, const, norm
from .specs import FinalNormSpec, ResidualSpec

TRANSFORMERS_RESIDUAL = Facts(
    ResidualSpec,
    {
        "hidden_size": "hidden_size",
        "layer_index": "self_attn.layer_idx",
        "input_norms": [norm("input_layernorm", epsilon="variance_epsilon")],
        "post_attention_norms": [norm("post_attention_layernorm", epsilon="variance_epsilon")],
        "tp_weight": "self_attn.o_proj.in_features",
    },
)
VLLM_RESIDUAL = TRANSFORMERS_RESIDUAL.but(
    layer_index="layer_idx", tp_weight=None, tp_size="self_attn.o_proj.tp_size", tp_rank="self_attn.o_proj.tp_rank"
)
SGLANG_RESIDUAL = TRANSFORMERS_RESIDUAL.but(
    layer_index="layer_id",
    tp_weight=None,
    # MLA, then Kimi's delta attention: no module here holds the size itself.
    tp_size=["self_attn.num_heads / self_attn.num_local_heads", "self_attn.num_heads / self_attn.local_num_heads"],
    tp_rank="self_attn.o_proj.tp_group.rank_in_group",
)
ATOM_RESIDUAL = VLLM_RESIDUAL.but(
    layer_index="self_attn.layer_num",
    input_norms=[norm("input_layernorm", epsilon="eps")],
    post_attention_norms=[norm("post_attention_layernorm", epsilon="eps")],
)


def zero_centred(facts: Facts, epsilon: str) -> Facts:
    """The same decoder layer with norms that add 1 to their weight (Gemma's way, which Qwen3-Next follows)."""
    return facts.but(
        input_norms=[norm("input_layernorm", epsilon=epsilon, weight_offset=const(1.0))],
        post_attention_norms=[norm("post_attention_layernorm", epsilon=epsilon, weight_offset=const(1.0))],
    )


def final_norm(decoder: Facts) -> Facts:
    """The class that holds these decoder layers as `layers`, and after them a norm of the same kind as `norm`."""
    (like,) = decoder.words["input_norms"]
    said = ("hidden_size", *PARALLEL_WORDS)
    return Facts(
        FinalNormSpec,
        {name: below("layers.-1", decoder.words[name]) for name in said if name in decoder.words}
        | {"layer_index": {"path": "layers", "as": "length"}, "final_norm": {**like, "module": "norm"}},
    )
