"""The kinds of layer that a Hugging Face config describes, as models.toml entries declare them.

`config.head_dim` is never read for latent attention or delta nets, where it means other things in other versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..adapters.conversions import rope_attention_scaling
from ..adapters.errors import UnreadableError, shown
from ..adapters.spec_fields import as_float
from .catalog import MOST_LAYERS
from .hf_config import HFConfig
from .hf_heads import SINKS, heads_of
from .hf_keys import GDN_KEYS, KDA_KEYS, MLA_KEYS
from .kind_words import At, Every, GateWords, Rope, RopeWords, StreamNorms, Yarn
from .kinds import GatedDeltaNetKind, GQAKind, LayerKind, MLAKind
from .layer_pattern import layer_words

_GATES: Mapping[str, Literal["silu", "sigmoid"]] = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}

_TELLING = ("kv_lora_rank", "linear_num_value_heads", "linear_attn_config", "num_key_value_heads")
"""Keys by which the family is told."""
NO_HEAD_DIM = "head_dim is not said"
"""How the note begins that it was derived."""


def layers_of(
    config: HFConfig, total: int, model_type: str, gate: GateWords | None, turned: MLAKind | GQAKind | None
) -> dict[str, LayerKind]:
    """The kinds of layer by name, with their places. On a problem the result means nothing.

    Args:
        config: the language model's part.
        total: how many decoder layers there are.
        model_type: of that part.
        gate: of a delta net, where a declared model of this architecture says it.
        turned: the kind of layers of such a model that has a rope, likewise.
    """
    found = config.family()
    if found is None or not 1 <= total <= MOST_LAYERS:
        if found is None:
            near = next(filter(None, map(config.misspelt, _TELLING)), "")
            config.problems.append(
                f"none of {', '.join(_TELLING[:-1])} and {_TELLING[-1]} is there, so the kind of attention cannot be told{near}"
            )
        else:
            config.problems.append(f"num_hidden_layers: expected 1 to {MOST_LAYERS}, got {total}")
        return {}
    words: list[str] = [*layer_words(config, total, model_type, linear=found[0] == "gated_delta_net")]
    kinds: dict[str, LayerKind] = {}
    heads = heads_of(config, words, model_type, latent=config.has("kv_lora_rank"))
    places: dict[str, list[int]] = {}
    for index, (name, _) in enumerate(heads):
        places.setdefault(name, []).append(index)
    for name, indices in places.items():
        word, part = words[indices[0]], heads[indices[0]][1]
        at = at_of(indices, total, rest=is_rest(indices, places))
        if word == "linear":
            called, kind = _delta_net(config, at, gate)
            kinds[called] = kind
        elif config.has("kv_lora_rank"):
            if word == "sliding":
                config.problems.append("latent attention with a sliding window, which no entry can say")
            kinds["mla"] = _mla(config, at, turned.rope if isinstance(turned, MLAKind) else None)
        else:
            kinds[name] = gqa_of(part, at, window="sliding_window" if word == "sliding" else None, turned=turned)
    return kinds


def _mla(config: HFConfig, at: At, rope: Rope) -> MLAKind:
    if "q_lora_rank" not in config.values:
        said = "q_lora_rank is missing; null would say that queries are projected directly"
        config.problems.append(f"{said}{config.misspelt('q_lora_rank')}")
    q_lora_rank = config.count("q_lora_rank") if config.has("q_lora_rank") else None
    kind = MLAKind(
        family="mla",
        q_lora_rank="none" if q_lora_rank is None else q_lora_rank,
        yarn=_yarn(config),
        **config.counts({field: keys for field, keys in MLA_KEYS.items() if field != "q_lora_rank"}),
        rope=_rope(config, rope),
        at=at,
    )
    width = config.values.get("qk_head_dim")
    if width is not None and width != kind.qk_nope_head_dim + kind.qk_rope_head_dim:
        config.problems.append(
            f"qk_head_dim: {shown(width)} is not {kind.qk_nope_head_dim} + {kind.qk_rope_head_dim}, its two parts"
        )
    return kind


def _rope(config: HFConfig, declared: Rope) -> Rope:
    """What the config says of the rope, else what a declared model of the architecture has, else DeepSeek's."""
    if config.values.get("mla_use_nope") is True or declared == "none" or config.values.get("qk_rope_head_dim") == 0:
        return "none"
    interleaved = config.values.get("rope_interleave")
    if type(interleaved) is not bool:
        interleaved = True if declared is None else declared.interleaved
        if declared is None:
            config.notes.append(
                "which columns the rope turns together is not said; interleaved, as in DeepSeek's layers, was written: "
                "check the layer's rotary embedding"
            )
    return RopeWords(interleaved=interleaved, attention_scaling=_rope_scaling(config))


