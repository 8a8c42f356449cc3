"""What is known of `mla_decode` in any engine, without one and without torch: its names, and the architectures whose layers are of a known class."""

from __future__ import annotations

NAME = "mla_decode"

QUANTISED = "mla_decode_group_quant"
"""Its form that quantises the query latent too."""

SPARSE_MODELS = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
"""Architectures of models.toml whose attention is sparse."""

SPARSE = "its attention is sparse: an indexer reads the query latent in between"

HELD = frozenset({
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "KimiK25ForConditionalGeneration", "KimiLinearForCausalLM",
    "LongcatFlashForCausalLM",
})  # fmt: skip
"""Architectures of models.toml whose layers hold the class that it stands in, in vLLM 0.26 and 0.33 and in SGLang 0.5.23."""
