"""Which decoder layer of a Hugging Face config is of which kind: the notations in use, tried one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..adapters.errors import shown

if TYPE_CHECKING:
    from .hf_config import HFConfig

Word = Literal["full", "sliding", "linear"]

_LAYER_TYPES: Mapping[str, Word] = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "linear_attention": "linear",
}

_ALL_SLIDE = ("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2")
"""Model types in whose code a `sliding_window` means every layer."""

_EVEN_SLIDE = ("gemma2", "gpt_oss")
"""Model types in whose code layers 0, 2, 4, ... slide where the config lists nothing."""


def layer_words(config: HFConfig, total: int, model_type: str, *, linear: bool) -> list[Word]:
    """The kind of each layer, in order. Where it cannot be told, a problem is noted and the result means nothing.

    Args:
        config: the language model's part.
        total: how many decoder layers there are.
        model_type: of that part.
        linear: whether some of the layers are linear attention.
    """
    values = config.values
    if config.has("layer_types"):
        return _listed(config, values["layer_types"], total)
    if config.has("hybrid_layer_pattern"):
        return _flagged(config, values["hybrid_layer_pattern"], total)
    kimi = values.get("linear_attn_config")
    if isinstance(kimi, Mapping):
        return _kimi(config, kimi, total)
    if linear:
        if not config.has("full_attention_interval"):
            return config.untold("neither layer_types nor full_attention_interval says which layers are linear", total)
        return _periodic(config, "full_attention_interval", total, "linear")
    if isinstance(values.get("attn_type_list"), list) and any(word != 1 for word in values["attn_type_list"]):
        return config.untold(
            "attn_type_list: has other layers than softmax attention (1), which are not read here", total
        )
    if not config.has("sliding_window") or values.get("use_sliding_window") is False:
        return _whole(total)
    return _sliding(config, total, model_type)


def _whole(total: int, word: Word = "full") -> list[Word]:
    return [word] * total


def _listed(config: HFConfig, listed: Any, total: int) -> list[Word]:
    if not isinstance(listed, list) or len(listed) != total:
        found = f"{len(listed)} layers" if isinstance(listed, list) else shown(listed)
        return config.untold(f"layer_types: expected a list of {total} layers, got {found}", total)
    unknown = [word for word in listed if not isinstance(word, str) or word not in _LAYER_TYPES]
    if unknown:
        return config.untold(f"layer_types: {shown(unknown[0])} is a kind of layer that no spec describes", total)
    words = [_LAYER_TYPES[word] for word in listed]
    if "linear" in words and not (
        config.has("linear_num_value_heads") or config.has("linear_num_heads") or config.has("linear_attn_config")
    ):
        return config.untold(
            "layer_types: has linear_attention, and none of linear_num_value_heads, linear_num_heads and linear_attn_config "
            "says the heads of a gated delta net: another kind of linear attention (MiniMax's), which no spec describes",
            total,
        )
    if "sliding" in words and not config.has("sliding_window"):
        config.problems.append("layer_types: has sliding_attention, and sliding_window is not set")
    return words


def _flagged(config: HFConfig, flags: Any, total: int) -> list[Word]:
    """MiMo-V2: 1 for a layer that slides, 0 for one that does not."""
    if (
        not isinstance(flags, list)
        or len(flags) != total
        or not all(type(flag) is int and flag in (0, 1) for flag in flags)
    ):
        return config.untold(f"hybrid_layer_pattern: expected {total} times 0 or 1, got {shown(flags)}", total)
    return ["sliding" if flag else "full" for flag in flags]


def _kimi(config: HFConfig, kimi: Mapping[str, Any], total: int) -> list[Word]:
    """`kda_layers` and `full_attn_layers` count from 1, unlike `layer_types`."""
    full, linear = (_numbers(kimi.get(key)) for key in ("full_attn_layers", "kda_layers"))
    if full is None or linear is None:
        return config.untold(
            "linear_attn_config: expected the lists full_attn_layers and kda_layers, counted from 1", total
        )
    if sorted(full + linear) != list(range(1, total + 1)):
        return config.untold(
            f"linear_attn_config: full_attn_layers and kda_layers do not share out the layers 1 to {total} between them",
            total,
        )
    return ["full" if index + 1 in set(full) else "linear" for index in range(total)]


def _numbers(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(type(i) is int for i in value) else None


def _periodic(config: HFConfig, key: str, total: int, others: Word) -> list[Word]:
    """Every n-th layer is full attention: layers n - 1, 2n - 1, ..., counted from 0."""
    period = config.count(key)
    if period < 1:
        return config.untold(f"{key}: expected at least 1, got {period}", total)
    return ["full" if (index + 1) % period == 0 else others for index in range(total)]


def _sliding(config: HFConfig, total: int, model_type: str) -> list[Word]:
    values = config.values
    pattern = values.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:  # EXAONE: local, global
        return ["sliding" if pattern[index % len(pattern)] == "L" else "full" for index in range(total)]
    if pattern is not None:
        return _periodic(config, "sliding_window_pattern", total, "sliding")
    if "use_sliding_window" in values and config.has("max_window_layers"):  # Qwen
        first = config.count("max_window_layers")
        return ["sliding" if index >= first else "full" for index in range(total)]
    if model_type in _ALL_SLIDE:
        return _whole(total, "sliding")
    if model_type in _EVEN_SLIDE:
        return ["sliding" if index % 2 == 0 else "full" for index in range(total)]
    return config.untold(
        f"sliding_window = {shown(values['sliding_window'])}, and neither layer_types nor sliding_window_pattern says which "
        "layers slide (null would say that none does)",
        total,
    )
