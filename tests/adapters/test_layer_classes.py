"""Every layer class that was found in the four engines for these architectures is known, by its full name alone.

The list, `tests/data/layer_classes.toml`, is that of the sources of the four.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT
from standins import layer_class

from layerfuse import registry
from layerfuse.adapters import GatedDeltaNetSpec, GQASpec, MLAKernelSpec, MLASpec, ResidualSpec
from layerfuse.adapters.specs import FAMILY_OF

_HF = "transformers.models"
_V = "vllm.model_executor"
_SG = "sglang.srt.models"
_V32 = "vllm.models.deepseek_v32.attention:DeepseekV32Attention"
_KERNEL = f"{_V}.layers.attention.mla_attention:MLAAttention"
KINDS = tomllib.loads((ROOT / "tests" / "data" / "layer_classes.toml").read_text(encoding="utf-8"))
CASES = [
    (kind, (names,) if isinstance(names, str) else tuple(names)) for kind, listed in KINDS.items() for names in listed
]


def with_bases(names: tuple[str, ...]) -> type:
    cls: type | None = None
    for name in reversed(names):
        cls = layer_class(name) if cls is None else layer_class(name, cls)
    assert cls is not None
    return cls


def test_every_class_is_known_by_its_name_or_its_bases() -> None:
    known = {names: registry.default.readers_for(with_bases(names)) for _, names in CASES}
    assert [names[0] for _, names in CASES if not known[names]] == []
    families = {names: FAMILY_OF[readers[0].facts.spec] for names, readers in known.items()}
    wrong = [
        (names[0], families[names])
        for kind, names in CASES
        if not (families[names].endswith("_kernel") if kind == "kernel" else families[names] == kind)
    ]
    assert wrong == []


def test_transformers_has_every_class_under_its_name() -> None:
    pytest.importorskip("transformers")
    classes = [name.partition(":")[::2] for _, (name, *_) in CASES if _HF in name]
    missing = [(module, name) for module, name in classes if not hasattr(importlib.import_module(module), name)]
    assert missing == []
    assert len(classes) > 60


def test_what_a_class_inherits_does_not_shadow_what_it_is() -> None:
    # vLLM's sparse MLA is a kernel layer by its base, and a whole attention layer by its own name.
    sparse = registry.default.readers_for(with_bases((_V32, _KERNEL)))
    assert [reader.facts.spec for reader in sparse] == [MLASpec]
    assert [reader.facts.spec for reader in registry.default.readers_for(layer_class(_KERNEL))] == [MLAKernelSpec]


def test_sglangs_attention_decoder_layers_are_two_kinds() -> None:
    for name in ("qwen3_next:Qwen3HybridAttentionDecoderLayer", "qwen3_5:Qwen3_5AttentionDecoderLayer"):
        readers = registry.default.readers_for(layer_class(f"{_SG}.{name}"))
        assert [reader.facts.spec for reader in readers] == [GQASpec, ResidualSpec]


def test_every_declared_class_is_one_that_was_found_in_an_engine() -> None:
    """The other way round: a misspelt or stale declaration would never be noticed."""
    found = {name for _, names in CASES for name in names}
    older = {"vllm:Qwen3NextGatedDeltaNet"}  # of earlier vLLM releases
    stale = [
        key
        for key, owner in registry.layer_classes().items()
        if key not in older
        # Of decoders there are many, which are held to the engines themselves.
        and owner
        not in (
            "decoders",
            "layer_norm_decoders",
            "vllm_decoders",
            "hybrids",
            "vllm_hybrids",
            "vllm_uncompiled",
            "sglang_decoders",
            "sglang_hybrids",
        )
        and not any(
            name.partition(":")[2] == key.partition(":")[2] and name.startswith(key.partition(":")[0]) for name in found
        )
    ]
    assert stale == []


def test_every_common_decoder_of_transformers_is_a_class_of_it() -> None:
    transformers = pytest.importorskip("transformers")
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    defined = {name for file in files for name in re.findall(r"^class (\w+)\(", file.read_text(encoding="utf-8"), re.M)}
    declared = {
        key.partition(":")[2]
        for name in ("decoders", "layer_norm_decoders", "hybrids")
        for key in registry.adapters()[name].layers
        if key.startswith("transformers")
    }
    assert declared - defined == set()


def test_vision_towers_are_known_to_be_none_of_ours() -> None:
    for name in (
        f"{_HF}.kimi_k25.modeling_kimi_k25:Kimi_K25VisionAttention",
        f"{_V}.layers.attention.mm_encoder_attention:MMEncoderAttention",
        "sglang.srt.layers.attention.vision:VisionAttention",
    ):
        cls = layer_class(name)
        assert registry.default.readers_for(cls) == ()
        assert registry.unknown_in(cls()) == []


def test_glm5_next_layers_of_transformers_read_although_no_entry_declares_their_dimensions() -> None:
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    import torch

    config = modeling.Glm5NextTextConfig(num_hidden_layers=4)
    with torch.device("meta"):
        kinds = {kind: i for i, kind in enumerate(config.layer_types)}
        delta = modeling.Glm5NextTextLinearAttention(config, kinds["linear_attention"])
        index = next(i for kind, i in kinds.items() if kind != "linear_attention")
        attention = modeling.Glm5NextTextAttention(config, index)
    spec = registry.spec_for(attention)
    assert (spec.qk_rope_head_dim, spec.latent_width, spec.layer_index) == (0, config.kv_lora_rank, index)
    # Unlike every other transformers MLA, its latent norms follow the config.
    assert spec.kv_norm.epsilon == config.rms_norm_eps
    assert isinstance(registry.spec_for(delta), GatedDeltaNetSpec)
    assert registry.spec_for(delta).output_norm.activation == "sigmoid"
