"""The recipe of a model that has none of its own: from the words that its transformers config class knows.

Configs of one family spell the same things alike, so what is left to say is which of the words a config has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..adapters.errors import FOREIGN
from ..registry.hf_keys import GDN_KEYS, GQA_KEYS, KDA_KEYS, MLA_KEYS, Keys
from .recipes import EXTRAS, VOCABULARY, Extra, Recipe

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry
    from ..registry.kinds import LayerKind

_SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    # Some config classes take no None.
    "pad_token_id": 125,
    "bos_token_id": 126,
    "eos_token_id": 127,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 2,
    "index_topk": 16,
}
"""What no spec speaks of, where a config has it."""

YARN_ORIGINAL_LENGTH = 4096
"""`original_max_position_embeddings` of every yarn model declared here. No spec speaks of it."""

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
"""transformers' words where they are not a spec's."""


def own_config(model_type: str) -> Any:
    """Transformers' own config class of a `model_type`, or None.

    By its own names: vLLM registers "deepseek_v32" as DeepseekV3Config, and writes that into the class's `model_type`.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return getattr(transformers, CONFIG_MAPPING_NAMES.get(model_type, ""), None)


def known_types() -> frozenset[str]:
    """The `model_type`s that transformers has; none where it is not installed."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except FOREIGN:
        return frozenset()
    return frozenset(CONFIG_MAPPING_NAMES)


@cache
def general_recipe(model_type: str, *, headless: bool = False) -> Recipe | None:
    """How transformers builds this `model_type` for text, or None where it has no such language model.

    Args:
        model_type: of a config, of a composite one too.
        headless: a model without a language-model head will do, as multimodal ones hold.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    whole = own_config(model_type)
    if whole is None:
        return None
    config_class = whole.sub_configs.get("text_config", whole)
    if not issubclass(config_class, transformers.PreTrainedConfig):
        # AutoConfig: any text model may be in it, and the config itself says which one is unless told otherwise.
        config_class = type(whole().get_text_config())
    text_type = model_type if config_class is whole else config_class.model_type
    # Where only the multimodal model has an auto class, the text model is named as its config.
    named = re.sub("(Text)?Config$", "ForCausalLM", config_class.__name__)
    model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text_type, named)
    if headless and not hasattr(transformers, str(model)):
        model = MODEL_MAPPING_NAMES.get(text_type)
    if not isinstance(model, str) or not hasattr(transformers, model):
        return None
    known = config_class().to_dict()
    # Some classes ask for a head_dim (Qwen3-MoE) that their configs take and have no default for.
    known |= dict.fromkeys((*config_class.attribute_map, "head_dim"))
    linear = GDN_KEYS if "linear_num_value_heads" in known else KDA_KEYS
    families: Mapping[str, Keys] = {"mla": MLA_KEYS, "gqa": GQA_KEYS, "gated_delta_net": linear}
    extras = {key: extra for key, extra in EXTRAS.items() if key in known}
    if "indexed_attention" in (known.get("layer_types") or ()):  # layers with an indexer, which no spec speaks of
        del extras["layer_types"]
    shared = "shared_expert_intermediate_size"
    return Recipe(
        config=config_class.__name__,
        model=model,
        keys={
            family: {field: tuple(key for key in keys if key in known) for field, keys in fields.items()}
            for family, fields in families.items()
        },
        dense="intermediate_size" if "intermediate_size" in known else None,
        shared=shared if shared in known else "moe_intermediate_size",
        small={key: value for key, value in _SMALL.items() if key in known},
        extra=(
            *(_taken(extra, config_class) for extra in extras.values()),
            lambda entry: _softmax_scale(entry, known),
            lambda entry: _activation(entry, known),
            lambda entry: _rope(entry, known),
        ),
    )


def _taken(extra: Extra, config_class: Any) -> Extra:
    """Without the keys that it gives None to and the config takes a number for: its layer types say where no window is."""
    types = config_class.__annotations__

    def given(entry: ModelEntry) -> Mapping[str, Any]:
        return {key: value for key, value in extra(entry).items() if value is not None or types.get(key) is not int}

    return given


def _softmax_scale(entry: ModelEntry, known: Mapping[str, Any]) -> dict[str, Any]:
    scales = [
        kind.head_dim**-0.5 if kind.softmax_scale is None else kind.softmax_scale
        for kind in entry.layers.values()
        if kind.family == "gqa"
    ]
    if not scales:
        return {}
    said = {"attention_multiplier": scales[0], "query_pre_attn_scalar": round(scales[0] ** -2)}
    return {key: value for key, value in said.items() if key in known}


def _activation(entry: ModelEntry, known: Mapping[str, Any]) -> dict[str, Any]:
    words = [_ACTIVATIONS.get(mlp.activation, mlp.activation) for mlp in entry.mlps.values()]
    return {key: word for key in ("hidden_act", "hidden_activation") for word in words[:1] if key in known}


def _rope(entry: ModelEntry, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a config's own rope says besides (Mistral-4 scales queries by position) stays, and only yarn is the entry's."""
    own = known.get("rope_parameters")
    said = [rope for kind in entry.layers.values() for rope in [yarn_rope(kind)] if rope]
    if not said or not isinstance(own, dict):
        return {}
    kept = {key: value for key, value in own.items() if key != "partial_rotary_factor"}
    return {"rope_parameters": {**kept, **said[0]["rope_parameters"]}}


def yarn_rope(kind: LayerKind) -> dict[str, Any]:
    """The config keys of a kind's yarn; none without."""
    yarn = getattr(kind, "yarn", None)
    if yarn is None:
        return {}
    return {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": yarn.factor,
            "mscale": yarn.mscale_all_dim,
            "mscale_all_dim": yarn.mscale_all_dim,
            "original_max_position_embeddings": YARN_ORIGINAL_LENGTH,
        },
        "max_position_embeddings": int(YARN_ORIGINAL_LENGTH * yarn.factor),
    }
