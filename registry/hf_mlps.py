"""The gated MLPs and routed experts that a Hugging Face config describes, for an architecture that a declared model is known to have.

Whether an MLP is gated at all, and what the experts' width is called, no config says; so where no declared model tells, none is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..adapters.conversions import mlp_activation
from ..adapters.errors import shown
from ..adapters.spec_fields import as_float
from ..adapters.specs import MLP_ACTIVATIONS
from .catalog import ModelEntry
from .hf_config import HFConfig
from .hf_layers import at_of, is_rest
from .kinds import SHARED_EXPERTS, ExpertsKind, MLPKind

LEFT_OUT = " are left out: "
"""Between what the entry does not have, and why."""


def mlps_of(config: HFConfig, total: int, sibling: ModelEntry) -> dict[str, MLPKind]:
    """The kinds of gated MLP by name, with their places; none, and a note, where the config does not say enough."""
    asked = HFConfig(config.values)
    if not sibling.mlps:
        dense = _sparse(asked, total, sibling).count(False)
        if dense and not asked.problems and all(sibling.mixture_at()):
            config.notes.append(
                f"the dense MLPs of {dense} of {total} layers{LEFT_OUT}{sibling.name} has none, which would tell what they are"
            )
        return {}
    activation = _activation(asked, sibling)
    sparse = _sparse(asked, total, sibling)
    places = {
        "dense": [index for index, mixture in enumerate(sparse) if not mixture],
        SHARED_EXPERTS: [index for index, mixture in enumerate(sparse) if mixture and _has_shared(config)],
    }
    places = {name: indices for name, indices in places.items() if indices}
    limit = asked.number("swiglu_limit") if asked.has("swiglu_limit") else None
    gate_multiplier, down_multiplier = _multipliers(asked)
    kinds = {
        name: MLPKind(
            intermediate_size=_shared_width(asked) if name == SHARED_EXPERTS else _dense_width(asked),
            activation=activation,
            at=at_of(indices, total, rest=is_rest(indices, places)),
            swiglu_limit=limit,
            gate_multiplier=gate_multiplier,
            down_multiplier=down_multiplier,
        )
        for name, indices in places.items()
    }
    if asked.problems:
        config.notes.append(f"the gated MLPs{LEFT_OUT}{'; '.join(dict.fromkeys(asked.problems))}")
        return {}
    return kinds


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
"""What configs call the same thing, the likelier first."""


def experts_of(
    config: HFConfig, total: int, sibling: ModelEntry | None, mlps: Mapping[str, MLPKind]
) -> ExpertsKind | None:
    """The routed experts beside these MLPs; None, and a note, where the config does not say enough.

    Where only some layers have some and the declared model has no dense MLP, those are not declared.
    """
    if sibling is None:
        said = next((f"{key} = {shown(config.values[key])}" for key in _EXPERTS if config.values.get(key)), None)
        if said is not None:
            config.notes.append(
                f"the routed experts{LEFT_OUT}no declared model of this architecture tells which layers have some and how wide they are; "
                f"it says {said}: declare them under experts"
            )
        return None
    if sibling.experts is None:
        return None
    asked = HFConfig(config.values)
    keys = [next((key for key in keys if asked.has(key)), keys[0]) for keys in (_EXPERTS, _PER_TOKEN, _EXPERT_WIDTH)]
    number, each, width = map(asked.count, keys)
    at = sibling.experts.at
    if at == "rest":
        sparse = _sparse(asked, total, sibling)
        if not any(sparse) and not asked.problems:
            return None
        if not mlps and not all(sparse):
            at = at_of([index for index, mixture in enumerate(sparse) if mixture], total, rest=False)
    if asked.problems:
        config.notes.append(f"the routed experts{LEFT_OUT}{'; '.join(dict.fromkeys(asked.problems))}")
        return None
    return ExpertsKind(num_experts=number, experts_per_token=each, intermediate_size=width, at=at)


def _activation(config: HFConfig, sibling: ModelEntry) -> Any:
    """Where the config leaves it to the code, it is the declared model's."""
    if not config.has("hidden_act"):
        return next(iter(sibling.mlps.values())).activation
    word = mlp_activation(config.values["hidden_act"])
    if word not in MLP_ACTIVATIONS:
        known = ", ".join(MLP_ACTIVATIONS)
        config.problems.append(
            f"hidden_act: expected one that a spec describes ({known}), got {shown(config.values['hidden_act'])}"
        )
    return word


