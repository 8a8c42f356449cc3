"""A census of an engine's text architectures: each built from a small config, read in full or said why not, on a page of the docs.

Knows no engine: the test of each builds the models and gives its own reasons.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

from layerfuse import registry
from layerfuse.adapters import (
    FinalNormSpec,
    GQASpec,
    KernelSpec,
    Mamba2Spec,
    MLASpec,
    MLPSpec,
    OtherMixerSpec,
    ResidualSpec,
    SpecError,
    UnknownLayerError,
)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "contract"))
import test_causal_classes as causal  # noqa: E402

Others = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Architecture -> the class of transformers whose config it is like, and what it asks for besides."""

MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_shared_experts": 1}
SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 1024,
}  # fmt: skip
BAILING = {
    **MIXTURE, "use_bias": False, "use_qkv_bias": False, "first_k_dense_replace": 1, "norm_topk_prob": True, "embedding_dropout": 0.0,
    "head_dim": 64, "rope_theta": 1e4,
}  # fmt: skip
BAILING_V2 = {
    **BAILING, "use_qk_norm": True, "use_rmsnorm": True, "score_function": "sigmoid", "n_group": 1, "topk_group": 1,
    "moe_router_enable_expert_bias": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
OTHERS: Others = {
    "BailingMoeForCausalLM": ("LlamaForCausalLM", BAILING),
    "BailingMoeV2ForCausalLM": ("LlamaForCausalLM", BAILING_V2),
    "ExaoneForCausalLM": ("LlamaForCausalLM", {"num_layers": 4, "layer_norm_epsilon": 1e-5, "activation_function": "silu"}),
    "ExaoneMoEForCausalLM": ("ExaoneMoeForCausalLM", {}),
    "IQuestCoderForCausalLM": ("LlamaForCausalLM", {}),
    "InternLM2ForCausalLM": ("LlamaForCausalLM", {"bias": False}),
    "InternLM3ForCausalLM": ("LlamaForCausalLM", {}),
    "MiMoForCausalLM": ("Qwen2ForCausalLM", SMALL),
    "MiniCPMForCausalLM": (
        "LlamaForCausalLM",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "num_experts": 0},
    ),
    "MistralLarge3ForCausalLM": ("DeepseekV3ForCausalLM", {}),
    "OrionForCausalLM": ("LlamaForCausalLM", {}),
    "PhiMoEForCausalLM": ("PhimoeForCausalLM", SMALL),
    "SolarForCausalLM": (
        "LlamaForCausalLM",
        {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]},
    ),
    "TeleFLMForCausalLM": ("LlamaForCausalLM", {"use_mup": False, "mup_scale_factor": 1.0, "input_mult": 1.0, "output_mult": 1.0}),
}  # fmt: skip
"""Those that transformers has no class for and both engines have."""


