"""How a models.toml entry becomes the config of a real transformers model: the recipe of a `model_type`, as data.

Most models have the one that `general` makes.

A recipe says which classes to use, which config key each declared field goes to, and what to make small because no
spec speaks of it: vocabulary, routed experts, the vision tower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ..registry.hf_keys import GQA_KEYS, MAMBA2_KEYS, MLA_KEYS, NEMOTRON_H_MAMBA2_KEYS, Keys
from ..registry.kind_words import RopeWords
from ..registry.kinds import SHARED_EXPERTS

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry

VOCABULARY = 128
"""Tokens that a small model knows."""
_VOCABULARY = {"vocab_size": VOCABULARY, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_DENSE = {"intermediate_size": 64}
_ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
_GROUPED = {"n_group": 1, "topk_group": 1}

Extra = Callable[["ModelEntry"], Mapping[str, Any]]


def _layer_types(entry: ModelEntry) -> dict[str, Any]:
    """The kind of each layer, in transformers' words."""
    words = []
    for kind in entry.kind_at():
        declared = entry.layers[kind]
        if declared.family == "gated_delta_net":
            words.append("linear_attention")
        elif declared.family == "gqa" and declared.sliding_window != "off":
            words.append("sliding_attention")
        else:
            words.append("full_attention")
    return {"layer_types": words}


def _mlp_layer_types(entry: ModelEntry) -> dict[str, Any]:
    return {"mlp_layer_types": ["sparse" if sparse else "dense" for sparse in _sparse(entry)]}


def _first_dense(entry: ModelEntry) -> dict[str, Any]:
    return {"first_k_dense_replace": [*_sparse(entry), True].index(True)}


def _dense_ones(entry: ModelEntry) -> dict[str, Any]:
    return {"mlp_only_layers": [index for index, sparse in enumerate(_sparse(entry)) if not sparse]}


def _sparse(entry: ModelEntry) -> list[bool]:
    """Which decoder layers are mixtures: none where the entry speaks of no MLP."""
    return [name == SHARED_EXPERTS for name in entry.mlp_at()]


def _window(entry: ModelEntry) -> dict[str, Any]:
    windows = [k.sliding_window for k in entry.layers.values() if k.family == "gqa" and k.sliding_window != "off"]
    return {"sliding_window": windows[0] if windows else None}


def _own_head_dim(entry: ModelEntry) -> dict[str, Any]:
    """LongCat's rotary embedding reads `head_dim`, which must be the rope width."""
    mla = next(kind for kind in entry.layers.values() if kind.family == "mla")
    return {"head_dim": mla.qk_rope_head_dim}


def _rope_interleave(entry: ModelEntry) -> dict[str, Any]:
    ropes = [kind.rope for kind in entry.layers.values() if kind.family == "mla"]
    said = [rope.interleaved for rope in ropes if isinstance(rope, RopeWords)]
    return {"rope_interleave": said[0]} if said else {}


def _attentions(entry: ModelEntry) -> dict[str, Any]:
    return {"attn_layer_indices": [i for i, kind in enumerate(entry.kind_at()) if entry.layers[kind].family == "gqa"]}


def _mixers(entry: ModelEntry) -> dict[str, Any]:
    words = {"gqa": "full_attention", "mamba2": "linear_attention", "mlp": "mlp"}
    return {"layer_types": [words[entry.layers[kind].family] for kind in entry.kind_at()]}


def _blocks(entry: ModelEntry) -> dict[str, Any]:
    return {"layers_block_type": _mixers(entry)["layer_types"], "layer_norm_epsilon": entry.rms_norm_eps}


