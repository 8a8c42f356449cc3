"""The kinds of layer of hybrid models in a Hugging Face config: which keys say Mamba-2's sizes, and which layers are what.

Their configs have no common words, so that each model type is listed; what another one means by the same key is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import field, frozen

from ..adapters.errors import shown
from .catalog import MOST_LAYERS
from .hf_config import OF_HYBRIDS, HFConfig
from .hf_keys import MAMBA2_KEYS, NEMOTRON_H_MAMBA2_KEYS, Keys
from .hf_layers import at_of, gqa_of, is_rest
from .kind_words import StreamNorms
from .kinds import LayerKind
from .mixer_kinds import Mamba2Kind, MLPBlockKind, OtherKind

Words = Callable[[HFConfig, int], list[str]]
"""The kind of each of so many layers: ssm, full, sliding, mlp or moe."""

_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("mamba", "linear_attention", "recurrent", "conv", "M"), "ssm"),
    **dict.fromkeys(("attention", "full_attention", "*"), "full"),
    **dict.fromkeys(("mlp", "-"), "mlp"),
    **dict.fromkeys(("moe", "E"), "moe"),
}
"""What configs call the kinds of layer."""


def _listed(*keys: str) -> Words:
    """The first of these keys that lists the layers, or is a pattern of letters."""

    def words(config: HFConfig, total: int) -> list[str]:
        key = next((key for key in keys if config.has(key)), keys[0])
        said = config.values.get(key)
        if not isinstance(said, (list, str)) or not said or len(said) != total:
            return config.untold(f"{key}: expected the kinds of {total} layers, got {shown(said)}", total)
        unknown = next((word for word in said if not isinstance(word, str) or word not in _KINDS), None)
        if unknown is not None:
            return config.untold(f"{key}: {shown(unknown)} is a kind of layer that no spec describes", total)
        return [_KINDS[word] for word in said]

    return words


def _repeated(key: str) -> Words:
    def words(config: HFConfig, total: int) -> list[str]:
        said = config.values.get(key)
        if not isinstance(said, list) or not said or not all(isinstance(w, str) and w in _KINDS for w in said):
            return config.untold(f"{key}: expected the kinds of layers, got {shown(said)}", total)
        # Griffin's attention has a window in all of its layers.
        return ["sliding" if _KINDS[word] == "full" else "ssm" for word in (said * total)[:total]]

    return words


def _bamba(config: HFConfig, total: int) -> list[str]:
    if config.has("layer_types"):
        return _listed("layer_types")(config, total)
    full = config.values.get("attn_layer_indices")
    if full is not None and not (isinstance(full, list) and all(type(i) is int and 0 <= i < total for i in full)):
        return config.untold(f"attn_layer_indices: expected numbers of {total} layers, got {shown(full)}", total)
    return ["full" if index in (full or ()) else "ssm" for index in range(total)]


def _jamba(config: HFConfig, total: int) -> list[str]:
    if config.has("layer_types"):
        return _listed("layer_types")(config, total)
    period, offset = max(1, config.count("attn_layer_period")), config.count("attn_layer_offset")
    return ["full" if index % period == offset else "ssm" for index in range(total)]


def _all_ssm(_: HFConfig, total: int) -> list[str]:
    return ["ssm"] * total


@frozen(kw_only=True)
class Hybrid:
    """One model type."""

    words: Words
    mamba2: Keys = field(factory=dict)
    "Those of Mamba-2's sizes; none of another mixer."
    mixer: str = ""
    "What that is."
    epsilon: str = "rms_norm_eps"
    "The key of the norms' epsilon; they are RMSNorms, whatever it is called."
    head_dim: bool = False
    "Whether transformers takes a width of heads that the config does not say for another one than hidden_size / num_attention_heads."
    one_block: bool = False
    "Whether its layers have one norm each, and no MLP behind their mixer."
    beside: bool = False
    "Whether it stands beside the attention."
    window: str = "sliding_window"
    "The key of the window of attentions that have one."
    as_given: bool = True
    "Whether mixers' and MLPs' results are added without a factor."
    offset: float = 0.0
    "What the norms add to their weight."


HYBRIDS: Mapping[str, Hybrid] = {
    "bamba": Hybrid(words=_bamba, mamba2=MAMBA2_KEYS),
    "granitemoehybrid": Hybrid(words=_listed("layer_types", "layers_block_type"), mamba2=MAMBA2_KEYS, as_given=False),
    "falcon_h1": Hybrid(words=lambda _, total: ["full"] * total, mamba2=MAMBA2_KEYS, beside=True, as_given=False),
    "nemotron_h": Hybrid(
        words=_listed("layers_block_type", "hybrid_override_pattern"),
        mamba2=NEMOTRON_H_MAMBA2_KEYS,
        head_dim=True,
        epsilon="layer_norm_epsilon",
        one_block=True,
    ),
    "mamba2": Hybrid(
        words=_all_ssm,
        mamba2={
            **NEMOTRON_H_MAMBA2_KEYS,
            "num_heads": ("num_heads",),
            "head_dim": ("head_dim",),
            "ssm_state_size": ("state_size",),
        },
        epsilon="layer_norm_epsilon",
        one_block=True,
    ),
    **dict.fromkeys(
        ("mamba", "falcon_mamba"),
        Hybrid(words=_all_ssm, mixer="mamba", epsilon="layer_norm_epsilon", one_block=True),
    ),
    "jamba": Hybrid(words=_jamba, mixer="mamba"),
    "lfm2": Hybrid(words=_listed("layer_types"), mixer="short convolution", epsilon="norm_eps"),
    "recurrent_gemma": Hybrid(
        words=_repeated("block_types"), mixer="recurrence", window="attention_window_size", offset=1.0
    ),
}
"""By `model_type`, as transformers 5.24 builds them."""

READ_HERE = frozenset(OF_HYBRIDS) - {"ssm_cfg"}
"""Keys that are refused of all other model types."""


def layers_in(config: HFConfig, hybrid: Hybrid) -> int:
    """How many decoder layers there are: Nemotron-H's config may say it by their list alone."""
    listed = config.values.get("layers_block_type")
    alone = hybrid.one_block and not config.has("num_hidden_layers") and isinstance(listed, list)
    return len(listed) if alone and isinstance(listed, list) else config.count("num_hidden_layers")