def _rope_scaling(config: HFConfig) -> float:
    said = _rope_values(config)
    try:
        if isinstance(said, Mapping):
            return rope_attention_scaling(said, config.values.get("max_position_embeddings"))
    except UnreadableError as error:
        config.problems.append(f"rope_scaling: {error}")
    except (TypeError, ValueError, ArithmeticError):
        config.problems.append(
            f"rope_scaling: expected numbers that cos and sin are multiplied by, got {shown(dict(said))}"
        )
    return 1.0


def _rope_of_heads(config: HFConfig, declared: MLAKind | GQAKind | None, head_dim: int) -> Rope:
    """Only where a declared model of the architecture says that there is one. The part of a head that it turns is the config's, else that model's."""
    if not isinstance(declared, GQAKind) or not isinstance(declared.rope, RopeWords):
        return None
    said = _rope_values(config)
    places = (said if isinstance(said, Mapping) else {}, config.values)
    part = next((place["partial_rotary_factor"] for place in places if "partial_rotary_factor" in place), None)
    usual = declared.head_dim if declared.rope.width is None else declared.rope.width
    part = usual / max(declared.head_dim, 1) if part is None else as_float(part)
    if type(part) is not float or not 0 < part <= 1:
        config.problems.append(f"partial_rotary_factor: expected a number above 0 and at most 1, got {shown(part)}")
        part = 1.0
    width = int(head_dim * part)
    return RopeWords(
        interleaved=declared.rope.interleaved,
        attention_scaling=_rope_scaling(config),
        width=None if width == head_dim else width,
    )


def _rope_values(config: HFConfig) -> Any:
    return next((config.values[key] for key in ("rope_scaling", "rope_parameters") if config.has(key)), None)


def _yarn(config: HFConfig) -> Yarn | None:
    rope = _rope_values(config)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) in ("default", None):
        return None
    # DeepSeek's code corrects the scale where mscale_all_dim is set and not 0, and only there.
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if not weight:
        return None
    weight, factor = as_float(weight), as_float(factor)
    if type(weight) is not float or type(factor) is not float:
        config.problems.append(
            f"rope_scaling: expected numbers, got mscale_all_dim {shown(weight)} and factor {shown(factor)}"
        )
        return None
    return Yarn(factor=factor, mscale_all_dim=weight)


def _delta_net(config: HFConfig, at: At, gate: GateWords | None) -> tuple[str, GatedDeltaNetKind]:
    said = config.values.get("output_gate_type")
    activation = _GATES.get(said) if isinstance(said, str) else None
    kimi = config.values.get("linear_attn_config")
    is_kimi = kimi is not None or config.has("linear_num_heads")
    if gate is None:
        usual: Literal["silu", "sigmoid"] = "sigmoid" if is_kimi else "silu"
        gate = GateWords(activation=usual, norm_before_gate=True, group_size="none")
        if activation is None:
            config.notes.append(
                f"the output gate is not said; {gate.activation}, norm first, was written because "
                f"{'Kimi' if is_kimi else 'Qwen'}'s layers have that: check the layer's gated norm"
            )
    if activation is not None:
        gate = GateWords(activation=activation, norm_before_gate=gate.norm_before_gate, group_size=gate.group_size)
    sizes = _kda_sizes(config, kimi) if is_kimi else config.counts(GDN_KEYS)
    kind = GatedDeltaNetKind(family="gated_delta_net", output_norm=gate, at=at, **sizes)
    return "kda" if is_kimi else "gdn", kind