def _expand(entry: ModelEntry) -> dict[str, Any]:
    """How many times as wide as the stream Mamba-2's heads are, which its width must be."""
    widths = [kind.num_heads * kind.head_dim for kind in entry.layers.values() if kind.family == "mamba2"]
    return {"mamba_expand": widths[0] // entry.hidden_size} if widths else {}


def _beside(entry: ModelEntry) -> dict[str, Any]:
    """Mamba-2 beside each attention, with a width of its own, and factors in the MLPs."""
    mixer = next(kind for kind in entry.layers.values() if kind.family == "mamba2")
    factors = [(mlp.gate_multiplier, mlp.down_multiplier) for mlp in entry.mlps.values()]
    return {
        "mamba_d_ssm": mixer.num_heads * mixer.head_dim,
        "mamba_rms_norm": mixer.output_norm != "none",
        "mamba_norm_before_gate": mixer.output_norm == "norm_before_gate",
        **({"mlp_multipliers": list(factors[0])} if factors else {}),
    }


def _scale(entry: ModelEntry) -> dict[str, Any]:
    scales = [kind.softmax_scale for kind in entry.layers.values() if kind.family == "gqa"]
    return {"attention_multiplier": scales[0]} if scales else {}


EXTRAS: Mapping[str, Extra] = {
    "layer_types": _layer_types,
    "sliding_window": _window,
    "mlp_layer_types": _mlp_layer_types,
    "first_k_dense_replace": _first_dense,
    "mlp_only_layers": _dense_ones,
    "rope_interleave": _rope_interleave,
}
"""What depends on the whole entry, by the config key that says it."""


@frozen(kw_only=True)
class Recipe:
    """How one `model_type` of transformers is built."""

    config: str
    "The config class of the text model."
    model: str
    "The model class."
    keys: Mapping[str, Keys]
    "Family -> declared field -> the config keys it goes to."
    dense: str | None = "intermediate_size"
    "The config key of a dense layer's MLP; None where every layer is a mixture."
    shared: str = "moe_intermediate_size"
    "The config key of the shared experts' width, of which there is one."
    layers: str = "num_hidden_layers"
    "The config key that counts decoder layers."
    small: Mapping[str, Any] = field(factory=dict)
    "What no spec speaks of, made small."
    extra: tuple[Extra, ...] = ()
    "What depends on the whole entry."
    around: tuple[str, Mapping[str, Any]] | None = None
    "A composite config class that holds the text config, and its other arguments."


_DEEPSEEK_SMALL = {**_VOCABULARY, **_DENSE, **_ROUTED, **_GROUPED, "n_shared_experts": 1}
_KIMI_VISION = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    "projection_hidden_size": 32,
    "tie_word_embeddings": False,
    "image_token_id": 100,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}

RECIPES: Mapping[str, Recipe] = {
    # transformers has no kimi_k2: its checkpoints are DeepSeek-V3's code.
    "kimi_k2": Recipe(
        config="DeepseekV3Config",
        model="DeepseekV3ForCausalLM",
        keys={"mla": MLA_KEYS},
        small=_DEEPSEEK_SMALL,
        extra=(_first_dense, _rope_interleave),
    ),
    "kimi_k25": Recipe(
        config="DeepseekV3Config",
        model="Kimi_K25ForConditionalGeneration",
        keys={"mla": MLA_KEYS},
        small=_DEEPSEEK_SMALL,
        extra=(_first_dense, _rope_interleave),
        around=("Kimi_K25Config", _KIMI_VISION),
    ),
    "longcat_flash": Recipe(
        config="LongcatFlashConfig",
        model="LongcatFlashForCausalLM",
        keys={"mla": MLA_KEYS},
        layers="num_layers",
        dense="ffn_hidden_size",
        small={
            **_VOCABULARY,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 2,
            "zero_expert_num": 1,
            "moe_topk": 2,
        },
        extra=(_own_head_dim,),
    ),
    "bamba": Recipe(
        config="BambaConfig",
        model="BambaForCausalLM",
        keys={"gqa": GQA_KEYS, "mamba2": MAMBA2_KEYS},
        small={**_VOCABULARY, **_DENSE},
        extra=(_attentions, _expand),
    ),
    "granitemoehybrid": Recipe(
        config="GraniteMoeHybridConfig",
        model="GraniteMoeHybridForCausalLM",
        keys={"gqa": GQA_KEYS, "mamba2": MAMBA2_KEYS},
        dense="shared_intermediate_size",
        small={**_VOCABULARY, "shared_intermediate_size": 64, "num_local_experts": 0},
        extra=(_mixers, _expand, _scale),
    ),
    "falcon_h1": Recipe(
        config="FalconH1Config",
        model="FalconH1ForCausalLM",
        keys={"gqa": GQA_KEYS, "mamba2": MAMBA2_KEYS},
        small={**_VOCABULARY, **_DENSE},
        extra=(_beside,),
    ),
    "nemotron_h": Recipe(
        config="NemotronHConfig",
        model="NemotronHForCausalLM",
        keys={
            "gqa": GQA_KEYS,
            "mamba2": NEMOTRON_H_MAMBA2_KEYS,
            "mlp": {"intermediate_size": ("intermediate_size",), "activation": ("mlp_hidden_act",)},
        },
        small=_VOCABULARY,
        extra=(_blocks,),
    ),
}
"""By the `model_type` that entries declare, those that `general` makes none of, or another."""

NOT_IN_TRANSFORMERS: Mapping[str, str] = {
    "kimi_k3": "transformers (read up to 5.24) has no kimi_k3; vLLM's layers of it are read instead",
}
"""Why a declared `model_type` has no recipe, in a sentence."""