def config_of(name: str, others: Others, more: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A config.json: the default one of transformers' class, cut to a few layers.

    Args:
        name: the architecture.
        others: for those that transformers has no class of.
        more: class of transformers -> what the engine asks for, and its default config does not say.
    """
    like, besides = others.get(name, (name, {}))
    cls = getattr(transformers, like).config_class
    given = SMALL if like == "LlamaForCausalLM" and name != like else {}
    config = cls(**causal.WANTED.get(cls.model_type, {}), **given)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        causal.cut(part)
    said = json.loads(config.to_json_string(use_diff=False))
    return {**said, **more.get(like, {}), **besides, "architectures": [name]}


def answers(
    names: Iterable[str], others: Container[str], build: Callable[[str], tuple[Any, Any]], reasons: Mapping[str, str]
) -> Iterator[causal.Answer]:
    """Each architecture once.

    Args:
        names: of the architectures.
        others: those that transformers has no class of, and a config was made for.
        build: gives the model and its text config, or raises whatever it likes.
        reasons: architecture -> why it is not read in full.
    """
    for name in names:
        if not hasattr(transformers, name) and name not in others:
            yield causal.Answer(name, "not built", "transformers has no config for it, and none was made here")
            continue
        try:
            model, config = build(name)
        except Exception as error:
            yield causal.Answer(
                name, "not built", reasons.get(name, f"{type(error).__name__} on a CPU, from such a config")
            )
            continue
        yield answer(name, model, config, reasons)


def answer(name: str, model: Any, config: Any, reasons: Mapping[str, str]) -> causal.Answer:
    """What of this model is read. What its config says too is compared."""
    try:
        specs = registry.specs_in(model)
    except (UnknownLayerError, SpecError):
        return causal.Answer(name, "no", reasons.get(name, "its classes are not declared"))
    specs = [(path, spec) for path, spec in specs if not isinstance(spec, KernelSpec)]
    left = list(dict.fromkeys(what.partition(":")[2].partition(":")[0] for _, what in registry.unknown_in(model)))
    if left:
        return causal.Answer(name, "in part", reasons.get(name, f"nobody reads {', '.join(left)}"))
    check(name, specs, config)
    of = {
        kind: [spec for _, spec in specs if isinstance(spec, kind)] for kind in (ResidualSpec, FinalNormSpec, MLPSpec)
    }
    mixers = [spec for _, spec in specs if isinstance(spec, causal.MIXERS)]
    layers = of[ResidualSpec]
    alone = bool(layers) and all(spec.is_one_block for spec in layers)
    mixed = len({spec.layer_index for spec in of[MLPSpec]} | {s.layer_index for s in layers if s.experts is not None})
    if not layers or len(of[FinalNormSpec]) != 1 or (not alone and (len(mixers) < len(layers) or mixed < len(layers))):
        return causal.Answer(name, "in part", reasons[name])
    others = sorted({spec.mixer for spec in mixers if isinstance(spec, OtherMixerSpec)})
    if others:
        return causal.Answer(name, "its stream", f"known by name only: {', '.join(others)}")
    return causal.Answer(name, "in full")


VARYING = ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "LagunaForCausalLM")
"""Whose layers differ in their heads."""


def check(name: str, specs: list[tuple[str, Any]], config: Any) -> None:
    """Heads and sizes are those of the config."""
    for path, spec in specs:
        assert spec.hidden_size == config.hidden_size, (name, path)
        if isinstance(spec, GQASpec) and name not in VARYING:
            heads = config.num_attention_heads
            one = causal.said(config, "multi_query")
            kv_heads = causal.said(config, "num_key_value_heads", default=1 if one else heads)
            assert (spec.num_heads, spec.num_kv_heads) == (heads, kv_heads), (name, path)
        if isinstance(spec, Mamba2Spec):
            causal.check_mamba2(path, spec, config)
        if isinstance(spec, MLASpec):
            assert spec.num_heads == config.num_attention_heads, (name, path)
            for field in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                assert getattr(spec, field) == getattr(config, field), (name, path, field)


def check_second_of_two(name: str, specs: list[tuple[str, Any]], config: Any) -> None:
    """Heads and sizes are those of the config, and this rank holds its half."""
    check(name, specs, config)
    for path, spec in specs:
        assert (spec.parallel.size, spec.parallel.rank) == (2, 1), (name, path)
        if isinstance(spec, (GQASpec, MLASpec)):
            assert spec.num_local_heads * 2 == spec.num_heads, (name, path)
        if isinstance(spec, GQASpec):
            assert spec.num_local_kv_heads == max(1, spec.num_kv_heads // 2), (name, path)
        if isinstance(spec, (MLPSpec, Mamba2Spec)):
            assert spec.local_intermediate_size * 2 == spec.intermediate_size, (name, path)
        if isinstance(spec, Mamba2Spec):
            assert spec.num_local_groups == max(1, spec.num_groups // 2), (name, path)
            assert spec == spec.shard(1).shard(2, 1), (name, path)


def check_page(page: Path, engine: str, release: str, found: list[causal.Answer]) -> None:
    """The page of the docs says this; `UPDATE_DOCS=1` writes it."""
    words = ("in full", "its stream", "in part", "no", "not built")
    counts = {read: sum(each.read == read for each in found) for read in words}
    lines = "\n".join(map(str, found))
    text = f"""# Text models of {engine}

Each text architecture of {engine} {release}, its own classes built without a GPU, on the meta device: from the default config of transformers' class of that
name, or from a small one made for the test. {counts["in full"]} of {len(found)} are read in full: residual stream, attention, delta net or Mamba-2, MLP or experts,
final norm. Of {counts["its stream"]} the stream is read, so that it is planned, and its mixers are known by name. {counts["in part"]} are read in part, {counts["no"]} not at all. {counts["not built"]} were not built, so that nothing is said of them.
`make test-engines` reads them again and compares this page.

| class | read | why not |
|---|---|---|
{lines}
"""
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(text)
    assert page.read_text() == text


def read_on(page: Path) -> list[str]:
    """The architectures that the page says are read, in full or their stream."""
    rows = page.read_text().splitlines()
    return [row.split("`")[1] for row in rows if "| in full |" in row or "| its stream |" in row]