def _kda_sizes(config: HFConfig, kimi: Any) -> dict[str, int]:
    """Kimi's keys and values have the same heads."""
    if isinstance(kimi, Mapping) and "num_heads" in kimi:
        part = HFConfig(kimi, config.problems)
        heads, width, taps = map(part.count, ("num_heads", "head_dim", "short_conv_kernel_size"))
    else:
        heads, width, taps = config.counts(KDA_KEYS).values()
    said = {"num_k_heads": heads, "num_v_heads": heads, "head_k_dim": width, "head_v_dim": width}
    return {**said, "conv_kernel_size": taps}


def gqa_of(
    config: HFConfig,
    at: At,
    *,
    window: str | None,
    stream_norms: StreamNorms = None,
    turned: MLAKind | GQAKind | None = None,
) -> GQAKind:
    """Grouped-query attention.

    Args:
        config: the language model's part.
        at: where these layers are.
        window: the key of their sliding window, None where they have none.
        stream_norms: which norms read the stream, where not two do.
        turned: such a layer of a declared model that has a rope.
    """
    heads = config.count("num_attention_heads")
    v_head_dim = config.count("v_head_dim") if config.has("v_head_dim") else None
    said = next(
        (key for key in ("head_dim", "attention_head_dim") if config.has(key)), None
    )  # the latter of Nemotron-H
    if said is not None:
        head_dim = config.count(said)
    elif misspelt := config.misspelt("head_dim"):
        config.problems.append(f"head_dim is missing{misspelt}")
        head_dim = 1
    else:
        hidden_size = config.count("hidden_size")
        head_dim = hidden_size // max(heads, 1)
        note = (
            f"{NO_HEAD_DIM}; it is hidden_size / num_attention_heads = {head_dim}, as in Llama: derived, to be checked"
        )
        if heads and hidden_size % heads and "hidden_size" in config.values:
            config.problems.append(
                f"head_dim is missing, and num_attention_heads = {heads} does not divide hidden_size = {hidden_size}"
            )
        elif note not in config.notes:
            config.notes.append(note)
    if config.has("num_key_value_heads"):
        num_kv_heads = config.count("num_key_value_heads")
    elif "num_key_value_heads" in config.values:  # transformers: null means as many as query heads
        num_kv_heads = heads
    else:
        num_kv_heads = config.count("num_key_value_heads")
    return GQAKind(
        family="gqa",
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_window="off" if window is None else config.count(window),
        has_sinks=config.values.get(SINKS[window is not None]) is True,
        at=at,
        v_head_dim=None if v_head_dim == head_dim else v_head_dim,
        stream_norms=stream_norms,
        softmax_scale=_scale(config, head_dim),
        rope=_rope_of_heads(config, turned, head_dim),
    )


def _scale(config: HFConfig, head_dim: int) -> float | None:
    scale = None
    if config.has("attention_multiplier"):  # Granite
        scale = config.number("attention_multiplier")
    elif config.has("query_pre_attn_scalar"):  # Gemma
        scale = config.number("query_pre_attn_scalar") ** -0.5
    return None if scale is None or scale == max(head_dim, 1) ** -0.5 else scale


def is_rest(indices: Sequence[int], places: Mapping[str, Sequence[int]]) -> bool:
    """Whether these places are written as those that are left: of several kinds, those of the commonest."""
    return len(places) > 1 and indices is max(places.values(), key=len)


def at_of(indices: Sequence[int], total: int, *, rest: bool) -> At:
    """The shortest way to write these places."""
    if len(indices) == total:
        return "all"
    if rest:
        return "rest"
    step = indices[1] - indices[0] if len(indices) > 1 else 0
    if step and list(indices) == list(range(indices[0], total, step)):
        return Every(step=step, start=indices[0])
    return list(indices)
