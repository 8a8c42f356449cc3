"""Hugging Face config.json -> the kinds of layer it describes. Nothing is guessed: what it does not say is a problem.

`config.head_dim` is never read for latent attention or delta nets, where it means other things in other versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen

from .catalog import MOST_LAYERS
from .kinds import At, Every, GatedDeltaNetKind, GateWords, GQAKind, LayerKind, MLAKind, Yarn
from .layer_pattern import layer_words

Family = Literal["mla", "gated_delta_net", "gqa"]

TEXT_PARTS = ("text_config", "language_config", "llm_config")
"""Where composite (multimodal) configs keep their language model."""

_NOT_DESCRIBED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "mamba_d_state",
            "mamba_d_ssm",
            "mamba_num_heads",
            "ssm_state_size",
            "ssm_cfg",
            "state_size",
            "hybrid_override_pattern",
            "layers_block_type",
            "block_types",
            "attn_layer_period",
            "conv_L_cache",
        ),
        "layers that are no attention (state-space, convolution), which no spec describes",
    ),
    **dict.fromkeys(
        (
            "global_head_dim",
            "num_global_key_value_heads",
            "swa_num_attention_heads",
            "swa_num_key_value_heads",
            "swa_head_dim",
            "attention_other_setting",
            "block_configs",
            "hybrid_layer_pattern",
            "per_layer_config",
            "num_attention_heads_per_layer",
            "num_sliding_attention_heads",
        ),
        "heads that differ between layers in a way that is not read here",
    ),
    **dict.fromkeys(("compress_ratios", "compress_rates"), "attention over compressed keys, which no spec describes"),
    "attention_chunk_size": "attention in chunks, which no spec describes",
    "num_kv_shared_layers": "layers that use another layer's keys, which no spec describes",
    "attention_k_eq_v": "values that are the keys, which no spec describes",
    "cross_attention_layers": "cross-attention layers, which no spec describes",
    "is_encoder_decoder": "an encoder and a decoder; specs are of decoder-only models",
}

_LAYER_NORMS = ("phimoe",)
"""Model types that call a LayerNorm's epsilon rms_norm_eps."""

_OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "num_query_groups", "multi_query_group_num", "multi_query"),
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "rms_norm_eps": ("norm_eps", "norm_epsilon", "layernorm_epsilon", "layer_norm_eps", "layer_norm_epsilon"),
}


