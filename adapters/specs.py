"""The spec types: what a layer is, in one language.

Frozen, slotted, keyword-only attrs classes. Head counts come in pairs, the whole model's and this rank's; validation
ties them together with the tensor-parallel degree, and reports every contradiction at once.

Field names are those of the published Hugging Face configs. All counts and widths are in elements, never bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from .kernel_specs import GatedDeltaNetKernelSpec, GQAKernelSpec, KernelSpec, MLAKernelSpec
from .layer_specs import (
    ExpertsSpec,
    FinalNormSpec,
    GatedDeltaNetSpec,
    GatedMLPSpec,
    GQASpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ResidualSpec,
)
from .linear_specs import LinearSpec, WeightSpec
from .mixer_specs import Mamba2Spec, OtherMixerSpec
from .norm_specs import WHOLE, GatedNormSpec, HeadPair, LayerNormSpec, NormSpec, Parallel, shard_heads, shard_kv_heads
from .rope_specs import NO_ROPE, RopeSpec
from .spec_fields import ACTIVATIONS, LARGEST, MLP_ACTIVATIONS, goes_with, kind_of, problem_of

__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "FAMILY_OF",
    "LARGEST",
    "MLP_ACTIVATIONS",
    "NO_ROPE",
    "WHOLE",
    "AnySpec",
    "AttentionSpec",
    "ExpertsSpec",
    "FinalNormSpec",
    "GQAKernelSpec",
    "GQASpec",
    "GatedDeltaNetKernelSpec",
    "GatedDeltaNetSpec",
    "GatedMLPSpec",
    "GatedNormSpec",
    "HeadPair",
    "KernelSpec",
    "LayerNormSpec",
    "LayerSpec",
    "LinearSpec",
    "MLAKernelSpec",
    "MLASpec",
    "MLPSpec",
    "Mamba2Spec",
    "MixerSpec",
    "NormSpec",
    "OtherMixerSpec",
    "Parallel",
    "ResidualSpec",
    "RopeSpec",
    "WeightSpec",
    "goes_with",
    "kind_of",
    "problem_of",
    "shard_heads",
    "shard_kv_heads",
]

AttentionSpec: TypeAlias = MLASpec | GatedDeltaNetSpec | GQASpec
MixerSpec: TypeAlias = AttentionSpec | Mamba2Spec | OtherMixerSpec
AnySpec: TypeAlias = (
    MLASpec
    | GatedDeltaNetSpec
    | GQASpec
    | Mamba2Spec
    | OtherMixerSpec
    | GatedMLPSpec
    | MLPSpec
    | ResidualSpec
    | FinalNormSpec
    | MLAKernelSpec
    | GQAKernelSpec
    | GatedDeltaNetKernelSpec
)

FAMILIES: dict[str, type[Any]] = {
    "mla": MLASpec,
    "gated_delta_net": GatedDeltaNetSpec,
    "gqa": GQASpec,
    "mamba2": Mamba2Spec,
    "other": OtherMixerSpec,
    "gated_mlp": GatedMLPSpec,
    "mlp": MLPSpec,
    "residual": ResidualSpec,
    "final": FinalNormSpec,
    "mla_kernel": MLAKernelSpec,
    "gqa_kernel": GQAKernelSpec,
    "gated_delta_net_kernel": GatedDeltaNetKernelSpec,
}
"""The families by the name that declarations use."""

FAMILY_OF: dict[type[Any], str] = {spec: name for name, spec in FAMILIES.items()}
