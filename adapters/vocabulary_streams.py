"""How each engine names the parts of a decoder layer: its norms, the linears that read them, its index, its sharding.

The model around the decoder layers holds one more norm, of the same class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .base import LAYER_WORDS, Facts
from .sources import below, const, norm
from .specs import FinalNormSpec, ResidualSpec


def _of(parent: str, *names: str) -> list[str]:
    return [f"{parent}.{name}" for name in names]


TRANSFORMERS_FIRST_PROJECTIONS = [
    *_of("self_attn", "q_a_proj", "kv_a_proj_with_mqa", "q_proj", "k_proj", "v_proj", "qkv_proj"),
    *_of("linear_attn", "in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
]
VLLM_FIRST_PROJECTIONS = [
    *_of("self_attn", "fused_qkv_a_proj", "fused_qkv_a_g_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_proj"),
    *_of("self_attn", "qkv_proj", "in_proj_qkvgfab"),
    "linear_attn.in_proj_qkvz",
]
SGLANG_FIRST_PROJECTIONS = [
    *_of("self_attn", "fused_qkv_a_proj_with_mqa", "q_a_proj", "kv_a_proj_with_mqa", "q_proj", "qkv_proj"),
    *_of("self_attn", "fused_qkvbfg_a_proj", "fused_qkvbfg_proj", "fused_qkvg_proj"),
    "linear_attn.in_proj_qkvz",
    "qkv_proj",
]
ATOM_FIRST_PROJECTIONS = [
    *_of("self_attn", "fused_qkv_a_proj", "kv_a_proj_with_mqa", "q_proj", "qkv_proj", "in_proj"),
    *_of("linear_attn", "in_proj_qkvz", "in_proj_qkvzba"),
]
"""What reads the norm before the attention, MLA, delta net or softmax. The small projections of gates are left out: many
checkpoints keep them unquantised, and they read the norm's result as it is."""

OUTPUT_PROJECTIONS = ["self_attn.o_proj", "linear_attn.out_proj", "linear_attn.o_proj", "attn.o_proj", "o_proj"]
"""What gives the attention's result, which joins the stream in front of the norm after it. A decoder layer that is its own attention holds it itself."""

SPLIT_MLP = [
    *_of("mlp", "gate_proj", "up_proj"),
    *_of("mlp.shared_experts", "gate_proj", "up_proj"),
    *_of("mlp.shared_expert", "gate_proj", "up_proj"),
]
MERGED_MLP = ["mlp.gate_up_proj", "mlp.shared_experts.gate_up_proj", "mlp.shared_expert.gate_up_proj"]
"""What reads the norm after the attention, beside the router and the routed experts of a mixture."""


def norms(epsilon: str, attention: list[str], mlp: list[str], **words: Any) -> dict[str, Any]:
    """The words of a decoder layer's two norms, and of the linears that read each."""
    return {
        "input_norms": [norm("input_layernorm", epsilon=epsilon, consumers=attention, **words)],
        "post_attention_norms": [
            norm("post_attention_layernorm", epsilon=epsilon, consumers=mlp, producers=OUTPUT_PROJECTIONS, **words)
        ],
    }


TRANSFORMERS_RESIDUAL = Facts(
    ResidualSpec,
    {
        "hidden_size": "hidden_size",
        "layer_index": "self_attn.layer_idx",
        "tp_weight": "self_attn.o_proj.in_features",
        "mlp_weight": ["mlp.down_proj", "mlp.experts.down_proj", "mlp.shared_experts.down_proj"],
        "last_linear": "mlp.down_proj",
        "mixture": ["mlp", "block_sparse_moe"],
        **norms("variance_epsilon", TRANSFORMERS_FIRST_PROJECTIONS, [*SPLIT_MLP, *MERGED_MLP]),
    },
)
VLLM_RESIDUAL = TRANSFORMERS_RESIDUAL.but(
    layer_index="layer_idx",
    tp_weight=None,
    mlp_weight=None,
    tp_size="self_attn.o_proj.tp_size",
    tp_rank="self_attn.o_proj.tp_rank",
    **norms("variance_epsilon", VLLM_FIRST_PROJECTIONS, MERGED_MLP),
)
SGLANG_RESIDUAL = TRANSFORMERS_RESIDUAL.but(
    layer_index="layer_id",
    tp_weight=None,
    mlp_weight=None,
    # MLA, then Kimi's delta attention: no module here holds the size itself.
    tp_size=["self_attn.num_heads / self_attn.num_local_heads", "self_attn.num_heads / self_attn.local_num_heads"],
    tp_rank="self_attn.o_proj.tp_group.rank_in_group",
    **norms("variance_epsilon", SGLANG_FIRST_PROJECTIONS, MERGED_MLP),
)
ATOM_RESIDUAL = VLLM_RESIDUAL.but(layer_index="self_attn.layer_num", **norms("eps", ATOM_FIRST_PROJECTIONS, MERGED_MLP))


def zero_centred(facts: Facts, epsilon: str) -> Facts:
    """The same decoder layer with norms that add 1 to their weight (Gemma's way, which Qwen3-Next follows)."""
    changes = {"epsilon": epsilon, "weight_offset": const(1.0)}
    return facts.but(
        **{
            name: [{**words, **changes} for words in facts.words[name]]
            for name in ("input_norms", "post_attention_norms")
        }
    )


USUAL_ENDS = "Attention DecoderLayer Model"


def final_norm(decoder: Facts, layers: str = "layers", module: str = "norm") -> Facts:
    """The class that holds these decoder layers at `layers`, and after them a norm of the same kind at `module`.

    What reads that norm is the language-model head, which the class around this one holds.
    """
    (like,) = decoder.words["input_norms"]
    like = {name: word for name, word in like.items() if name not in ("consumers", "producers")}
    said = ("hidden_size", *LAYER_WORDS)
    return Facts(
        FinalNormSpec,
        {name: below(f"{layers}.-1", decoder.words[name]) for name in said if name in decoder.words}
        | {"layer_index": {"path": layers, "as": "length"}, "final_norm": {**like, "module": module, "consumers": []}},
    )


def classes_of(
    file: str, name: str, attention: Facts | None, layer: Facts, ends: str = USUAL_ENDS, at: Sequence[str] = ()
) -> dict[str, Facts]:
    """The attention of a model, its decoder layer and what holds those, by `file:Class`.

    Args:
        file: where they are.
        name: what their names begin with.
        attention: None where another adapter has it.
        layer: the decoder layer; what holds those of a model without norms in front has a usual one behind.
        ends: what their names end with.
        at: as of `final_norm`.
    """
    final = final_norm(
        layer if layer.words["input_norms"] else layer.but(input_norms=[norm("norm", epsilon="variance_epsilon")]), *at
    )
    parts = zip(ends.split(), (attention, layer, final), strict=True)
    return {f"{file}:{name}{end}": facts for end, facts in parts if facts is not None}


def classes(models: Iterable[tuple[Any, ...]]) -> dict[str, Facts]:
    """Those of several models, each given as to `classes_of`."""
    return {place: facts for model in models for place, facts in classes_of(*model).items()}