def _multipliers(config: HFConfig) -> tuple[float, float]:
    """Falcon-H1's factors on the gate and on the result."""
    said: Any = config.values.get("mlp_multipliers")
    if said is None:
        return 1.0, 1.0
    factors = [as_float(each) for each in said] if isinstance(said, (list, tuple)) else []
    if len(factors) != 2 or not all(type(each) is float and math.isfinite(each) for each in factors):
        config.problems.append(
            f"mlp_multipliers: expected two numbers, those of the gate and of the result, got {shown(said)}"
        )
        return 1.0, 1.0
    return factors[0], factors[1]


def _dense_width(config: HFConfig) -> int:
    """Granite 4 keeps the width of its experts under the usual key, and that of its one MLP elsewhere."""
    keys = ("ffn_hidden_size", "shared_intermediate_size", "intermediate_size")
    return config.count(next((key for key in keys if config.has(key)), keys[-1]))


_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def _has_shared(config: HFConfig) -> bool:
    return not any(
        config.values.get(name) == 0
        for name in ("shared_expert_intermediate_size", "shared_intermediate_size", *_SHARED)
    )


def _shared_width(config: HFConfig) -> int:
    if config.has("shared_expert_intermediate_size"):
        return config.count("shared_expert_intermediate_size")
    if config.has("shared_intermediate_size"):
        config.problems.append(
            "shared_intermediate_size is that of an MLP which stands beside the mixture, and not in it"
        )
        return 1
    number = next((name for name in _SHARED if config.has(name)), _SHARED[0])
    return config.count("moe_intermediate_size") * config.count(number)


def _sparse(config: HFConfig, total: int, sibling: ModelEntry) -> list[bool]:
    """Which decoder layers have a mixture of experts in the place of their MLP.

    Where the config leaves it to the code, it is all of them if the declared model has one in all.
    """
    values = config.values
    if config.has("ffn_hidden_size"):  # LongCat: its experts stand beside the MLPs
        return [False] * total
    if config.has("mlp_layer_types"):
        listed = values["mlp_layer_types"]
        if isinstance(listed, list) and len(listed) == total and all(word in ("dense", "sparse") for word in listed):
            return [word == "sparse" for word in listed]
        config.problems.append(f"mlp_layer_types: expected {total} times dense or sparse, got {shown(listed)}")
        return [False] * total
    if config.has("first_k_dense_replace"):
        first = config.count("first_k_dense_replace")
        step = max(1, config.count("moe_layer_freq")) if config.has("moe_layer_freq") else 1
        return [index >= first and index % step == 0 for index in range(total)]
    if any(
        map(config.has, ("num_experts", "decoder_sparse_step", "mlp_only_layers"))
    ):  # Qwen; transformers may save num_local_experts
        step = max(1, config.count("decoder_sparse_step")) if config.has("decoder_sparse_step") else 1
        dense = values["mlp_only_layers"] if isinstance(values.get("mlp_only_layers"), list) else []
        return [index not in dense and (index + 1) % step == 0 for index in range(total)]
    if config.has("moe_layer_start_index"):  # Ernie
        first, last = config.count("moe_layer_start_index"), total - 1
        if config.values.get("moe_layer_end_index") not in (None, -1):
            last = config.count("moe_layer_end_index")
        step = max(1, config.count("moe_layer_interval")) if config.has("moe_layer_interval") else 1
        return [first <= index <= last and (index + 1) % step == 0 for index in range(total)]
    if config.has("num_local_experts"):  # Mixtral; Granite 4's dense models have none
        return [values["num_local_experts"] != 0] * total
    if config.has("n_routed_experts") and all(sibling.mixture_at()):
        return [True] * total
    if config.has("n_routed_experts"):
        config.problems.append("neither mlp_layer_types nor first_k_dense_replace says which layers are dense")
    return [False] * total