def hybrid_layers(config: HFConfig, total: int, hybrid: Hybrid) -> dict[str, LayerKind]:
    """The kinds of layer by name, with their places. On a problem the result means nothing."""
    if not 1 <= total <= MOST_LAYERS:
        config.problems.append(f"num_hidden_layers: expected 1 to {MOST_LAYERS}, got {total}")
        return {}
    words = hybrid.words(config, total)
    places = {word: [i for i, at in enumerate(words) if at == word] for word in dict.fromkeys(words)}
    norms: StreamNorms = "one" if hybrid.one_block else None
    kinds: dict[str, LayerKind] = {}
    for word, indices in places.items():
        at: Any = at_of(indices, total, rest=is_rest(indices, places))
        if word == "ssm":
            kinds["ssm"] = _ssm(config, hybrid, at, norms)
        elif word in ("mlp", "moe"):
            kinds[word] = _mlp(config, at, shared=word == "moe")
        else:
            if hybrid.head_dim and not config.has("attention_head_dim"):
                config.count("head_dim")
            kinds[word] = gqa_of(config, at, window=hybrid.window if word == "sliding" else None, stream_norms=norms)
    if hybrid.beside:
        kinds["ssm"] = _ssm(config, hybrid, "all", norms)
    return kinds


def _ssm(config: HFConfig, hybrid: Hybrid, at: Any, norms: StreamNorms) -> LayerKind:
    if not hybrid.mamba2:
        return OtherKind(family="other", mixer=hybrid.mixer, at=at, stream_norms=norms)
    sizes = config.counts(hybrid.mamba2)
    heads, width = sizes["num_heads"], sizes["head_dim"]
    inner = _inner(config, hybrid)
    if inner is not None and inner != heads * width:
        config.problems.append(
            f"{hybrid.mamba2['num_heads'][0]} {heads} of {width} are {heads * width} wide, and the mixer is {inner} wide"
        )
    order: Literal["gate_before_norm", "norm_before_gate", "none"] = "gate_before_norm"
    if config.values.get("mamba_rms_norm") is False:
        order = "none"
    elif config.values.get("mamba_norm_before_gate") is True:
        order = "norm_before_gate"
    return Mamba2Kind(
        family="mamba2", output_norm=order, at=at, beside_attention=hybrid.beside, stream_norms=norms, **sizes
    )


def _inner(config: HFConfig, hybrid: Hybrid) -> int | None:
    """The width of the mixer, where the config says it apart from its heads."""
    if config.has("mamba_d_ssm"):
        return config.count("mamba_d_ssm")
    key = "expand" if hybrid.mamba2["num_heads"][0] == "num_heads" else "mamba_expand"
    return (
        config.count(key) * config.count("hidden_size") if config.has(key) and type(config.values[key]) is int else None
    )


def _mlp(config: HFConfig, at: Any, *, shared: bool) -> MLPBlockKind:
    said: Any = config.values.get("mlp_hidden_act")
    if said not in ("relu2", "relu", "silu", "gelu"):
        config.problems.append(f"mlp_hidden_act: expected relu2, relu, silu or gelu, got {shown(said)}")
        said = "relu2"
    key = "moe_shared_expert_intermediate_size" if shared else "intermediate_size"
    width, act = config.count(key), said
    return MLPBlockKind(
        family="mlp", intermediate_size=width, activation=act, gated=False, at=at, shared_experts=shared
    )
