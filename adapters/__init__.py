"""Floor 1: what a layer says, in one language. Specs, and the adapters that read layers into them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .activation_quant import ActivationQuant, ActivationQuantError
    from .base import Adapter, Facts
    from .builtin import BUILTIN
    from .deepseek_v3 import DEEPSEEK_V3
    from .errors import (
        ArgumentError,
        FactsError,
        InnerLayerError,
        LayerfuseError,
        MissingAttributeError,
        ParallelConflictError,
        ParallelUnknownError,
        SpecError,
        UnknownLayerError,
    )
    from .explaining import Explanation
    from .gpt_oss import GPT_OSS
    from .kimi_k2 import KIMI_K2
    from .kimi_linear import KIMI_LINEAR
    from .linear_quant import activation_quant_of, describe_linear_quant
    from .parallel import tensor_parallel
    from .qwen3_next import QWEN3_NEXT
    from .reader import LayerReader
    from .rope_source import rope
    from .sources import const, gated_norm, layer_norm, norm
    from .specs import (
        NO_ROPE,
        WHOLE,
        ExpertsSpec,
        FinalNormSpec,
        GatedDeltaNetKernelSpec,
        GatedDeltaNetSpec,
        GatedMLPSpec,
        GatedNormSpec,
        GQAKernelSpec,
        GQASpec,
        KernelSpec,
        LayerNormSpec,
        LayerSpec,
        LinearSpec,
        Mamba2Spec,
        MLAKernelSpec,
        MLASpec,
        MLPSpec,
        NormSpec,
        OtherMixerSpec,
        Parallel,
        ResidualSpec,
        RopeSpec,
        WeightSpec,
    )

__all__ = [
    "BUILTIN",
    "DEEPSEEK_V3",
    "GPT_OSS",
    "KIMI_K2",
    "KIMI_LINEAR",
    "NO_ROPE",
    "QWEN3_NEXT",
    "WHOLE",
    "ActivationQuant",
    "ActivationQuantError",
    "Adapter",
    "ArgumentError",
    "ExpertsSpec",
    "Explanation",
    "Facts",
    "FactsError",
    "FinalNormSpec",
    "GQAKernelSpec",
    "GQASpec",
    "GatedDeltaNetKernelSpec",
    "GatedDeltaNetSpec",
    "GatedMLPSpec",
    "GatedNormSpec",
    "InnerLayerError",
    "KernelSpec",
    "LayerNormSpec",
    "LayerReader",
    "LayerSpec",
    "LayerfuseError",
    "LinearSpec",
    "MLAKernelSpec",
    "MLASpec",
    "MLPSpec",
    "Mamba2Spec",
    "MissingAttributeError",
    "NormSpec",
    "OtherMixerSpec",
    "Parallel",
    "ParallelConflictError",
    "ParallelUnknownError",
    "ResidualSpec",
    "RopeSpec",
    "SpecError",
    "UnknownLayerError",
    "WeightSpec",
    "activation_quant_of",
    "const",
    "describe_linear_quant",
    "gated_norm",
    "layer_norm",
    "norm",
    "rope",
    "tensor_parallel",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "BUILTIN": ".builtin",
        "Adapter": ".base",
        "Facts": ".base",
        "DEEPSEEK_V3": ".deepseek_v3",
        "GPT_OSS": ".gpt_oss",
        "KIMI_K2": ".kimi_k2",
        "KIMI_LINEAR": ".kimi_linear",
        "QWEN3_NEXT": ".qwen3_next",
        "Explanation": ".explaining",
        "LayerReader": ".reader",
        "tensor_parallel": ".parallel",
        **dict.fromkeys(("ActivationQuant", "ActivationQuantError"), ".activation_quant"),
        **dict.fromkeys(("activation_quant_of", "describe_linear_quant"), ".linear_quant"),
        "rope": ".rope_source",
        **dict.fromkeys(("const", "gated_norm", "layer_norm", "norm"), ".sources"),
        **dict.fromkeys(
            (
                "ArgumentError",
                "FactsError",
                "InnerLayerError",
                "LayerfuseError",
                "MissingAttributeError",
                "ParallelConflictError",
                "ParallelUnknownError",
                "SpecError",
                "UnknownLayerError",
            ),
            ".errors",
        ),
        **dict.fromkeys(
            (
                "NO_ROPE",
                "WHOLE",
                "ExpertsSpec",
                "FinalNormSpec",
                "GQAKernelSpec",
                "GQASpec",
                "GatedDeltaNetKernelSpec",
                "GatedDeltaNetSpec",
                "GatedMLPSpec",
                "GatedNormSpec",
                "KernelSpec",
                "LayerNormSpec",
                "LayerSpec",
                "LinearSpec",
                "MLAKernelSpec",
                "MLASpec",
                "MLPSpec",
                "Mamba2Spec",
                "NormSpec",
                "OtherMixerSpec",
                "Parallel",
                "ResidualSpec",
                "RopeSpec",
                "WeightSpec",
            ),
            ".specs",
        ),
    },
)
