"""A Hugging Face config.json, read key by key. What is derived is noted; what it does not say is collected as a problem."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from attrs import field, frozen

from ..adapters.errors import shown
from ..adapters.spec_fields import LARGEST, as_float
from .hf_keys import GDN_KEYS, GQA_KEYS, KDA_KEYS, MAMBA2_KEYS, MLA_KEYS, NEMOTRON_H_MAMBA2_KEYS, Keys

Family = Literal["mla", "gated_delta_net", "gqa"]

FAMILIES: Mapping[str, str] = {
    "mla": "multi-head latent attention",
    "gated_delta_net": "a gated delta net",
    "gqa": "grouped-query attention",
}
"""The families in words."""

TEXT_PARTS = ("text_config", "language_config", "llm_config")
"""Where composite (multimodal) configs keep their language model."""

OF_HYBRIDS = (
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
)
"""Keys of layers that are no attention."""

NOT_DESCRIBED: Mapping[str, str] = {
    **dict.fromkeys(
        OF_HYBRIDS, "layers that are no attention (state-space, convolution), which are not read of this model type"
    ),
    **dict.fromkeys(
        (
            "global_head_dim",
            "num_global_key_value_heads",
            "attention_other_setting",
            "block_configs",
            "per_layer_config",
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
"""Key of what no entry could say -> why."""

_OTHER_STREAMS = re.compile(r"^m?hc_|hyper_?connection|residual_stream|residual_gate|^altup_|^laurel_|^n(um)?_streams$")
"""Keys of hyper-connections (DeepSeek-V4, GLM-5-Next, HY-V4, Qwen4), of AltUp and LAuReL (Gemma-3n) and of gated adds (Muse Spark)."""

_SIDE_BY_SIDE = re.compile(r"parallel_(residual|attn|attention|block)")
"""Keys of layers that add attention and MLP to the stream at once (GPT-NeoX, Falcon), so that no norm stands behind the first add."""

_CODE_DIFFERS: Mapping[str, str] = {
    "phimoe": "its norms are LayerNorms, though their epsilon is called rms_norm_eps, and models.toml cannot say LayerNorm",
}
"""Model types whose transformers code is known to contradict their config."""

_OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "num_query_groups", "multi_query_group_num", "multi_query"),
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "rms_norm_eps": ("norm_eps", "norm_epsilon", "layernorm_epsilon", "layer_norm_eps", "layer_norm_epsilon"),
}

READ = {
    *(
        name
        for keys in (MLA_KEYS, GQA_KEYS, GDN_KEYS, KDA_KEYS, MAMBA2_KEYS, NEMOTRON_H_MAMBA2_KEYS)
        for names in keys.values()
        for name in names
    ),
    *(name for key, others in _OTHER_SPELLINGS.items() for name in (key, *others)),
    *("intermediate_size", "sliding_window", "layer_types"),
}
"""Keys of sizes and kinds of layers, which are right as they are."""

MEANT = "did you mean"
"""How a refusal begins to say that a key is misspelt."""


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
        if type(value) is int and 0 <= value <= LARGEST:
            return value
        if key not in self.values or value is None:
            self.problems.append(f"{key} is {'null' if key in self.values else 'missing'}{self._instead(key)}")
        else:
            most = "" if type(value) is not int else f" of at most {LARGEST}" if value > 0 else " of at least 0"
            self.problems.append(f"{key}: expected a whole number{most}, got {shown(value)}")
        return 1

    def counts(self, keys: Keys) -> dict[str, Any]:
        """The sizes of a kind of layer by its fields, each as `count`."""
        return {field: self.count(names[0]) for field, names in keys.items()}

    def untold(self, problem: str, total: int) -> list[Any]:
        """Note why the kinds of so many layers cannot be told. What is returned stands in, and means nothing."""
        self.problems.append(problem)
        return ["full"] * total

    def number(self, key: str) -> float:
        """A positive number; else as `count`."""
        value = self.values.get(key)
        number = as_float(value)
        if type(number) is float and 0 < number < math.inf:
            return number
        if value is None:
            self.problems.append(f"{key} is {'null' if key in self.values else 'missing'}{self._instead(key)}")
        else:
            self.problems.append(f"{key}: expected a number above 0, got {shown(value)}")
        return 1.0

    def misspelt(self, key: str) -> str:
        """What a key that is missing may be called here, as the end of a sentence; empty where no key is close to it."""
        import difflib  # only ever needed for a message

        # The sizes that are read have names much like one another, none of which is a misspelling.
        others = [name for name, value in self.values.items() if name not in READ and type(as_float(value)) is float]
        near = difflib.get_close_matches(key, others, n=1, cutoff=0.85)
        return "".join(f"; {MEANT} {key} by {name} = {shown(self.values[name])}?" for name in near)

    def _instead(self, key: str) -> str:
        found = [f"{other} = {shown(self.values[other])}" for other in _OTHER_SPELLINGS.get(key, ()) if self.has(other)]
        if not found:
            return self.misspelt(key)
        if key == "rms_norm_eps":
            return f" (there is {', '.join(found)}, which may be a LayerNorm's, and models.toml cannot say LayerNorm)"
        return f" (there is {', '.join(found)}; if that is the same thing, add it under this name)"

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

    def refuse_another_family(self, known: str, families: Collection[str]) -> None:
        """Note a problem where the keys say other families than what the config calls itself is known to have.

        Args:
            known: what tells, as in "model_type deepseek_v3".
            families: those of the declared model of that architecture.
        """
        found = self.family()
        if found is None:
            return
        linear = "linear_attn_config or linear_num_value_heads"
        tells = (
            ("mla", "kv_lora_rank", self.has("kv_lora_rank")),
            ("gated_delta_net", linear, found[0] == "gated_delta_net"),
        )
        for family, key, there in tells:
            if family in families and not there:
                self.problems.append(
                    f"{known} has {FAMILIES[family]}, and {key} is missing or null, so that the keys say "
                    f"{FAMILIES[found[0]]}: which is meant?"
                )
            elif there and family not in families:
                known_ones = " and ".join(FAMILIES[name] for name in FAMILIES if name in families)
                self.problems.append(f"{known} has {known_ones}, and {key} says {FAMILIES[family]}: which is meant?")

    def said_by(self, keys: re.Pattern[str]) -> str | None:
        """The first of these keys that is switched on, with its value; None where none is."""
        return next(
            (f"{key} = {shown(value)}" for key, value in self.values.items() if value and keys.search(key)), None
        )

    def refuse_what_is_not_described(self, read: Collection[str] = ()) -> None:
        """Note a problem for each thing that no entry could say, but for the keys that are `read`."""
        for key, why in NOT_DESCRIBED.items():
            if self.values.get(key) and key not in read:
                self.problems.append(f"{key} = {shown(self.values[key])}: {why}")
        beside = self.said_by(_SIDE_BY_SIDE)
        if beside is not None:
            self.problems.append(f"{beside}: attention and MLP side by side in one add, which no entry can say")
        streams = self.said_by(_OTHER_STREAMS)
        if streams is not None:
            self.problems.append(
                f"{streams}: a residual stream that is mixed (of several streams, or gated) where others add to it, which no "
                "spec describes"
            )
        model_type = self.values.get("model_type")
        if isinstance(model_type, str) and model_type in _CODE_DIFFERS:
            self.problems.append(f"model_type {model_type}: {_CODE_DIFFERS[model_type]}")
        for key in ("qk_nope_head_dim", "qk_rope_head_dim"):
            if self.values.get(key) and not self.has("kv_lora_rank"):
                self.problems.append(
                    f"{key} = {shown(self.values[key])} belongs to multi-head latent attention, and kv_lora_rank is "
                    f"{'null' if 'kv_lora_rank' in self.values else 'missing'}"
                )
        if self.values.get("use_mla") is False and self.has("kv_lora_rank"):
            self.problems.append("use_mla = false beside kv_lora_rank: which of the two attentions is meant?")


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
