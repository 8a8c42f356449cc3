"""How each engine names the parts of a gated MLP: its widths, its activation, its sharding.

The engines merge gate and up into one linear, whose output is twice as wide; what the activation leaves is what
`down_proj` takes, so the widths are read there.
"""

from __future__ import annotations

from .base import Facts
from .sources import const
from .specs import GatedMLPSpec

TRANSFORMERS_MLP = Facts(
    GatedMLPSpec,
    {
        "hidden_size": "hidden_size",
        # No MLP keeps its index. LongCat holds two per decoder layer.
        "layer_index": [{"name_as": "name_index_of_pairs"}, const(None)],
        "intermediate_size": "intermediate_size",
        "activation": "act_fn",
        "swiglu_limit": const(None),
        "quant": "down_proj",
        # Attributes stay the whole model's; only the weights are shards. A quantised one may be packed.
        "tp_weight": ["down_proj.in_features", "gate_proj.out_features", "up_proj.out_features"],
    },
)
VLLM_MLP = TRANSFORMERS_MLP.but(
    hidden_size="down_proj.output_size",
    intermediate_size="down_proj.input_size",
    local_intermediate_size="down_proj.input_size_per_partition",
    # Where it clamps, the activation is of another class, which holds the limit.
    swiglu_limit=["act_fn.swiglu_limit", const(None)],
    # Of this linear: under sequence parallelism shared experts are whole on every rank (`disable_tp`).
    tp_weight=None,
    tp_size="down_proj.tp_size",
    tp_rank="down_proj.tp_rank",
)
SGLANG_MLP = VLLM_MLP.but(
    # DeepSeek's MLP clamps itself.
    swiglu_limit=["swiglu_limit", const(None)],
    tp_size=None,
    tp_rank="down_proj.tp_group.rank_in_group",
)
ATOM_MLP = VLLM_MLP.but(
    # A linear's own input_size is this rank's; the total is nowhere.
    intermediate_size=None,
    local_intermediate_size="down_proj.input_size",
    swiglu_limit=const(None),
)
