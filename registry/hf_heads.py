"""Heads that change from layer to layer, as the configs of MiMo-V2 (`swa_...`) and Laguna (a list) say them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ..adapters.errors import shown
from .hf_config import HFConfig

_OF_SLIDING = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
"""What stands behind `swa_` where sliding layers have others."""

_LIST = "num_attention_heads_per_layer"

SINKS = ("add_full_attention_sink_bias", "add_swa_attention_sink_bias")
"""What says of MiMo-V2's layers that they have sinks: of those that do not slide, and of those that do."""


def heads_of(config: HFConfig, words: Sequence[str], model_type: str, *, latent: bool) -> list[tuple[str, HFConfig]]:
    """The name of each layer's kind, and the config with the heads of such layers. On a problem the result means nothing.

    Args:
        config: the language model's part.
        words: the kind of each layer, as `layer_words` gives it.
        model_type: of that part.
        latent: whether the attention is latent, which has none of these keys.
    """
    listed, total = config.values.get(_LIST), len(words)
    own = [f"swa_{key}" for key in _OF_SLIDING if config.has(f"swa_{key}")]
    if listed is not None and (
        not isinstance(listed, list) or len(listed) != total or not all(type(heads) is int for heads in listed)
    ):
        config.problems.append(f"{_LIST}: expected a list of {total} whole numbers, got {shown(listed)}")
        listed = None
    for key in [*own, *([] if listed is None else [_LIST])]:
        if latent or "linear" in words or (key in own and "sliding" not in words):
            config.problems.append(
                f"{key} = {shown(config.values[key])}: heads that differ between layers in a way that is not read here"
            )
    if own and listed is not None:
        config.problems.append(f"{own[0]} and {_LIST} both say the heads of sliding layers: which is meant?")
    if config.has("swa_head_dim", "v_head_dim") and not config.has("swa_v_head_dim"):
        config.problems.append("swa_v_head_dim is missing, and engines differ in what they take for it")
    sliding: dict[str, Any] = {key: config.values[f"swa_{key}"] for key in _OF_SLIDING if f"swa_{key}" in own}
    if model_type.startswith("mimo_v2") and "sliding" in words:
        sliding |= _mimo(config)
    several = {word: len({listed[i] for i in range(total) if words[i] == word}) > 1 for word in set(words) if listed}
    found = []
    for index, word in enumerate(words):
        said = sliding if word == "sliding" else {}
        if listed is not None:
            said = {**said, "num_attention_heads": listed[index]}
        name = f"{word}_{listed[index]}" if listed is not None and several.get(word) else word
        found.append((name, attrs.evolve(config, values={**config.values, **said}) if said else config))
    return found


def _mimo(config: HFConfig) -> dict[str, Any]:
    """What of MiMo-V2's sliding layers the code adds to its config."""
    said: dict[str, Any] = {}
    if not config.has("swa_num_key_value_heads"):
        config.problems.append(
            "swa_num_key_value_heads is missing: the code of model_type mimo_v2_flash doubles num_key_value_heads on sliding layers, "
            "which the config does not say"
        )
    elif config.count("swa_num_key_value_heads") != 2 * config.count("num_key_value_heads"):
        config.notes.append(
            "transformers gives sliding layers twice num_key_value_heads, whatever swa_num_key_value_heads says"
        )
    if config.has("sliding_window_size"):
        said["sliding_window"] = config.count("sliding_window_size") + 1
        config.notes.append(
            "a query sees sliding_window_size tokens and itself, as in SGLang and transformers; vLLM's layers count itself among them"
        )
    if SINKS[True] not in config.values:
        said[SINKS[True]] = True  # transformers' layers have them where they slide
    return said