@frozen
class HFConfig:
    """The language part of a config, read key by key; what is wrong or missing collects in `problems`."""

    values: Mapping[str, Any]
    problems: list[str] = field(factory=list)
    notes: list[str] = field(factory=list)
    "What had to be derived, or what the entry does not show."

    def has(self, *keys: str) -> bool:
        """Whether all keys are set to something else than null."""
        return all(self.values.get(key) is not None for key in keys)

    def count(self, key: str) -> int:
        """A whole number of at least 0. Where there is none, a problem is noted and 1 stands in."""
        value = self.values.get(key)
        if type(value) is int and value >= 0:
            return value
        if key not in self.values or value is None:
            self.problems.append(f"{key} is {'null' if key in self.values else 'missing'}{self._instead(key)}")
        else:
            self.problems.append(f"{key}: expected a whole number, got {_shown(value)}")
        return 1

    def number(self, key: str) -> float:
        """A positive number; else as `count`."""
        value = self.values.get(key)
        if type(value) in (int, float) and value > 0:
            return float(value)
        if value is None:
            self.problems.append(f"{key} is {'null' if key in self.values else 'missing'}{self._instead(key)}")
        else:
            self.problems.append(f"{key}: expected a number above 0, got {_shown(value)}")
        return 1.0

    def _instead(self, key: str) -> str:
        found = [
            f"{other} = {_shown(self.values[other])}" for other in _OTHER_SPELLINGS.get(key, ()) if self.has(other)
        ]
        if not found:
            return ""
        if key == "rms_norm_eps":
            return f" (there is {', '.join(found)}, which may be a LayerNorm's; specs describe RMSNorms)"
        return f" (there is {', '.join(found)}; if that is the same thing, add it under this name)"

    # ---- the kinds of layer

    def family(self) -> tuple[Family, str] | None:
        """The family of the layers (of the linear ones, where kinds alternate) and the key that tells."""
        if self.has("linear_attn_config") or self.has("linear_num_heads"):
            return "gated_delta_net", "linear_attn_config describes Kimi delta attention"
        if self.has("linear_num_value_heads"):
            return "gated_delta_net", "linear_num_value_heads belongs to a gated delta net"
        if self.has("kv_lora_rank"):
            return "mla", "kv_lora_rank belongs to multi-head latent attention"
        if "num_key_value_heads" in self.values:
            return "gqa", "num_key_value_heads belongs to grouped-query attention"
        return None

    def refuse_what_is_not_described(self) -> None:
        """Note a problem for each thing that no entry could say."""
        for key, why in _NOT_DESCRIBED.items():
            if self.values.get(key):
                self.problems.append(f"{key} = {_shown(self.values[key])}: {why}")
        if self.values.get("model_type") in _LAYER_NORMS:
            self.problems.append("rms_norm_eps: this model type's norms are LayerNorms all the same; specs describe RMSNorms")
        if self.values.get("use_mla") is False and self.has("kv_lora_rank"):
            self.problems.append("use_mla = false beside kv_lora_rank: which of the two attentions is meant?")

    def layers(self, total: int, model_type: str, gate: GateWords | None) -> dict[str, LayerKind]:
        """The kinds of layer by name, with their places. On a problem the result means nothing."""
        found = self.family()
        if found is None or not 1 <= total <= MOST_LAYERS:
            if found is None:
                self.problems.append(
                    "none of kv_lora_rank, linear_num_value_heads, linear_attn_config and num_key_value_heads is there, "
                    "so the kind of attention cannot be told"
                )
            else:
                self.problems.append(f"num_hidden_layers: expected 1 to {MOST_LAYERS}, got {total}")
            return {}
        words = layer_words(self, total, model_type, linear=found[0] == "gated_delta_net")
        kinds: dict[str, LayerKind] = {}
        places = {word: [i for i, at in enumerate(words) if at == word] for word in dict.fromkeys(words)}
        for word, indices in places.items():
            at = _at(indices, total, rest=_is_rest(indices, places))
            if word == "linear":
                name, kind = self._delta_net(at, gate)
                kinds[name] = kind
            elif self.has("kv_lora_rank"):
                if word == "sliding":
                    self.problems.append("latent attention with a sliding window, which no entry can say")
                kinds["mla"] = self._mla(at)
            else:
                kinds[word] = self._gqa(at, sliding=word == "sliding")
        return kinds

    def _mla(self, at: At) -> MLAKind:
        if "q_lora_rank" not in self.values:
            self.problems.append("q_lora_rank is missing; null would say that queries are projected directly")
        q_lora_rank = self.count("q_lora_rank") if self.has("q_lora_rank") else None
        yarn = self._yarn()
        kind = MLAKind(
            family="mla",
            num_heads=self.count("num_attention_heads"),
            q_lora_rank="none" if q_lora_rank is None else q_lora_rank,
            kv_lora_rank=self.count("kv_lora_rank"),
            qk_nope_head_dim=self.count("qk_nope_head_dim"),
            qk_rope_head_dim=self.count("qk_rope_head_dim"),
            v_head_dim=self.count("v_head_dim"),
            at=at,
            yarn=yarn,
        )
        width = self.values.get("qk_head_dim")
        if width is not None and width != kind.qk_nope_head_dim + kind.qk_rope_head_dim:
            self.problems.append(
                f"qk_head_dim: {_shown(width)} is not {kind.qk_nope_head_dim} + {kind.qk_rope_head_dim}, its two parts"
            )
        return kind

    def _yarn(self) -> Yarn | None:
        rope = next((self.values[key] for key in ("rope_scaling", "rope_parameters") if self.has(key)), None)
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) in ("default", None):
            return None
        # DeepSeek's code corrects the scale where mscale_all_dim is set and not 0, and only there.
        weight, factor = rope.get("mscale_all_dim"), rope.get("factor")
        if not weight:
            return None
        if type(weight) not in (int, float) or type(factor) not in (int, float):
            self.problems.append(f"rope_scaling: expected numbers, got mscale_all_dim {weight!r} and factor {factor!r}")
            return None
        return Yarn(factor=float(factor), mscale_all_dim=float(weight))

    def _delta_net(self, at: At, gate: GateWords | None) -> tuple[str, GatedDeltaNetKind]:
        said = self.values.get("output_gate_type")
        activation = (
            {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}.get(said) if isinstance(said, str) else None
        )
        kimi = self.values.get("linear_attn_config")
        is_kimi = kimi is not None or self.has("linear_num_heads")
        if gate is None:
            gate = GateWords(activation="sigmoid" if is_kimi else "silu", norm_before_gate=True, group_size="none")
            if activation is None:
                self.notes.append(
                    f"the output gate is not said; {gate.activation}, norm first, was written because "
                    f"{'Kimi' if is_kimi else 'Qwen'}'s layers have that: check the layer's gated norm"
                )
        if activation == "silu" or activation == "sigmoid":
            gate = GateWords(activation=activation, norm_before_gate=gate.norm_before_gate, group_size=gate.group_size)
        if not is_kimi:
            return "gdn", GatedDeltaNetKind(
                family="gated_delta_net",
                num_k_heads=self.count("linear_num_key_heads"),
                num_v_heads=self.count("linear_num_value_heads"),
                head_k_dim=self.count("linear_key_head_dim"),
                head_v_dim=self.count("linear_value_head_dim"),
                conv_kernel_size=self.count("linear_conv_kernel_dim"),
                output_norm=gate,
                at=at,
            )
        nested = isinstance(kimi, Mapping) and "num_heads" in kimi
        part = HFConfig(kimi, self.problems) if nested and isinstance(kimi, Mapping) else self
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
        if not nested:
            names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        heads, width, taps = map(part.count, names)
        return "kda", GatedDeltaNetKind(
            family="gated_delta_net",
            num_k_heads=heads,
            num_v_heads=heads,
            head_k_dim=width,
            head_v_dim=width,
            conv_kernel_size=taps,
            output_norm=gate,
            at=at,
        )

    def _gqa(self, at: At, *, sliding: bool) -> GQAKind:
        heads = self.count("num_attention_heads")
        v_head_dim = self.count("v_head_dim") if self.has("v_head_dim") else None
        if self.has("head_dim"):
            head_dim = self.count("head_dim")
        else:
            hidden_size = self.count("hidden_size")
            head_dim = hidden_size // max(heads, 1)
            note = f"head_dim is not said; it is hidden_size / num_attention_heads = {head_dim}, as Llama's code has it"
            if heads and hidden_size % heads:
                self.problems.append("head_dim is missing, and num_attention_heads does not divide hidden_size")
            elif note not in self.notes:
                self.notes.append(note)
        if self.has("num_key_value_heads"):
            num_kv_heads = self.count("num_key_value_heads")
        elif "num_key_value_heads" in self.values:  # transformers: null means as many as query heads
            num_kv_heads = heads
        else:
            num_kv_heads = self.count("num_key_value_heads")
        return GQAKind(
            family="gqa",
            num_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            sliding_window=self.count("sliding_window") if sliding else "off",
            has_sinks=False,
            at=at,
            v_head_dim=None if v_head_dim == head_dim else v_head_dim,
            softmax_scale=self._scale(head_dim),
        )

    def _scale(self, head_dim: int) -> float | None:
        scale = None
        if self.has("attention_multiplier"):  # Granite
            scale = self.number("attention_multiplier")
        elif self.has("query_pre_attn_scalar"):  # Gemma
            scale = self.number("query_pre_attn_scalar") ** -0.5
        return None if scale is None or scale == max(head_dim, 1) ** -0.5 else scale


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """The language model's part of a config, and the key it stands under; the whole config where it is not composite."""
    for key in TEXT_PARTS:
        part = config.get(key)
        if isinstance(part, Mapping):
            return part, key
        inner = config.get("thinker_config")
        if isinstance(inner, Mapping) and isinstance(inner.get(key), Mapping):
            return inner[key], f"thinker_config.{key}"
    return config, None


def _is_rest(indices: Sequence[int], places: Mapping[str, Sequence[int]]) -> bool:
    return len(places) > 1 and indices is max(places.values(), key=len)


def _at(indices: Sequence[int], total: int, *, rest: bool) -> At:
    """The shortest way to write these places."""
    if len(indices) == total:
        return "all"
    if rest:
        return "rest"
    step = indices[1] - indices[0] if len(indices) > 1 else 0
    if step and list(indices) == list(range(indices[0], total, step)):
        return Every(step=step, start=indices[0])
    return list(indices)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
